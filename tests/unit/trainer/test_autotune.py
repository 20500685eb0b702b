"""Does `--fit` choose by what was measured, each thing the right way, and does it measure?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.rates import FAST
from tests.support.tiny_model import TINY
from tests.support.training import arguments, make_data, step_lines, train_here
from trainer.autotune import Asked, Need, Tuned, tune
from trainer.device import Device
from trainer.engine import EngineOptions
from trainer.errors import InputError
from trainer.forecast_check import COUNTED_STEPS, FILE_NAME, FIRST_STEPS, ForecastCheck
from trainer.measured import Machine, measured_rates
from trainer.rates import LinkRates, Rates
from trainer.recipe import Recipe, Settings
from trainer.store_rates import store_rates
from trainer.vram import StepShape

GIB = 1 << 30
MODEL = replace(
    TINY, hidden_size=1024, num_layers=12, intermediate_size=4096, head_dim=64, num_heads=16
)
RECIPE = Recipe(
    model=replace(MODEL, num_kv_heads=16, vocab_size=32000, max_position_embeddings=1024),
    data_digest="d",
    seq_len=1024,
    seed=0,
    device="cuda:0",
    threads=1,
    dtype="bf16",
    micro_batch_size=16,
)
SETTINGS = Settings(data_dir="d", active="/dev/shm/a", device_pipeline="on")


def needs(**bytes_of: int) -> Any:
    """Give a predictor that knows what each way takes; a way that is not named never fits."""

    def predict(shape: StepShape, settings: Settings) -> Need:
        way = f"{settings.activation_placement}_{settings.gradient_placement}"
        return Need(bytes=bytes_of.get(way, 100 * GIB))

    return predict


def tuned(rates: Rates, predict: Any, **changes: Any) -> Tuned:
    asked = Asked(
        recipe=RECIPE,
        settings=replace(SETTINGS, **changes.pop("settings", {})),
        given=frozenset(),
        budget_bytes=8 * GIB,
        pipelined=True,
        is_host=False,
    )
    return tune(replace(asked, **changes), rates, predict)


ALL = {
    f"{place}_{gradient}": GIB
    for place in ("vram", "host")
    for gradient in ("vram", "host", "recompute")
}


def test_where_everything_fits_nothing_is_moved_away() -> None:
    chosen = tuned(FAST, needs(**ALL)).settings
    assert (chosen.activation_placement, chosen.gradient_placement) == ("vram", "vram")


def test_a_slow_disk_publishes_less_often() -> None:
    intervals = [
        tuned(replace(FAST, disk_write_bytes=rate), needs(**ALL)).settings.durable_every
        for rate in (2e9, 5e8, 5e7)
    ]
    # Shards of 267 million parameters are 3.2 GB. A step moves 4.3 GB in and 3.2 out, which takes
    # 0.20 s: half of the disk's time is 15.8 steps at the first rate, 63 and 630 at the others.
    assert intervals == [20, 100, 1000]


def test_an_interval_that_was_given_stays() -> None:
    asked = {"given": frozenset({"durable_every"}), "settings": {"durable_every": 7}}
    assert tuned(FAST, needs(**ALL), **asked).settings.durable_every == 7


def test_a_slow_link_recomputes_gradients_and_a_fast_one_moves_them() -> None:
    some = needs(vram_host=GIB, vram_recompute=GIB)
    slow = LinkRates(into=4e9, out=4e9, both=3e9, pageable=2e9)
    fast = LinkRates(into=1e12, out=1e12, both=1e12, pageable=1e10)
    assert tuned(replace(FAST, link=slow), some).settings.gradient_placement == "recompute"
    assert tuned(replace(FAST, link=fast), some).settings.gradient_placement == "host"


def test_activations_wait_on_the_host_only_where_the_link_has_room() -> None:
    """Where only that fits it is taken all the same, and the forecast says what it costs."""
    only = needs(host_vram=GIB)
    slow = LinkRates(into=4e9, out=4e9, both=3e9, pageable=2e9)
    assert tuned(replace(FAST, link=slow), needs(**ALL)).settings.activation_placement == "vram"
    found = tuned(replace(FAST, link=slow), only)
    assert found.settings.activation_placement == "host"
    assert found.forecast.bound == "the link"
    assert found.forecast.seconds > tuned(FAST, only).forecast.seconds


def test_updates_on_the_processor_take_state_off_the_link() -> None:
    slow = replace(FAST, link=LinkRates(into=4e9, out=4e9, both=4e9, pageable=2e9))
    recipe = replace(RECIPE, optimizer_device="cpu")
    here, there = (
        tuned(slow, needs(**ALL), recipe=each).forecast.busy for each in (RECIPE, recipe)
    )
    # 16 bytes a parameter come in where the device updates, and 8 where the processor does.
    assert there["the link"] == pytest.approx(here["the link"] / 2)
    assert there["updates on the processor"] > here["updates on the processor"] == 0


def test_smaller_micro_batches_are_taken_where_stages_stay_for_it() -> None:
    """On a slow link what stays on the device counts for more than what a call costs."""

    def predict(shape: StepShape, settings: Settings) -> Need:
        if settings.gradient_placement != "vram" or settings.activation_placement != "vram":
            return Need(bytes=100 * GIB)
        return Need(bytes=GIB, kept_share=0.1 if shape.micro_batch_size > 8 else 0.9)

    slow = LinkRates(into=4e9, out=2e10, both=4e9, pageable=2e9)
    given = {"settings": {"vram_budget": "8GiB"}}
    assert tuned(replace(FAST, link=slow), predict, **given).recipe.micro_batch_size == 8
    fast = LinkRates(into=1e12, out=1e12, both=1e12, pageable=1e10)
    given = {"settings": {"vram_budget": "8GiB"}}
    assert tuned(replace(FAST, link=fast), predict, **given).recipe.micro_batch_size == 16


def test_rows_of_a_step_stay_and_what_does_not_fit_is_refused() -> None:
    def predict(shape: StepShape, settings: Settings) -> Need:
        return Need(bytes=GIB * shape.micro_batch_size)

    found = tuned(FAST, predict).recipe
    assert (found.micro_batch_size, found.gradient_accumulation_steps) == (8, 2)
    with pytest.raises(InputError, match="--vram-budget"):
        tuned(FAST, needs())


HOST = replace(FAST, link=None, device_update=1e9, disk_read_bytes=1e9)


def on_host(rates: Rates, predict: Any) -> Tuned:
    """Choose for a run without a device, whose store is on a disk."""
    return tuned(
        rates,
        predict,
        recipe=replace(RECIPE, device="cpu", dtype="fp32"),
        settings={"active": None, "device_pipeline": "off"},
        pipelined=False,
        is_host=True,
    )


def test_shards_are_read_ahead_where_reading_is_slow() -> None:
    def predict(shape: StepShape, settings: Settings) -> Need:
        return Need(bytes=GIB if settings.activations == "recompute" else 100 * GIB)

    quick = on_host(replace(HOST, disk_read_bytes=1e12), predict).settings
    slow = on_host(replace(HOST, disk_read_bytes=2.5e10), predict).settings
    slowest = on_host(replace(HOST, disk_read_bytes=5e8), predict).settings
    assert quick.prefetch_shards == "off"
    assert (slow.prefetch_shards, slow.prefetch_window) == ("cpu", 2)
    assert (slowest.prefetch_shards, slowest.prefetch_window) == ("cpu", 4)


def test_on_a_processor_activations_are_kept_where_they_fit() -> None:
    def keeps(shape: StepShape, settings: Settings) -> Need:
        return Need(bytes=GIB)

    found = on_host(replace(HOST, disk_read_bytes=1e12), keeps)
    assert found.settings.activations == "keep"
    assert found.forecast.bound == "writing shards"  # 3.2 GB a step: 1.6 s of disk
    quick = replace(HOST, disk_read_bytes=1e12, disk_write_bytes=1e12)
    assert on_host(quick, keeps).forecast.bound == "the optimizer"


def test_the_machine_is_measured(tmp_path: Path) -> None:
    shape = StepShape(
        model=TINY,
        options=EngineOptions(),
        micro_batch_size=4,
        accumulation=1,
        seq_len=20,
    )
    said: list[str] = []
    machine = Machine(
        device=Device.from_name("cpu"), store=tmp_path / "run", active=tmp_path / "active"
    )
    rates = measured_rates(shape, machine, said.append)
    assert rates.link is None
    assert 1e8 < rates.matmul_flops < 1e15
    for rate in (rates.disk_write_bytes, rates.disk_read_bytes, rates.active_write_bytes):
        assert rate is not None
        assert 1e6 < rate < 1e12
    assert 1e5 < rates.host_update == rates.device_update < 1e12
    assert 0 < rates.block_forward.of(4) < rates.block_backward.of(4) * 10
    assert rates.disk_shard_seconds > 0
    assert 0 < rates.seconds < 60
    assert len(said) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.store_rates.ROOM_BYTES", 1 << 62)
    assert store_rates(tmp_path, seconds=1.0, threads=0) is None


def test_the_forecast_is_told_beside_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, steps = make_data(tmp_path / "data"), FIRST_STEPS + COUNTED_STEPS
    store = tmp_path / "run"
    flags = arguments(store, data, "--fit", "--max-steps", str(steps))
    assert train_here(flags) == 0
    said = capsys.readouterr().err
    assert "--fit measured in" in said
    assert "--fit forecasts" in said
    assert f"(median of {COUNTED_STEPS} steps" in said
    last = step_lines(store)[-1]
    told = json.loads((store / "logs" / FILE_NAME).read_text())
    assert last["forecast_tokens_per_second"] == told["forecast"]["tokens_per_second"]
    assert last["forecast_bound"] == told["forecast"]["bound"]
    assert len(told["measured"]["seconds"]) == COUNTED_STEPS
    assert train_here(arguments(store, None, "--max-steps", str(steps + 1))) == 0
    assert "forecast_bound" not in step_lines(store)[-1]


def test_few_steps_are_compared_at_the_end(tmp_path: Path) -> None:
    check = ForecastCheck(tuned(FAST, needs(**ALL)), tmp_path)
    for _ in range(FIRST_STEPS + 10):
        added = check.after({"seconds": 2.0, "validation_seconds": 1.0})
    assert added["forecast_percent"] == pytest.approx(100 * added_seconds(added), rel=1e-9)
    said = check.said(is_end=True)
    assert said is not None
    assert "(median of 5 steps, 1 to 1 s)" in said
    assert check.said(is_end=True) is None


def added_seconds(added: dict[str, Any]) -> float:
    """Give a step's forecast time: the speed of a step of as many tokens, turned around."""
    return RECIPE.rows_per_step * RECIPE.seq_len / added["forecast_tokens_per_second"]
