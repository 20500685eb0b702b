"""Do the files made beforehand serve a store, and are a run's flags and figures what they say?"""

from __future__ import annotations

import errno
import json
import time
from pathlib import Path

import pytest

import shardb
from tools.bench.gpu_size import (
    arguments_of,
    flags_of,
    model_of,
    new_store,
    spare_sizes,
    summary,
    summary_text,
)
from tools.bench.ram_room import SpareFiles
from trainer.ceiling import step_flops
from trainer.recipe import Recipe
from trainer.recipe_build import DataFacts, new_run

TINY = arguments_of(["--model", "tiny", "--seq-len", "64"])


def recipe_of() -> Recipe:
    facts = DataFacts(seq_len=64, digest="d" * 32, end_of_text_id=None)
    given = {**flags_of(TINY), "data_dir": "rows"}
    return new_run(given, facts, device="cpu", threads=1)[0]


def test_a_store_takes_the_files_that_were_made_for_it(tmp_path: Path) -> None:
    store = tmp_path / "run"
    new_store(store)
    sizes = spare_sizes(model_of(TINY))
    spare = SpareFiles(store, time.monotonic() + 60)
    spare.make(sizes, 2)
    assert (spare.made_bytes, spare.problem) == (sum(sizes), None)
    waiting = {path.stat().st_ino for path in (store / "spare").iterdir()}
    with shardb.open(store) as opened, opened.begin("main") as txn:
        path, fresh = opened.objects.staged_path("main", sizes[0])
        assert txn.base is None
        assert not fresh
        assert Path(path).stat().st_ino in waiting


def test_a_full_disk_is_told_and_leaves_no_half_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "run"
    new_store(store)
    spare = SpareFiles(store, time.monotonic() + 60)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spare._files, "allocate", full)
    spare.make([4096, 4096], 1)
    assert spare.problem is not None
    assert "No space" in spare.problem
    assert [*(store / "spare").glob("free.*")] == []
    late = SpareFiles(store, time.monotonic() - 1)
    late.make([4096], 1)
    assert late.made_bytes == 0
    assert late.problem is not None


def test_the_rates_are_of_steps_that_were_not_compiled(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "ceiling.json").write_text(json.dumps({"here": {"matmul_flops_per_second": 1e12}}))
    lines = [
        {
            "step": step,
            "seconds": 100.0 if step < 7 else 2.0,
            "commit_seconds": 0.1,
            "loss": 10.0 - step,
            "ceiling_percent": 50.0,
            "device_peak_bytes": step,
            "host_memory_bytes": step,
        }
        for step in range(1, 10)
    ]
    found = summary(TINY, lines, tmp_path)
    assert found["steady_steps"] == [7, 8, 9]
    assert found["tokens_per_second"] == 8 * 4 * 64 / 2.0
    assert found["ceiling_percent"] == 100 * step_flops(recipe_of()) / 1e12 / 2.0
    assert found["device_peak_bytes"] == 9
    assert found["largest_resident"]["fp32"] == int(7.9 * 2**30) // 16
    beside = dict.fromkeys(
        ("predicted_bytes", "predicted_step_bytes", "driver_bytes", "used_bytes", "total_bytes"), 1
    )
    assert "steps [7, 8, 9]: 2.00 s" in summary_text(found | beside)
    assert summary(TINY, lines[:3], tmp_path)["steady_steps"] == [3]
