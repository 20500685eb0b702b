"""Is the ceiling measured once a machine, and does the percentage follow the work?"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.tiny_model import TINY, TINY_TIED
from trainer import ceiling as ceilings
from trainer.ceiling import (
    FILE_NAME,
    Ceiling,
    ceiling_of,
    keep_beaten,
    measure,
    products_limit_seconds,
    step_flops,
)
from trainer.device import Device
from trainer.model.stages import parameter_count
from trainer.recipe import Recipe

RECIPE = Recipe(
    model=TINY, data_digest="d", seq_len=20, seed=0, device="cpu", threads=1, micro_batch_size=3
)


def test_the_percentage_is_of_the_longer_of_computing_and_moving() -> None:
    ceiling = Ceiling(matmul_flops_per_second=100.0, copy_bytes_per_second=10.0)
    assert ceiling.percent(flops=100, moved_bytes=0, seconds=4.0) == 25.0
    assert ceiling.percent(flops=100, moved_bytes=20, seconds=4.0) == 50.0


def test_the_operations_of_a_step_are_counted_by_hand() -> None:
    attention = 12 * 3 * 4 * 16 * 20
    matrices = parameter_count(TINY) - 131 * 48
    assert step_flops(RECIPE) == (6 * matrices + attention) * 3 * 20
    twice = replace(RECIPE, gradient_accumulation_steps=2)
    assert step_flops(twice) == 2 * step_flops(RECIPE)
    # A tied matrix is looked up and multiplied: it counts once.
    tied = replace(RECIPE, model=TINY_TIED)
    assert step_flops(tied) == step_flops(RECIPE)


def test_a_measurement_is_a_rate_of_this_machine() -> None:
    found = measure(torch.float32, Device.from_name("cpu"))
    assert 1e8 < found.matmul_flops_per_second < 1e15
    assert 1e8 < found.copy_bytes_per_second < 1e13


def test_the_first_product_of_a_gpu_is_not_the_only_one() -> None:
    assert products_limit_seconds(Device(torch.device("meta"))) == math.inf
    assert products_limit_seconds(Device.from_name("cpu")) < 1


def test_it_is_measured_once_and_again_where_the_recipe_computes_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.dtype] = []

    def counted(dtype: torch.dtype, device: Device) -> Ceiling:
        asked.append(dtype)
        return Ceiling(matmul_flops_per_second=1.0, copy_bytes_per_second=2.0)

    monkeypatch.setattr(ceilings, "measure", counted)
    cpu = Device.from_name("cpu")
    for dtype in (torch.float32, torch.float32, torch.bfloat16, torch.float32):
        found = ceiling_of(RECIPE, dtype, cpu, tmp_path / "logs")
        assert found.copy_bytes_per_second == 2.0
    assert asked == [torch.float32, torch.bfloat16]
    ceiling_of(replace(RECIPE, threads=2), torch.float32, cpu, tmp_path / "logs")
    assert len(asked) == 3
    assert len(json.loads((tmp_path / "logs" / FILE_NAME).read_text())) == 3


def test_a_file_that_cannot_be_read_is_measured_anew(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("{")
    found = ceiling_of(RECIPE, torch.float32, Device.from_name("cpu"), tmp_path)
    assert found.matmul_flops_per_second > 0
    assert json.loads((tmp_path / FILE_NAME).read_text())


def test_what_a_step_has_beaten_is_raised_and_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = iter((4.0, 7.0, 5.0))

    def busy(dtype: torch.dtype, device: Device) -> Ceiling:
        return Ceiling(matmul_flops_per_second=next(rates), copy_bytes_per_second=3.0)

    monkeypatch.setattr(ceilings, "measure", busy)
    where = (RECIPE, torch.float32, Device.from_name("cpu"), tmp_path)
    low = ceiling_of(*where)
    work = {"flops": 12.0, "moved_bytes": 2.0, "seconds": 2.0}
    raised = low.beaten_by(**work)
    assert low.percent(**work) == 150
    assert raised == Ceiling(matmul_flops_per_second=6.0, copy_bytes_per_second=3.0)
    assert raised.percent(**work) == 100
    keep_beaten(raised, *where)
    assert ceiling_of(*where).matmul_flops_per_second == 7.0
    assert ceiling_of(*where).matmul_flops_per_second == 7.0  # not measured a third time
    keep_beaten(raised, *where)
    assert ceiling_of(*where).matmul_flops_per_second == 6.0  # measured lower: what was done stays
