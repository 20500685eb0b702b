"""How long a step will take by what was measured of the machine, and what it will wait for.

Owns the cost model: which resource is busy for how long in a step, which of them work beside one
another, and how much of the disk a run's publications take. Through the device pipeline everything
is beside everything, so that the busiest resource is the step; the plain way does one thing after
the other, and only writes shards behind its back. Knows nothing of how rates were measured or of
how candidates are found. What no rate tells counts as nothing: a forecast is the least that a step
takes, not a promise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.ceiling import Ceiling, step_flops
from trainer.rates import Rates
from trainer.recipe import Recipe, Settings

# What each parameter moves over the link in a step of AdamW in fp32: itself for either pass, both
# moments in, all three out.
PARAMETER_BYTES, STATE_BYTES = 4, 8
# What the store keeps in memory of its own; the rest of a step's shards is read from its disk.
CACHED_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a step does: its recipe and settings, and sizes that follow from them.

    stored_bytes: of all shards; shards: how many; parameters: in all; kept_share: of them on the
    device for good; host_share: of them updated by the processor; boundary_bytes: what waits
    between the passes; pipelined: the way of the steps.
    """

    recipe: Recipe
    settings: Settings
    activations: str
    placement: str
    stored_bytes: int
    shards: int
    parameters: int
    boundary_bytes: int
    kept_share: float = 0.0
    host_share: float = 0.0
    pipelined: bool = False

    @property
    def updated_on_host(self) -> float:
        """Give the parameters that the processor updates."""
        return self.host_share * self.parameters

    @property
    def tokens(self) -> int:
        """Give the tokens of a step."""
        return self.recipe.rows_per_step * self.recipe.seq_len

    @property
    def kept_gradients(self) -> bool:
        """Say whether gradients wait for the model's norm somewhere."""
        return self.recipe.grad_clip_mode == "global"


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """A step's time: how long each resource is busy, and what that makes together."""

    busy: dict[str, float]
    seconds: float
    tokens: int
    ceiling_percent: float
    pipelined: bool = False

    @property
    def bound(self) -> str:
        """Name the resource that is busy for longest."""
        return max(self.busy, key=lambda name: self.busy[name])

    @property
    def tokens_per_second(self) -> float:
        """Give the speed."""
        return self.tokens / self.seconds

    @property
    def text(self) -> str:
        """Say it in a line."""
        shares = ", ".join(
            f"{name} {100 * busy / self.seconds:.0f} %"
            for name, busy in sorted(self.busy.items(), key=lambda item: -item[1])
            if busy > 0.005 * self.seconds
        )
        return (
            f"--fit forecasts {self.tokens_per_second:,.0f} tokens/s ({self.seconds:.3g} s a step,"
            f" {self.ceiling_percent:.1f} % of the ceiling), bound by {self.bound}; busy in a step:"
            f" {shares}"
        )

    def to_json(self) -> dict[str, Any]:
        """Give the forecast as a plain dictionary."""
        return {
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.seconds,
            "bound": self.bound,
            "ceiling_percent": self.ceiling_percent,
            "busy": self.busy,
        }


def forecast(load: Load, rates: Rates) -> Forecast:
    """Forecast a step."""
    busy = _pipelined(load, rates) if load.pipelined else _plain(load, rates)
    disk = _publish_seconds(load, rates)
    if load.pipelined:
        seconds = max(busy.values())
    else:
        # Shards are written behind the step's back while others are updated; the commit waits.
        written = busy.pop("writing")
        alone = max(0.0, written - busy["the optimizer"])
        busy["writing shards"] = alone
        seconds = sum(busy.values())
    if disk:
        busy["publishing"] = disk
        seconds = max(seconds, disk)
    ceiling = Ceiling(
        matmul_flops_per_second=rates.matmul_flops,
        copy_bytes_per_second=rates.link.into if rates.link else rates.host_copy_bytes,
    )
    percent = ceiling.percent(
        flops=step_flops(load.recipe), moved_bytes=load.stored_bytes, seconds=seconds
    )
    return Forecast(
        busy=busy,
        seconds=seconds,
        tokens=load.tokens,
        ceiling_percent=percent,
        pipelined=load.pipelined,
    )


