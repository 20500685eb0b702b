"""What was measured of a machine: how fast it moves bytes, multiplies, updates, and passes a block.

Owns the table and its form as JSON. Knows nothing of how a rate is measured, nor of what is
forecast from it: a test may write a table by hand. Bytes and operations are a second, times are
seconds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class PassSeconds:
    """The time of one pass of one micro-batch: what every call costs, and what each row adds."""

    fixed: float
    per_row: float

    def of(self, rows: int) -> float:
        """Give the seconds of a micro-batch of so many rows."""
        return self.fixed + self.per_row * rows


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRates:
    """Copies between host and device, in bytes a second.

    into, out: one way alone, page-locked; both: each way while both are busy; pageable: one way,
    from memory that is not locked.
    """

    into: float
    out: float
    both: float
    pageable: float

    def seconds(self, into_bytes: float, out_bytes: float) -> float:
        """Give the least time in which both are moved, beside one another."""
        together = min(into_bytes, out_bytes)
        alone = (into_bytes - together) / self.into + (out_bytes - together) / self.out
        return together / self.both + alone


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The whole table.

    matmul_flops, host_copy_bytes: as in `trainer.ceiling`; link: None where steps compute in host
    memory; disk_write_bytes: commits into the durable store, synced; disk_read_bytes: objects that
    are in no cache; active_write_bytes: commits into the active store; each None where there is no
    such store or it could not be measured; host_update, device_update: parameters a second through
    the optimizer on the processor, and where the step computes; block_backward: with the pass that
    it computes again; head: forward and backward; disk_shard_seconds, active_shard_seconds: what
    a shard costs a commit whatever its size; seconds: what measuring took.
    """

    matmul_flops: float
    host_copy_bytes: float
    link: LinkRates | None
    disk_write_bytes: float | None
    disk_read_bytes: float | None
    active_write_bytes: float | None
    host_update: float
    device_update: float
    block_forward: PassSeconds
    block_backward: PassSeconds
    head: PassSeconds
    disk_shard_seconds: float = 0.0
    active_shard_seconds: float = 0.0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Give the table as a plain dictionary."""
        return asdict(self)

    @property
    def lines(self) -> list[str]:
        """Give the table for people."""
        gb, link = 1e9, self.link
        said = [f"matrix products {self.matmul_flops / 1e12:.3g} TFLOP/s"]
        if link is not None:
            said.append(
                f"link {link.into / gb:.3g} GB/s in, {link.out / gb:.3g} out, {link.both / gb:.3g}"
                f" each way at once, {link.pageable / gb:.3g} pageable"
            )
        for what, rate in (
            ("disk", self.disk_write_bytes),
            ("disk, reading", self.disk_read_bytes),
            ("active store", self.active_write_bytes),
        ):
            if rate is not None:
                said.append(f"{what} {rate / gb:.3g} GB/s")
        said.append(
            f"updates {self.host_update / 1e6:.3g} million parameters/s on the processor,"
            f" {self.device_update / 1e6:.3g} where the step computes"
        )
        return said
