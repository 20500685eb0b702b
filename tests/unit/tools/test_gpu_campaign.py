"""Does every part of the GPU campaign fit into a call, with flags that its tools know?"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tools.bench import gpu_throughput, vram_grid
from tools.bench.gpu_campaign import PARITY, PART_SECONDS, STOPPED, Command, commands, run

READERS: dict[str, Callable[[Sequence[str]], object]] = {
    "tools.bench.gpu_throughput": gpu_throughput.arguments_of,
    "tools.bench.vram_grid": vram_grid.arguments_of,
}


@pytest.mark.parametrize("part", [1, 2, 3])
def test_a_part_fits_and_its_flags_are_known(part: int, tmp_path: Path) -> None:
    wanted = commands(part, tmp_path, tmp_path / "a", tmp_path / "b")
    assert sum(each.limit_seconds for each in wanted) <= PART_SECONDS
    assert len({each.name for each in wanted}) == len(wanted)
    for each in wanted:
        assert importlib.util.find_spec(each.words[0]) is not None
        if each.words[0] in READERS:
            READERS[each.words[0]](each.words[1:])


def test_the_parity_files_exist() -> None:
    repository = Path(__file__).parents[3]
    assert all((repository / name).is_file() for name in PARITY)


def test_a_command_that_runs_too_long_is_stopped(tmp_path: Path) -> None:
    endless = Command(name="endless", words=("http.server", "0"), limit_seconds=1)
    assert run(endless, tmp_path, 0.5) == STOPPED
    refused = Command(name="refused", words=("tools.no_such_module",), limit_seconds=60)
    assert run(refused, tmp_path, 60) == 1
    assert "no_such_module" in (tmp_path / "refused.txt").read_text()
