"""The whole table of a machine's rates for a run, measured within some seconds.

Owns the order of the measurements, what is said while they are made, and what is not measured: a
store on a RAM disk has no disk. Knows nothing of what is chosen by the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.budget import existing_parent
from trainer.ceiling import measure
from trainer.device import Device
from trainer.link_rates import link_rates
from trainer.pass_rates import pass_times, update_rate
from trainer.rates import Rates
from trainer.store_rates import StoreRates, store_rates
from trainer.vram import StepShape
from trainer.writer_threads import WRITER_THREADS, writer_threads

# Of one store. With what computes, which takes some ten passes of a tenth of a second, all of it
# takes some seconds; compiling blocks comes on top, once a machine.
STORE_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Where a run's steps compute, and where its stores lie."""

    device: Device
    store: Path
    active: Path | None = None
    allow_network: bool = False
    pipelined: bool = False


def measured_rates(shape: StepShape, machine: Machine, note: Callable[[str], None]) -> Rates:
    """Measure everything that a step of this shape needs here; `note` is told of each part."""
    began = time.perf_counter()
    device, options = machine.device, shape.options
    note("--fit measures this machine for some seconds: matrix products, copies")
    ceiling = measure(options.torch_dtype, device)
    link = link_rates(device)
    note("--fit measures updates, and passes of a block and the head")
    host_update = update_rate(options, Device.from_name("cpu"))
    device_update = (
        host_update if device.is_host else update_rate(options, device, in_place=machine.pipelined)
    )
    passes = pass_times(shape, device, ceiling.matmul_flops_per_second, records=machine.pipelined)
    note(f"--fit measures the disk of {machine.store}")
    disk = _store_rates(machine.store, machine, WRITER_THREADS, note)
    active = None
    if machine.active is not None:
        active = _store_rates(machine.active, machine, writer_threads(device), note)
    device.forget_peak()
    return Rates(
        matmul_flops=ceiling.matmul_flops_per_second,
        host_copy_bytes=ceiling.copy_bytes_per_second,
        link=link,
        disk_write_bytes=disk.write if disk else None,
        disk_read_bytes=disk.read if disk else None,
        active_write_bytes=active.write if active else None,
        host_update=host_update,
        device_update=device_update,
        block_forward=passes.forward,
        block_backward=passes.backward,
        head=passes.head,
        disk_shard_seconds=disk.shard_seconds if disk else 0.0,
        active_shard_seconds=active.shard_seconds if active else 0.0,
        seconds=time.perf_counter() - began,
    )


def _store_rates(
    path: Path, machine: Machine, threads: int, note: Callable[[str], None]
) -> StoreRates | None:
    """Measure where a store is or will be; say so where that cannot be done."""
    folder = path if path.is_mount() else existing_parent(path.absolute().parent)
    try:
        found = store_rates(
            folder,
            seconds=STORE_SECONDS,
            threads=threads,
            allow_network=machine.allow_network,
        )
    except OSError as error:
        note(f"--fit: {folder} was not measured: {error.strerror or error}")
        return None
    if found is None:
        note(f"--fit: {folder} was not measured: there is no room for a small store on it")
    return found
