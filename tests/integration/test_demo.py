"""Does the demo tell its story from one end to the other, twice, and touch only its own folder?"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

WORDS = "the cat sat on a mat and saw the dog that ran to the old red barn by the river".split()


def run_demo(repository: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the demo as make does."""
    command = [sys.executable, "-m", "tools.demo", "--folder", str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=repository, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Write 40 short documents of simple sentences."""
    choose = random.Random(7)
    documents = [
        ". ".join(" ".join(choose.choices(WORDS, k=8)) for _ in range(12)) for _ in range(40)
    ]
    path = tmp_path / "own.txt"
    path.write_text("\n<|endoftext|>\n".join(documents))
    return path


@pytest.mark.slow
def test_does_the_demo_tell_its_story(repository: Path, text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "demo-run"
    answer = run_demo(repository, folder, "--quick", "--text", str(text))
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "SIGKILL sent inside step" in answer.stdout
    assert "steps 1 to 80: each is there once" in answer.stdout
    assert "against the store's own stages: bit-equal." in answer.stdout
    assert (folder / "package" / "model.safetensors").is_file()
    closing = answer.stdout.rstrip().splitlines()[-6:]
    assert all(line.startswith(" - ") for line in closing)
    assert json.loads((folder / "DEMO.json").read_text())["killed_step"] >= 43

    again = run_demo(repository, folder, "--quick", "--text", str(text))
    assert again.returncode == 0, again.stdout + again.stderr
    assert "going on with it" in again.stdout
    assert "SIGKILL sent" not in again.stdout

    assert run_demo(repository, folder, "--clean").returncode == 0
    assert not folder.exists()


def test_does_the_demo_refuse_a_folder_it_did_not_make(
    repository: Path, text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "demo-run"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    for arguments in (("--quick", "--text", str(text)), ("--clean",)):
        answer = run_demo(repository, folder, *arguments)
        assert answer.returncode == 2
        assert "not made by this demo" in answer.stderr
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]
