"""Is a command that did not have to import itself set up as one of a new interpreter?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.training import TrainProcess, arguments, make_data, train_here


def test_does_it_compute_with_one_thread(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = arguments(tmp_path / "run", make_data(tmp_path / "data"), "--dry-run", "--json")
    at = flags.index("--threads")
    del flags[at : at + 2]
    with TrainProcess(flags) as train:
        code, out, err = train.finish()
    assert code == 0, err
    for threads in (1, 2):
        assert train_here([*flags, "--threads", str(threads)]) == 0
        told = json.loads(capsys.readouterr().out)
        is_same = told["recipe_digest"] == json.loads(out)["recipe_digest"]
        assert is_same == (threads == 1)
