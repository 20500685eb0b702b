"""A table of rates as if a machine had been measured."""

from __future__ import annotations

from trainer.rates import LinkRates, PassSeconds, Rates

# A card of a workstation: a link that copies 25 GB/s, a disk that writes 2.
FAST = Rates(
    matmul_flops=1e14,
    host_copy_bytes=1e10,
    link=LinkRates(into=2.5e10, out=2.5e10, both=2e10, pageable=5e9),
    disk_write_bytes=2e9,
    disk_read_bytes=2e9,
    active_write_bytes=2e10,
    host_update=1e9,
    device_update=5e10,
    block_forward=PassSeconds(fixed=1e-4, per_row=1e-4),
    block_backward=PassSeconds(fixed=3e-4, per_row=3e-4),
    head=PassSeconds(fixed=0.0, per_row=1e-4),
)
