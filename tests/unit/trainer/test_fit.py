"""Does `--fit` keep the batch, stay within the budget, and is every budget told?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.rates import FAST
from tests.support.tiny_model import TINY
from tests.support.training import arguments, make_data, train_here
from trainer import fit as fitting
from trainer.engine import EngineOptions
from trainer.errors import InputError
from trainer.fit import Fitted, fit
from trainer.preflight import BudgetLine, binding, check_vram, preflight_text
from trainer.vram import StepShape, predicted_bytes

SHAPE = StepShape(
    model=replace(TINY, vocab_size=8000, max_position_embeddings=256),
    options=EngineOptions(),
    micro_batch_size=6,
    accumulation=2,
    seq_len=256,
)


def fitted(shape: StepShape, budget: int) -> Fitted | None:
    try:
        return fit(shape, budget)
    except InputError:
        return None


def test_a_step_that_fits_whole_is_kept_whole() -> None:
    chosen = fit(SHAPE, 1 << 40).shape
    assert (chosen.micro_batch_size, chosen.accumulation) == (12, 1)
    assert chosen.options.activations == "keep"


def test_less_room_gives_smaller_steps_of_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "FULL_TOKENS", 512)
    monkeypatch.setattr(fitting, "CHUNKS", (512,))
    six = replace(SHAPE, accumulation=1)
    most = least = budget = fit(six, 1 << 40).bytes
    seen = set()
    while (found := fitted(six, budget)) is not None:
        shape = found.shape
        assert found.bytes == predicted_bytes(shape) <= budget
        assert shape.micro_batch_size * shape.accumulation == 6
        seen.add((shape.micro_batch_size, shape.options.activations))
        least, budget = found.bytes, found.bytes - (4 << 20)
    assert least < most
    assert len(seen) > 2
    with pytest.raises(InputError, match="--vram-budget"):
        fit(six, budget)


def test_of_many_ways_to_cut_the_rows_few_are_tried() -> None:
    rows = replace(SHAPE, micro_batch_size=720_720, accumulation=1)  # it has 240 divisors
    tried: list[StepShape] = []

    def predict(shape: StepShape) -> int:
        tried.append(shape)
        kept = 10 if shape.options.activations == "keep" else 1
        return shape.micro_batch_size * kept + shape.options.lm_head_chunk_tokens

    for budget in (10**9, 50_000, 9_000, 4_200, 300):
        tried.clear()
        found = fit(rows, budget, predict=predict)
        assert len(tried) < 60
        best = [size for size in range(1, 720_721) if 720_720 % size == 0]
        size, options = found.shape.micro_batch_size, found.shape.options
        larger = best[best.index(size) + 1 :]
        assert found.bytes <= budget
        for more in larger[:1]:
            assert predict(replace(found.shape, micro_batch_size=more)) > budget, options
    tried.clear()
    with pytest.raises(InputError, match="the least is 257 bytes"):
        fit(rows, 200, predict=predict)
    assert len(tried) < 60


def line(name: str, needed: float, available: float | None) -> BudgetLine:
    return BudgetLine(name=name, needed=needed, available=available, text="t", remedy="--flag")


def test_the_binding_budget_is_named_and_a_full_device_refused() -> None:
    lines = [line("device memory", 9, 10), line("disk space", 1, 10), line("time", 5, None)]
    assert binding(lines).name == "device memory"
    assert "--flag" in preflight_text(lines)[-1]
    check_vram(lines)
    with pytest.raises(InputError, match="--flag"):
        check_vram([line("device memory", 11, 10)])


def test_a_dry_run_tells_every_budget_and_what_fit_chose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.fitting.measured_rates", lambda *_: FAST)
    data = make_data(tmp_path / "data")
    flags = arguments(tmp_path / "run", data, "--max-steps", "1000", "--dry-run")
    flags += ["--fit", "--vram-budget", "1GiB"]
    assert train_here([*flags, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    names = [each["name"] for each in told["budgets"]]
    assert names == [
        *("device memory", "boundary activations", "host memory", "page-locked memory"),
        "disk space",
        *("time a step", "disk writes"),
    ]
    assert told["binding"] in names
    assert any(note.startswith("--fit chose") for note in told["notes"])
    assert any(note.startswith("--fit forecasts") for note in told["notes"])
    assert told["fit"]["rates"]["disk_write_bytes"] == FAST.disk_write_bytes
    assert told["fit"]["forecast"]["bound"] in told["fit"]["forecast"]["busy"]
    by_name = {each["name"]: each for each in told["budgets"]}
    written = by_name["disk writes"]
    if written["needed"]:  # a store on a RAM disk writes nothing to a drive
        assert written["needed"] == 1000 * told["budget"]["bytes_written_per_step"]
        assert "such a drive lasts" in written["text"]
    assert train_here(flags) == 0
    assert " binds, " in capsys.readouterr().out


def test_fit_on_a_cpu_fits_into_half_of_what_is_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = arguments(tmp_path / "run", make_data(tmp_path / "data"), "--dry-run")
    monkeypatch.setattr("trainer.fitting.measured_rates", lambda *_: FAST)
    monkeypatch.setattr("trainer.fitting.machine_memory", lambda: (1 << 40, 2 << 20))
    assert train_here([*flags, "--fit"]) == 0
    assert "of host memory predicted" in capsys.readouterr().out
    monkeypatch.setattr("trainer.fitting.machine_memory", lambda: (1 << 40, 1000))
    assert train_here([*flags, "--fit"]) == 2
    assert "--vram-budget" in capsys.readouterr().err
    assert train_here([*flags, "--vram-budget", "1GiB"]) == 0
    assert "no effect on the CPU without --fit" in capsys.readouterr().out