def publish_seconds(load: Load, rates: Rates) -> float:
    """Give how long the disk takes for one published commit; 0 where it was not measured."""
    if not rates.disk_write_bytes:
        return 0.0
    return load.stored_bytes / rates.disk_write_bytes + load.shards * rates.disk_shard_seconds


def read_seconds(load: Load, rates: Rates) -> float:
    """Give how long the plain way reads from its disk in a step."""
    if rates.disk_read_bytes is None or load.settings.active is not None:
        return 0.0
    params = load.stored_bytes * PARAMETER_BYTES / (PARAMETER_BYTES + STATE_BYTES)
    times = 2 if load.kept_gradients else 1
    missing = max(0.0, 1.0 - CACHED_BYTES / load.stored_bytes)
    return missing * (load.stored_bytes + times * params) / rates.disk_read_bytes


def compute_seconds(load: Load, rates: Rates) -> float:
    """Give how long a step's passes take."""
    recipe = load.recipe
    rows, batches = recipe.micro_batch_size, recipe.gradient_accumulation_steps
    forward, backward = rates.block_forward.of(rows), rates.block_backward.of(rows)
    if load.activations == "keep":
        backward -= forward
    blocks = recipe.model.num_layers * (forward + backward)
    return batches * (blocks + rates.head.of(rows))


def _publish_seconds(load: Load, rates: Rates) -> float:
    every = load.settings.durable_every
    if load.settings.active is None or not every:
        return 0.0
    return publish_seconds(load, rates) / every


def _write_seconds(load: Load, rates: Rates) -> float:
    if load.settings.active is None:
        return publish_seconds(load, rates)
    if not rates.active_write_bytes:
        return 0.0
    return load.stored_bytes / rates.active_write_bytes + load.shards * rates.active_shard_seconds


def _device_updates(load: Load, rates: Rates) -> float:
    return (load.parameters - load.updated_on_host) / rates.device_update


def _host_updates(load: Load, rates: Rates) -> float:
    return load.updated_on_host / rates.host_update


def _plain(load: Load, rates: Rates) -> dict[str, float]:
    busy = {
        "arithmetic": compute_seconds(load, rates),
        "the optimizer": max(_device_updates(load, rates), _host_updates(load, rates)),
        "writing": _write_seconds(load, rates),
    }
    reading = read_seconds(load, rates)
    if load.settings.prefetch_shards == "off" or reading > busy["arithmetic"]:
        busy["reading"] = max(
            0.0, reading - (0 if load.settings.prefetch_shards == "off" else busy["arithmetic"])
        )
    if rates.link is not None:
        passes = 3 if load.kept_gradients else 2
        moved = passes * PARAMETER_BYTES + 2 * STATE_BYTES + PARAMETER_BYTES
        moved += 2 * PARAMETER_BYTES if load.kept_gradients else 0
        away = 2 * load.boundary_bytes if load.placement == "host" else 0
        busy["the link"] = load.parameters * moved / rates.link.pageable + away / rates.link.both
    return busy


def _pipelined(load: Load, rates: Rates) -> dict[str, float]:
    streamed = load.parameters * (1.0 - load.kept_share)
    into = streamed * 2 * PARAMETER_BYTES
    into += max(0.0, streamed - load.updated_on_host) * STATE_BYTES
    # Gradients go out in the place of what the processor writes itself.
    out = load.parameters * PARAMETER_BYTES + STATE_BYTES * (load.parameters - load.updated_on_host)
    if load.placement == "host":
        into, out = into + load.boundary_bytes, out + load.boundary_bytes
    if load.kept_gradients and load.settings.gradient_placement == "host":
        half = load.recipe.dtype == "bf16" and load.recipe.gradient_accumulation_steps == 1
        out += load.parameters * (2 if half else PARAMETER_BYTES)
    busy = {
        "arithmetic": compute_seconds(load, rates),
        "the optimizer": _device_updates(load, rates),
        "updates on the processor": _host_updates(load, rates),
        "digests and commits": _write_seconds(load, rates),
    }
    if rates.link is not None:
        busy["the link"] = rates.link.seconds(into, out)
    return busy
