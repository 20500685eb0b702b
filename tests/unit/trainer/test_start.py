"""Can what a run says at its end be typed?"""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

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
