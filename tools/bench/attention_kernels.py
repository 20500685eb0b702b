"""Which kernel of attention is fastest where sums have to come out the same each time?

Runs causal attention in bf16 by each kernel that PyTorch has for it, forward and back, with
deterministic algorithms asked for: seconds, operations a second, whether five runs give the same
bits, what each takes of memory beside inputs and results, and how far it is from fp32. Query heads
share key heads as in Llama-3.1-8B; a kernel that cannot do that is given each key head four times.

    python -m tools.bench.attention_kernels --json kernels.json
    python -m tools.bench.attention_kernels --device cpu --shapes 1:64 --heads 4:2:16 --times 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from trainer.device import Device
from trainer.model.layers import split_heads

SHAPES = "4:2048,1:8192,4:512"
RUNS = 5
Attention = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Callable[[Tensor], Sequence[Tensor]]]]


def by_backend(backend: SDPBackend, *, repeats: bool) -> Attention:
    """Give attention through PyTorch's own choice, which is narrowed to one kernel."""

    def attend(
        q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Callable[[Tensor], Sequence[Tensor]]]:
        leaves = [each.detach().requires_grad_() for each in (q, k, v)]
        times = q.shape[1] // k.shape[1] if repeats else 1
        with torch.enable_grad(), sdpa_kernel(backend):
            keys, values = (
                each if times == 1 else each.repeat_interleave(times, 1) for each in leaves[1:]
            )
            found = F.scaled_dot_product_attention(
                leaves[0], keys, values, is_causal=True, enable_gqa=times == 1
            )
        return found.detach(), lambda gradient: torch.autograd.grad(found, leaves, gradient)

    return attend


def unasked(attend: Attention) -> Attention:
    """Give the same without deterministic algorithms being asked for."""

    @contextmanager
    def not_asked() -> Iterator[None]:
        torch.use_deterministic_algorithms(False)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(True)

    def attended(
        q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Callable[[Tensor], Sequence[Tensor]]]:
        with not_asked():
            out, back = attend(q, k, v)

        def gone_back(gradient: Tensor) -> Sequence[Tensor]:
            with not_asked():
                return back(gradient)

        return out, gone_back

    return attended


def by_flex(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Callable[[Tensor], Sequence[Tensor]]]:
    """Compile PyTorch's attention of flexible masks."""
    leaves = [each.detach().requires_grad_() for each in (q, k, v)]
    mask = _causal_mask(q.shape[2], q.device)
    with torch.enable_grad():
        found = _flex()(*leaves, block_mask=mask, enable_gqa=True)
    return found.detach(), lambda gradient: torch.autograd.grad(found, leaves, gradient)


@cache
def _flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)


@cache
def _causal_mask(positions: int, device: torch.device) -> BlockMask:
    def sees(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return create_block_mask(sees, None, None, positions, positions, device=device)


def by_cudnn(
    q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Callable[[Tensor], Sequence[Tensor]]]:
    """Call cuDNN's operator by name: asked for deterministic ones, PyTorch does not choose it."""
    aten = torch.ops.aten
    found = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)
    out, sums, cum_q, cum_k, max_q, max_k, seed, offset = found[:8]

    def back(gradient: Tensor) -> Sequence[Tensor]:
        saved = (q, k, v, out, sums, seed, offset, None, cum_q, cum_k, max_q, max_k)
        return tuple(aten._scaled_dot_product_cudnn_attention_backward(gradient, *saved, 0.0, True))

    return out, back


