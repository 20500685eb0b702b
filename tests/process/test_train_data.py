"""Does the command do what its help says, with the exit codes of the table?"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from trainer import data_cli

END = "<|endoftext|>"
COMMAND = [sys.executable, "-c", "from trainer.data_cli import main; main()"]


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TERM": "dumb", "COLUMNS": "100"},
    )


def run(*arguments: object) -> tuple[int, str, str]:
    """Run the command in a process of its own."""
    process = start(*arguments)
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    return process.returncode, out, err


def run_here(*arguments: object) -> tuple[int, str, str]:
    """Run the command in this process, which starts sooner."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = data_cli.run([str(argument) for argument in arguments])
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "stories.txt"
    stories = [f"Story {n}: " + f"the {n % 7} cats of {n * n}. " * (n % 9 + 1) for n in range(300)]
    path.write_text("".join(f"{story}\n{END}\n" for story in stories))
    return path


@pytest.fixture(scope="module")
def data(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "data"
    code, printed, err = run(
        *("prepare", "--text", text, "--out", out, "--vocab-size", 400, "--seq-len", 32)
    )
    assert code == 0, err
    assert f"{out}: complete" in printed
    assert f"--data-dir {out}/train --val-data-dir {out}/val" in printed
    return out


def test_does_prepare_leave_what_scripts_rely_on(data: Path) -> None:
    assert list((data / "train").glob("*.npy"))
    assert list((data / "val").glob("*.npy"))
    manifest = json.loads((data / "manifest.json").read_text())
    rows = np.load(next(iter((data / "train").glob("*.npy"))), allow_pickle=False)
    assert rows.shape == (manifest["train"]["rows"], 33)
    assert rows.max() == manifest["train"]["largest_id"] < 400
    assert (data / "tokenizer.json").stat().st_size > 0


def test_are_progress_lines_plain_when_piped(text: Path, tmp_path: Path) -> None:
    code, out, err = run(
        *("prepare", "--text", text, "--out", tmp_path / "d"),
        *("--vocab-size", 300, "--seq-len", 32, "--json"),
    )
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "d" / "manifest.json").read_text())
    words = [line.split(":")[0] for line in err.splitlines()]
    assert words == ["reading", "training the tokenizer", "encoding"]
    assert "\x1b" not in out + err


def test_does_a_list_take_several_files_after_one_flag(text: Path, tmp_path: Path) -> None:
    halves = [tmp_path / "a.txt", tmp_path / "b.txt"]
    lines = text.read_text().splitlines(keepends=True)
    halves[0].write_text("".join(lines[:300]))
    halves[1].write_text("".join(lines[300:]))
    more = ("--vocab-size", 300, "--seq-len", 32, "--json")
    one = run_here("prepare", "--text", *halves, "--out", tmp_path / "one", *more)
    two = run_here(
        *("prepare", "--out", tmp_path / "two", "--text", halves[0], f"--text={halves[1]}"), *more
    )
    assert one[:2] == two[:2]
    assert [source["name"] for source in json.loads(one[1])["sources"]] == ["a.txt", "b.txt"]


def test_does_inspect_print_what_is_there(data: Path) -> None:
    code, out, _ = run("inspect", data)
    manifest = json.loads((data / "manifest.json").read_text())
    assert code == 0
    assert f"train: {manifest['train']['rows']:,} rows of 32 + 1 tokens" in out
    assert f"largest id {manifest['train']['largest_id']}" in out
    assert "Story 0: the 0 cats of 0." in out
    code, out, _ = run_here("inspect", data / "val", "--json", "--sample", 2)
    report = json.loads(out)
    assert [split["name"] for split in report["splits"]] == ["val"]
    assert len(report["splits"][0]["samples"]) == 2


