"""Does a kill at any moment of preparing leave the old data set, the new one, or nothing?"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.prepare_kills import files_of, make, state_of


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    make(folder)
    assert files_of(folder / "first") != files_of(folder / "second")
    return folder


@pytest.mark.parametrize(
    ("is_there_before", "in_one_step"), [(False, True), (True, True), (True, False)]
)
def test_is_the_set_whole_or_absent_after_every_kill(
    is_there_before: bool, in_one_step: bool, made: Path, tmp_path: Path, repository: Path
) -> None:
    command = [sys.executable, "-m", "tests.support.prepare_kills", str(made), str(tmp_path)]
    command += [str(is_there_before), str(in_one_step)]
    ended = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["points"] > 40
    assert found["wrong"] == [], "the next one makes it whole and removes what was left"
    allowed = {"old", "new"} if is_there_before else {"absent", "new"}
    if is_there_before and not in_one_step:
        allowed.add("absent")  # Where directories cannot be exchanged there is a moment of neither.
    assert set(found["seen"]) == allowed


def test_would_a_half_made_set_be_seen(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "first", tmp_path / "data")
    (tmp_path / "data" / "manifest.json").unlink()
    old, new = files_of(made / "first"), files_of(made / "second")
    assert state_of(tmp_path / "data", old, new) == "half"
