"""Does the step log hold each committed step once, in order, whatever a crash left in it?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.errors import InputError
from trainer.step_log import (
    FILE_NAME,
    cut,
    encode_line,
    last_durable_step,
    last_logged_step,
    open_step_log,
)


def write(folder: Path, *lines: bytes) -> Path:
    path = folder / FILE_NAME
    path.write_bytes(b"".join(lines))
    return path


def line(step: int) -> bytes:
    return encode_line({"step": step, "loss": 1.0 / step})


def steps(path: Path) -> list[int]:
    return [json.loads(text)["step"] for text in path.read_text().splitlines()]


def test_lines_beyond_the_resumed_step_are_cut(tmp_path: Path) -> None:
    path = write(tmp_path, *(line(step) for step in range(1, 8)))
    assert cut(path, 5) == 5
    assert steps(path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "torn",
    [
        line(4)[:-1],
        line(4)[:7],
        b"\n",
        b"\xff\xfe\n",
        b'{"loss": 1.0}\n',
        b'{"step": "4"}\n',
        b"[4]\n",
        line(3),
        line(2),
    ],
)
def test_a_torn_or_doubled_last_line_is_cut(tmp_path: Path, torn: bytes) -> None:
    path = write(tmp_path, line(1), line(2), line(3), torn)
    assert cut(path, 9) == 3
    assert steps(path) == [1, 2, 3]


def test_a_whole_log_is_not_touched(tmp_path: Path) -> None:
    path = write(tmp_path, line(1), line(2))
    before = path.stat().st_mtime_ns
    assert cut(path, 2) == 2
    assert path.stat().st_mtime_ns == before


def test_missing_lines_are_made_again_from_the_commits(tmp_path: Path) -> None:
    path = write(tmp_path, line(1), line(2), line(3)[:4])
    asked = []

    def missing(last: int) -> list[dict[str, int]]:
        asked.append(last)
        return [{"step": step} for step in range(last + 1, 6)]

    log = open_step_log(tmp_path, 5, missing)
    log.append({"step": 6})
    log.close()
    assert asked == [2]
    assert steps(path) == [1, 2, 3, 4, 5, 6]


def test_a_fresh_log_begins_empty(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    open_step_log(folder, 0, lambda _: ()).close()
    assert (folder / FILE_NAME).read_bytes() == b""
    assert last_logged_step(folder) == 0


def test_numbers_that_json_has_no_word_for_become_null() -> None:
    text = encode_line({"step": 1, "grad_norm": float("inf"), "timings": {"a": float("nan")}})
    assert json.loads(text) == {"step": 1, "grad_norm": None, "timings": {"a": None}}


def test_the_last_logged_step_is_the_highest(tmp_path: Path) -> None:
    write(tmp_path, line(1), line(7), b"torn")
    assert last_logged_step(tmp_path) == 7


def test_are_durable_steps_told_apart(tmp_path: Path) -> None:
    write(tmp_path, encode_line({"step": 9, "durable_step": 5}), line(7), b"torn")
    assert (last_logged_step(tmp_path), last_durable_step(tmp_path)) == (9, 5)
    assert last_durable_step(tmp_path / "nowhere") == 0


@pytest.mark.parametrize(("is_link", "words"), [(True, "leads nowhere"), (False, "a directory")])
def test_is_something_in_its_place_named(tmp_path: Path, is_link: bool, words: str) -> None:
    path = tmp_path / FILE_NAME
    if is_link:
        path.symlink_to(tmp_path / "unmounted" / "log")
    else:
        path.mkdir()
    for look in (last_logged_step, lambda folder: open_step_log(folder, 3, lambda _: ())):
        with pytest.raises(InputError, match=f"{path}.*{words}"):
            look(tmp_path)


@pytest.mark.parametrize("below", [False, True])
def test_is_a_link_to_nothing_in_the_place_of_its_folder_named(tmp_path: Path, below: bool) -> None:
    logs = tmp_path / "logs"
    logs.symlink_to(tmp_path / "unmounted")
    folder = logs / "branches" / "alt" if below else logs
    with pytest.raises(InputError, match=f"{logs}.*a link that leads nowhere"):
        open_step_log(folder, 3, lambda _: ())


def test_is_the_log_of_a_hard_linked_copy_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    path = write(tmp_path / "run", line(1), line(2), line(3))
    copy = tmp_path / "copy.jsonl"
    copy.hardlink_to(path)
    log = open_step_log(tmp_path / "run", 2, lambda _: ())
    log.append({"step": 9})
    log.close()
    assert steps(copy) == [1, 2, 3]
    assert steps(path) == [1, 2, 9]
