"""Does the command `model-doctor` answer people, scripts and shells?"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from export.doctor_cli import split_ref
from export.doctor_findings import ERROR, WARNING
from export.doctor_run import examine
from tests.support.ailing import put_interleaved, set_json, sound_package
from tests.support.commands import REPOSITORY
from tests.support.export_commands import run_here
from tests.support.exports import let_commands_load_here


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound_package(tmp_path_factory.mktemp("doctor") / "package")


def test_does_the_command_say_so_where_nothing_is_wrong(package: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "export.doctor_cli", package],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith("were looked at\nno findings\n")


def test_do_findings_name_place_and_remedy(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_json("config.json", rope_theta=5.0)(package)
    try:
        ended = run_here(capsys, "doctor", package)
        assert ended.code == 1
        assert "error: config.json rope_theta: it is 5, and rope_parameters has 10000" in ended.out
        assert ended.out.endswith("1 error\n")
        told = json.loads(run_here(capsys, "doctor", package, "--json").out)
        assert told["counts"] == {"error": 1, "warning": 0, "note": 0}
        [finding] = told["findings"]
        assert (finding["severity"], finding["file"]) == ("error", "config.json")
        assert all(finding[key] for key in ("field", "what", "remedy"))
    finally:
        set_json("config.json", rope_theta=10000.0)(package)


def test_does_against_name_the_store_and_the_ref(
    package: Path,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = package.parent / "store"
    sound = run_here(capsys, "doctor", package, "--against", store)
    assert sound.code == 0, sound.out
    assert "against the store: logits bit-equal over 64 positions" in sound.out
    let_commands_load_here(monkeypatch)  # the first answer came from a fresh process
    wrong = put_interleaved(package, tmp_path / "wrong")
    ended = run_here(capsys, "doctor", wrong, "--against", f"{store}@step-0")
    assert ended.code == 1
    assert "interleaved in 6 tensors: the rotary layout is another one, such as" in ended.out
    assert run_here(capsys, "doctor", wrong).code == 0  # the control: looked at alone it is sound
    assert run_here(capsys, "doctor", package, "--against", f"{store}@step-9").code == 4
    assert run_here(capsys, "doctor", package, "--against", tmp_path / "none").code in (3, 4)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nothing"], 2, "no such folder"),
        ([], 2, "see `model-doctor --help`"),
        (["x", "--jsn"], 2, "--json"),
        (["."], 3, "no package"),
        (["a.gguf"], 3, "no GGUF file"),
    ],
)
def test_is_a_wrong_call_one_line(
    arguments: list[str],
    code: int,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "a.gguf").write_text("no")
    monkeypatch.chdir(tmp_path)
    ended = run_here(capsys, "doctor", *arguments)
    assert (ended.code, ended.out) == (code, "")
    assert words in ended.err
    assert ended.err.count("\n") == 1


def test_is_a_store_with_an_at_sign_taken_whole(tmp_path: Path) -> None:
    (tmp_path / "a@b").mkdir()
    assert split_ref(f"{tmp_path}/a@b") == (f"{tmp_path}/a@b", None)
    assert split_ref(f"{tmp_path}/a@b@c") == (f"{tmp_path}/a@b", "c")
    assert split_ref("run") == ("run", None)


def test_is_what_version_5_alone_can_read_told(package: Path, tmp_path: Path) -> None:
    """Version 4 reads this package with another theta and cannot load its tokenizer."""
    transformers = pytest.importorskip("transformers", reason="pip install '.[test]'")
    if int(transformers.__version__.split(".")[0]) < 5:
        pytest.skip("this is about what version 5 of transformers writes")
    folder = tmp_path / "saved"
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer):
        kind.from_pretrained(package, local_files_only=True).save_pretrained(folder)
    findings = examine(folder).findings
    assert [f for f in findings if f.severity == ERROR] == []
    warned = {(f.file, f.field) for f in findings if f.severity == WARNING}
    assert {
        ("config.json", "rope_theta"),
        ("config.json", "torch_dtype"),
        ("tokenizer_config.json", "tokenizer_class"),
    } <= warned
    is_private = stat.S_IMODE((folder / "model.safetensors").stat().st_mode) == 0o600
    assert (("model.safetensors", "mode") in warned) is is_private