KERNELS: dict[str, Attention] = {
    "math": by_backend(SDPBackend.MATH, repeats=False),
    "flash": by_backend(SDPBackend.FLASH_ATTENTION, repeats=False),
    "flash, repeated": by_backend(SDPBackend.FLASH_ATTENTION, repeats=True),
    "flash, unasked": unasked(by_backend(SDPBackend.FLASH_ATTENTION, repeats=False)),
    "cudnn": by_cudnn,
    "cudnn, unasked": unasked(by_cudnn),
    "efficient, repeated": by_backend(SDPBackend.EFFICIENT_ATTENTION, repeats=True),
    "flex": by_flex,
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one kernel did for one shape; `failed` where it could not."""

    kernel: str
    rows: int
    positions: int
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    forward_tflops: float = 0.0
    backward_tflops: float = 0.0
    same_bits: bool = False
    forward_extra_bytes: int = 0
    backward_extra_bytes: int = 0
    errors: tuple[float, ...] = ()
    strides: tuple[tuple[int, ...], ...] = ()
    failed: str = ""


class Bench:
    """One shape of rows, positions and heads on a device."""

    def __init__(
        self, device: str, rows: int, positions: int, heads: tuple[int, int, int], times: int
    ) -> None:
        self._place = Device.from_name(device)
        self._device = self._place.torch_device
        self._rows, self._positions, self._heads, self._times = rows, positions, heads, times
        generator = torch.Generator(self._device).manual_seed(0)
        query, key, width = heads
        self._given = [
            split_heads(
                torch.randn(
                    rows,
                    positions,
                    count * width,
                    generator=generator,
                    device=self._device,
                    dtype=torch.bfloat16,
                ),
                width,
            )
            for count in (query, key, key, query)
        ]
        self._exact = self._reference()

    def row(self, name: str) -> Row:
        """Measure one kernel."""
        place = {"kernel": name, "rows": self._rows, "positions": self._positions}
        try:
            return self._row(name, KERNELS[name], place)
        except (RuntimeError, TypeError) as error:
            return Row(**place, failed=str(error).strip().splitlines()[0][:200])  # type: ignore[arg-type]

    def _row(self, name: str, attend: Attention, place: dict[str, object]) -> Row:
        q, k, v, wanted = self._given
        runs = []
        for _ in range(RUNS):
            out, back = attend(q, k, v)
            runs.append((out, *back(wanted)))
        extra = self._extra(attend)
        seconds = self._seconds(attend)
        query, _, width = self._heads
        flops = 2.0 * self._rows * query * self._positions**2 * width
        return Row(
            **place,  # type: ignore[arg-type]
            forward_ms=seconds[0] * 1e3,
            backward_ms=seconds[1] * 1e3,
            forward_tflops=flops / seconds[0] / 1e12,
            backward_tflops=2.5 * flops / seconds[1] / 1e12,
            same_bits=all(
                torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True)
            ),
            forward_extra_bytes=extra[0],
            backward_extra_bytes=extra[1],
            errors=tuple(
                float((a.float() - b).norm() / b.norm())
                for a, b in zip(runs[0], self._exact, strict=True)
            ),
            strides=tuple(each.stride() for each in runs[0]),
        )

    def _reference(self) -> list[Tensor]:
        """Give the results in fp32, of one row at a time."""
        found = []
        for row in zip(*self._given, strict=True):
            q, k, v, wanted = (each[None].float() for each in row)
            out, back = KERNELS["math"](q, k, v)
            found.append((out, *back(wanted)))
        return [torch.cat(each) for each in zip(*found, strict=True)]

    def _seconds(self, attend: Attention) -> tuple[float, float]:
        q, k, v, wanted = self._given
        forward, backward = [], []
        for _ in range(self._times):
            began = self._now()
            _, back = attend(q, k, v)
            between = self._now()
            back(wanted)
            ended = self._now()
            forward.append(between - began)
            backward.append(ended - between)
        return statistics.median(forward), statistics.median(backward)

    def _now(self) -> float:
        self._place.wait()
        return time.perf_counter()

    def _extra(self, attend: Attention) -> tuple[int, int]:
        """Give the bytes beside inputs and results, forward and back."""
        q, k, v, wanted = self._given
        self._place.wait()
        before = self._held()
        out, back = attend(q, k, v)
        forward = self._place.peak_bytes() - before - out.nbytes
        before = self._held()
        found = back(wanted)
        beside = self._place.peak_bytes() - before - sum(each.nbytes for each in found)
        return (0, 0) if self._place.is_host else (forward, beside)

    def _held(self) -> int:
        """Give what tensors hold now, and begin to look for the most again."""
        self._place.forget_peak()
        return self._place.peak_bytes()


def line_of(row: Row) -> str:
    """Give a row for people."""
    head = f"{row.rows} x {row.positions:<5} {row.kernel:<20}"
    if row.failed:
        return f"{head} cannot: {row.failed}"
    return (
        f"{head} forward {row.forward_ms:7.3f} ms, {row.forward_tflops:4.0f} TFLOP/s;"
        f" back {row.backward_ms:7.3f} ms, {row.backward_tflops:4.0f} TFLOP/s;"
        f" {'same bits' if row.same_bits else 'OTHER BITS'};"
        f" beside {row.forward_extra_bytes / 1e6:.1f} and {row.backward_extra_bytes / 1e6:.1f} MB;"
        f" off by {', '.join(f'{error:.1e}' for error in row.errors)}"
    )


def main(words: Sequence[str] | None = None) -> int:
    """Print a line a shape and kernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shapes", default=SHAPES, help="ROWS:POSITIONS, comma-separated")
    parser.add_argument("--heads", default="32:8:128", help="of queries, of keys, width")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--json", type=Path, help="file for the rows")
    given = parser.parse_args(words)
    torch.use_deterministic_algorithms(True)
    query, key, width = (int(word) for word in given.heads.split(":"))
    found = []
    for text in given.shapes.split(","):
        rows, positions = (int(word) for word in text.split(":"))
        bench = Bench(given.device, rows, positions, (query, key, width), given.times)
        for name in KERNELS:
            if name != "math":
                found.append(bench.row(name))
                print(line_of(found[-1]), flush=True)
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in found], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