def test_does_verify_find_damage(data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(data, copy)
    assert run_here("inspect", copy, "--verify")[0] == 0
    path = copy / "val" / "rows-00000.npy"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 0x40
    path.write_bytes(damaged)
    code, out, _ = run("inspect", copy, "--verify", "--json")
    assert code == 1
    [finding] = json.loads(out)["findings"]
    assert finding["path"] == str(path)
    assert run_here("inspect", copy, "--verify")[1].count("finding: ") == 1


def test_is_a_decoded_sample_harmless_to_a_terminal(text: Path, tmp_path: Path) -> None:
    nasty = tmp_path / "nasty.txt"
    nasty.write_text("\x1b[31mred\x07 \x9b2J text, over and over.\n" * 200)
    more = ("--vocab-size", 300, "--seq-len", 32)
    assert run_here("prepare", "--text", nasty, "--out", tmp_path / "d", *more)[0] == 0
    code, out, _ = run_here("inspect", tmp_path / "d", "--sample", 3)
    assert code == 0
    assert "red" in out
    assert not any(c in out for c in "\x1b\x07\x9b")


def wrong_calls(text: Path, data: Path, tmp: Path) -> Iterator[tuple[int, str, tuple[object, ...]]]:
    """Give exit code, words of the message, and arguments."""
    latin = tmp / "latin.txt"
    latin.write_bytes(b"caf\xe9\n" * 100)
    most = ("--vocab-size", 300, "--seq-len", 32)
    out = ("--out", tmp / "d")
    yield 2, "no such file", ("prepare", "--text", tmp / "none.txt", *out, *most)
    yield 2, "line 1, byte 3: not UTF-8", ("prepare", "--text", latin, *out, *most)
    yield 2, "--vocab-size: give it", ("prepare", "--text", text, *out, "--seq-len", 32)
    yield 2, "--vocab-size 100", ("prepare", "--text", text, *out, *most, "--vocab-size", 100)
    yield 2, "less than the", ("prepare", "--text", text, *out, *most, "--seq-len", 90_000)
    yield 2, "--text", ("prepare", *out, *most)
    yield 2, "--seq-len", ("prepare", "--text", text, *out, *most, "--seq-len", "many")
    yield 2, "--no-such-flag", ("prepare", "--text", text, *out, *most, "--no-such-flag")
    yield 2, "(see `train-data prepare --help`)", ("prepare", "--no-such-flag")
    yield 2, "no-such-verb", ("no-such-verb",)
    yield 5, "--overwrite", ("prepare", "--text", text, "--out", data, *most)
    yield 2, "no prepared data set", ("prepare", "--text", text, "--out", tmp, *most, "--overwrite")
    yield 2, "no such directory", ("inspect", tmp / "none")
    yield 2, "holds no .npy files", ("inspect", tmp)


def test_does_an_error_end_the_process_with_its_code(tmp_path: Path) -> None:
    code, out, err = run("inspect", tmp_path / "none")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {tmp_path / 'none'}: no such directory")


def test_is_every_wrong_call_one_clear_line(text: Path, data: Path, tmp_path: Path) -> None:
    for code, words, arguments in wrong_calls(text, data, tmp_path):
        found, out, err = run_here(*arguments)
        assert (found, out) == (code, ""), (arguments, err)
        *progress, line = err.splitlines()
        assert line.startswith("error: "), err
        assert words in line
        assert all(note.startswith(("reading", "training", "encoding")) for note in progress)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["latin.txt"]


@pytest.mark.parametrize("verb", [(), ("prepare",), ("inspect",)])
def test_does_every_help_have_the_exit_codes_and_examples(verb: tuple[str, ...]) -> None:
    code, out, _ = run_here(*verb, "--help")
    assert code == 0
    for number in (0, 1, 2, 3, 4, 5, 6, 7, 130, 143):
        assert any(line.split()[:1] == [str(number)] for line in out.splitlines()), number
    assert not verb or f"train-data {verb[0]} " in out


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_does_a_signal_leave_nothing_visible(number: int, code: int, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    words = [f"word{n * n % 9973}" for n in range(300_000)]
    long.write_text(" ".join(words))
    process = start(
        *("prepare", "--text", long, "--out", tmp_path / "data"),
        *("--vocab-size", 2000, "--seq-len", 64),
    )
    wait_for_partial(tmp_path, process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "Traceback" not in err
    left = {path.name for path in tmp_path.iterdir()} - {"long.txt"}
    if number == signal.SIGKILL:
        assert all(name.startswith("data.partial-") for name in left)
    else:
        assert left == set()
        assert "nothing half-made is left" in err


def wait_for_partial(folder: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 30
    while not list(folder.glob("data.partial-*/train")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_does_a_reader_that_leaves_not_fail_the_command(data: Path) -> None:
    process = start("inspect", data, "--json")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 0
    assert err == ""
