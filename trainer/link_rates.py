"""How fast a device's link moves bytes: in, out, both ways at once, and from pageable memory.

Owns the measurement, a few hundred megabytes each. Knows nothing of what is moved in a step.
"""

from __future__ import annotations

import torch

from trainer.ceiling import shortest_seconds
from trainer.device import Device
from trainer.device_lanes import Lane, lanes_of
from trainer.rates import LinkRates

COPY_BYTES, PAGEABLE_BYTES = 256 << 20, 64 << 20


def link_rates(device: Device) -> LinkRates | None:
    """Measure; None where steps compute in host memory."""
    if device.is_host:
        return None
    lanes = lanes_of(device)
    host = [device.host_buffer(COPY_BYTES, "measuring the link") for _ in range(2)]
    there = [torch.empty_like(each, device=device.torch_device) for each in host]
    loose = torch.ones(PAGEABLE_BYTES, dtype=torch.uint8)

    def into() -> None:
        there[0].copy_(host[0], non_blocking=True)

    def out() -> None:
        host[1].copy_(there[1], non_blocking=True)

    def both() -> None:
        with lanes.on(Lane.PARAMS_IN):
            into()
        with lanes.on(Lane.OUT):
            out()

    return LinkRates(
        into=COPY_BYTES / shortest_seconds(into, device),
        out=COPY_BYTES / shortest_seconds(out, device),
        both=COPY_BYTES / shortest_seconds(both, device),
        pageable=PAGEABLE_BYTES
        / shortest_seconds(lambda: there[0][:PAGEABLE_BYTES].copy_(loose), device),
    )
