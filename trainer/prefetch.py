"""How coming shards are brought nearer while one computes: how many, which, and where to.

Owns what `--prefetch-shards` and its companions mean. Knows nothing of the order of shards or of
what is computed with them. None of it changes a bit: the same bytes arrive, only earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardb import ShardView
from trainer.device import Device
from trainer.options import EngineOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefetch:
    """What a window reads ahead.

    window: shards read ahead at most, 0 for none; optimizer_shards: whether optimizer state is read
    ahead too; send: called with each parameter shard read ahead, to copy it nearer to its device.
    """

    window: int = 0
    optimizer_shards: bool = True
    send: Callable[[ShardView], None] | None = None


def prefetch_of(options: EngineOptions, device: Device) -> Prefetch:
    """Give what the options ask for; InputError where the device for it is not there."""
    if options.prefetch == "off":
        return Prefetch()
    return Prefetch(
        window=options.prefetch_window,
        optimizer_shards=options.prefetch_optimizer_shards,
        send=device.open_ahead(options.prefetch),
    )
