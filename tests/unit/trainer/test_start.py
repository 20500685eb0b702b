"""Can what a run says at its end be typed, and may it look at what it is given?"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardb.errors import StorageFailedError
from trainer.found import find_run
from trainer.start import _say_end


def test_is_the_command_to_go_on_quoted_for_a_shell(tmp_path: Path) -> None:
    store = tmp_path / "with space ü"
    said: list[str] = []
    run: Any = SimpleNamespace(
        progress=SimpleNamespace(close=lambda: None, note=said.append),
        request=SimpleNamespace(stop_signal=None),
        head=SimpleNamespace(step=2),
        tiers=SimpleNamespace(branch="main"),
        is_finished=lambda: True,
    )
    assert _say_end(cast(Any, SimpleNamespace(store=store)), run) == 0
    command = said[0].split("`")[1]
    assert shlex.split(command) == ["train", "--store", str(store), "--max-steps", "N"]


@pytest.mark.parametrize("hidden", ["", "objects"])
def test_is_a_store_that_may_not_be_looked_into_no_bad_input(tmp_path: Path, hidden: str) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    (tmp_path / "objects").mkdir()
    for directory in [tmp_path, *tmp_path.parents][:-1]:
        directory.chmod(directory.stat().st_mode | 0o555)
    (tmp_path / hidden).chmod(0)
    os.seteuid(65534)
    try:
        with pytest.raises(StorageFailedError, match="chmod or chown it") as refused:
            find_run({"store": str(tmp_path)})
    finally:
        os.seteuid(0)
    assert refused.value.exit_code == 7
