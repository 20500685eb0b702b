"""Do kernels of attention go back from what was kept, by whichever library?

cuDNN's own interface is played here by a stand-in, which a processor's kernel computes for: what is
tested is which tensor goes where, that a graph is made once, and what happens where there is none.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.device import Device
from trainer.lora import attention, cudnn_graph
from trainer.lora.attention import Attention, Chosen, CudnnBoth, HostFused, attention_for
from trainer.lora.cudnn_graph import BESIDE_BYTES, NoKernelError, parts_of, room_bytes
from trainer.model.layers import causal_attention, split_heads
from trainer.vram_trace import META

ROWS, POSITIONS, HEADS, KEYS, WIDTH = 2, 24, 4, 2, 8
Heads = tuple[Tensor, Tensor, Tensor]


class NotSupportedError(Exception):
    """What the library raises where it has no kernel."""


class Name:
    """A tensor as a graph knows it."""

    def __init__(self, **form: Any) -> None:
        self.form = form

    def _set(self, value: object) -> Name:
        self.form[str(len(self.form))] = value
        return self

    set_output = set_dim = set_stride = set_data_type = _set


class Graph:
    """Computes by a processor's kernel what the library would compute."""

    made: list[Graph]
    can = True

    def __init__(self, **types: Any) -> None:
        self.types = types
        self.made.append(self)

    def tensor(self, **form: Any) -> Name:
        return Name(**form)

    def sdpa_backward(self, **named: Any) -> list[Name]:
        assert named.pop("use_causal_mask")
        assert named.pop("use_deterministic_algorithm")
        assert named.pop("attn_scale") == pytest.approx(WIDTH**-0.5)
        self.inputs, self.outputs = named, [Name(), Name(), Name()]
        return self.outputs

    def validate(self) -> None:
        if not self.can:
            raise NotSupportedError("no kernel")

    def create_execution_plans(self, modes: list[str]) -> None:
        assert modes == ["A"]

    def build_operation_graph(self) -> None:
        assert len(self.inputs) == 6

    check_support = build_plans = build_operation_graph

    def get_workspace_size(self) -> int:
        return 16

    def execute(self, named: dict[Name, Tensor], room: Tensor, *, handle: str) -> None:
        assert room.nbytes >= 16
        assert handle == "handle"
        given = {key: named[name] for key, name in self.inputs.items()}
        for name, tensor in ((self.inputs[key], each) for key, each in given.items()):
            assert name.form["dim"] == list(tensor.shape)
            assert name.form["stride"] == list(tensor.stride())
        heads = (given["q"], given["k"], given["v"])
        found = HostFused().back(given["dO"], heads, given["o"], given["stats"][..., 0])
        for name, each in zip(self.outputs, found, strict=True):
            named[name].copy_(each)


def library() -> SimpleNamespace:
    return SimpleNamespace(
        create_handle=lambda: "handle",
        set_stream=lambda *_given: None,
        pygraph=Graph,
        cudnnGraphNotSupportedError=NotSupportedError,
        data_type=SimpleNamespace(BFLOAT16="bf16", HALF="fp16", FLOAT="fp32"),
        heur_mode=SimpleNamespace(A="A"),
    )


def heads(dtype: torch.dtype = torch.float32) -> tuple[Heads, Tensor]:
    generator = torch.Generator().manual_seed(1)
    query, key, value, gradient = (
        split_heads(
            torch.randn(ROWS, POSITIONS, count * WIDTH, generator=generator, dtype=dtype), WIDTH
        )
        for count in (HEADS, KEYS, KEYS, HEADS)
    )
    return (query, key, value), gradient


def gone_back(kernel: Attention, given: Heads, gradient: Tensor) -> list[Tensor]:
    mixed, sums = kernel.forward(*given)
    return [mixed, *kernel.back(gradient, given, mixed, sums)]


def by_autograd(given: Heads, gradient: Tensor) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in given]
    mixed = causal_attention(*leaves)
    return [mixed.detach(), *torch.autograd.grad(mixed, leaves, gradient)]


