"""Do recordings of a CUDA device hold, one after the other and on any device?"""

from __future__ import annotations

import gc

import pytest
import torch

from trainer.device import Device
from trainer.device_lanes import CudaLanes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def recorded_double(lanes: CudaLanes, x: torch.Tensor) -> float:
    """Record a product, do it again on other content, give the result; all of it is dropped."""
    captured = lanes.capture(lambda: x * 2)
    assert captured is not None
    result, again = captured
    x.fill_(3.0)
    again()
    return float(result.sum())


@pytest.mark.parametrize("index", range(max(1, torch.cuda.device_count())))
def test_can_be_recorded_after_every_recording_was_dropped(index: int) -> None:
    device = Device.from_name(f"cuda:{index}")
    lanes = CudaLanes(device)
    for _ in range(3):
        x = torch.ones(5, device=device.torch_device)
        assert recorded_double(lanes, x) == 5 * 3 * 2
        gc.collect()


def test_do_recordings_leave_no_memory_behind() -> None:
    """cuBLAS keeps memory for each stream it ever ran in: recordings share one."""
    device = Device.from_name("cuda:0")
    x = torch.ones(64, 64, device=device.torch_device)
    _ = x @ x  # cuBLAS cannot be begun while something is recorded
    held = []
    for _ in range(4):
        x = torch.ones(64, 64, device=device.torch_device)
        captured = CudaLanes(device).capture(lambda x=x: x @ x)  # type: ignore[misc]
        assert captured is not None
        del captured, x
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[1:] == held[1:2] * 3


def test_what_recordings_hold_goes_with_their_lanes() -> None:
    device = Device.from_name("cuda:0")
    x = torch.ones(1 << 20, device=device.torch_device)
    lanes = CudaLanes(device)
    captured = lanes.capture(lambda: x.copy_((x * 2) * 3))
    assert device.captured_bytes >= x.nbytes
    del captured, lanes
    gc.collect()
    assert device.captured_bytes == 0


def test_is_a_recording_of_nothing_an_error() -> None:
    lanes = CudaLanes(Device.from_name("cuda:0"))
    with pytest.raises(UserWarning, match="empty"):
        lanes.capture(lambda: None)