@pytest.fixture
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a library that says which device it is for, and a kernel there of a processor."""
    Graph.made = []
    monkeypatch.setattr(cudnn_graph, "library", library)
    monkeypatch.setattr(cudnn_graph, "stream_address", lambda _device: 0)
    monkeypatch.setattr(attention.CudnnThere, "forward", HostFused.forward)
    monkeypatch.setattr(attention.Flash, "back", HostFused.back)


def test_a_processor_has_a_kernel_with_sums() -> None:
    given, gradient = heads()
    kernel = attention_for(*given)
    assert isinstance(kernel, HostFused)
    expected = by_autograd(given, gradient)
    for found in (gone_back(kernel, given, gradient), gone_back(Chosen(), given, gradient)):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.usefixtures("_stand_in")
def test_the_library_is_handed_what_it_asks_for_and_makes_a_graph_once() -> None:
    given, gradient = heads()
    kernel = CudnnBoth()
    expected = by_autograd(given, gradient)
    for _ in range(2):
        found = gone_back(kernel, given, gradient)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert [each.stride() for each in found[1:]] == [each.stride() for each in given]
    assert len(Graph.made) == 1
    halves, gradient = heads(torch.bfloat16)
    gone_back(kernel, halves, gradient)
    assert [graph.types["io_data_type"] for graph in Graph.made] == ["fp32", "bf16"]


def test_heads_that_cudnn_has_no_kernel_for_go_the_other_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A processor has none at all."""
    monkeypatch.setattr(attention.Flash, "forward", HostFused.forward)
    given, _ = heads()
    kernel = CudnnBoth()
    for _ in range(2):
        mixed, sums = kernel.forward(*given)
        expected = HostFused().forward(*given)
        assert torch.equal(mixed, expected[0])
        assert torch.equal(sums, expected[1])


def room_for(groups: int, positions: int = POSITIONS) -> int:
    """Give what the way back of so many groups of heads of a row takes."""
    return BESIDE_BYTES + groups * cudnn_graph._workspace_bytes(HEADS // KEYS, positions, WIDTH)


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize(("groups", "calls"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_heads_and_rows_go_back_in_as_few_parts_as_there_is_room_for(
    groups: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn_graph, "room_bytes", lambda *_heads: room_for(groups))
    given, gradient = heads()
    parts = parts_of(*given[:2])
    assert parts.workspace_bytes <= room_for(groups)
    assert len([*parts.cut(given)]) == calls
    found, expected = gone_back(CudnnBoth(), given, gradient), by_autograd(given, gradient)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(Graph.made) == 1


def test_the_parts_of_an_8_b_model_take_no_more_than_the_other_kernel() -> None:
    def part(rows: int, positions: int) -> tuple[int, int]:
        query, key = (
            torch.empty(rows, count, positions, 128, dtype=torch.bfloat16, device=META)
            for count in (32, 8)
        )
        found = parts_of(query, key)
        assert found.workspace_bytes <= room_bytes(query, key)
        return found.rows, found.keys

    # An H200 was seen to take 1,209,008,384 bytes for 4 x 2048 at once, 4,430,233,856 for 1 x 8192.
    assert cudnn_graph._workspace_bytes(4 * 32, 2048, 128) + 256 == 1209008384
    assert cudnn_graph._workspace_bytes(32, 8192, 128) + 256 == 4430233856
    assert [part(4, 2048), part(1, 8192), part(4, 512)] == [(1, 8), (1, 1), (4, 8)]
    with pytest.raises(NoKernelError, match="one group of heads takes"):
        part(1, 32768)


@pytest.mark.usefixtures("_stand_in")
@pytest.mark.parametrize("missing", ["library", "kernel"])
def test_without_it_the_other_kernel_goes_back(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_library() -> None:
        raise NoKernelError("it is not installed")

    if missing == "library":
        monkeypatch.setattr(cudnn_graph, "library", no_library)
    monkeypatch.setattr(Graph, "can", missing != "kernel")
    given, gradient = heads()
    found = gone_back(CudnnBoth(), given, gradient)
    expected = by_autograd(given, gradient)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert len(Graph.made) == (missing == "kernel")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("rows", "positions"), [(4, 2048), (1, 8192), (3, 200)])
def test_a_devices_kernel_gives_the_same_bits_each_time_within_its_room(
    rows: int, positions: int
) -> None:
    place = Device.from_name("cuda")
    query, key, value, gradient = (
        split_heads(
            torch.randn(
                rows, positions, count * 128, device=place.torch_device, dtype=torch.bfloat16
            ),
            128,
        )
        for count in (32, 8, 8, 32)
    )
    given = (query, key, value)
    kernel = attention_for(*given)
    first = gone_back(kernel, given, gradient)
    assert all(
        torch.equal(a, b)
        for _ in range(4)
        for a, b in zip(gone_back(kernel, given, gradient), first, strict=True)
    )
    mixed, sums = kernel.forward(*given)
    place.wait()
    place.forget_peak()
    before = place.peak_bytes()
    found = kernel.back(gradient, given, mixed, sums)
    beside = place.peak_bytes() - before - sum(each.nbytes for each in found)
    print(
        f"{type(kernel).__name__}, {rows} x {positions}: {beside:,} of {room_bytes(query, key):,}"
    )
    assert beside <= room_bytes(query, key)
    exact = by_autograd((query.float(), key.float(), value.float()), gradient.float())
    off = [float((a.float() - b).norm() / b.norm()) for a, b in zip(first, exact, strict=True)]
    assert max(off) < 2.0**-7, off
