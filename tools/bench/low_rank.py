"""Adapters' products on a GPU: fp32 as PyTorch multiplies it, against parts in bf16.

Two modules of one input, as `q_proj` and `v_proj` of an 8 B block, compiled, forward and backward,
in turns, for several lengths of the sums that tensor cores make. Beside the times stand the errors
of each product against float64, by the root of the mean square and the largest, both relative to
the root of the mean square of what is right.

    python -m tools.bench.low_rank --tokens 8192 --hidden 4096
    python -m tools.bench.low_rank --device cpu --tokens 256 --hidden 512 --kv 128 --rounds 2
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.device import Device
from trainer.model import low_rank
from trainer.model.compiled import compiled

# Of sums over a block's width, and of sums over tokens.
PIECES = ((512, 256), (512, 512), (256, 128), (1 << 20, 1 << 20))
SHOWN = 24
SCALE = 2.0
AT_ONCE = 10


@dataclass(frozen=True, kw_only=True)
class Given:
    """Tensors of one block: x, A and B of two modules, their bases and gradients."""

    rank: int
    x: Tensor
    a: list[Tensor]
    b: list[Tensor]
    base: list[Tensor]
    gradients: list[Tensor]

    @classmethod
    def drawn(cls, arguments: argparse.Namespace, device: Device, mean: float) -> Given:
        """Draw them."""
        place = device.torch_device
        generator = torch.Generator(place).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=place)

        tokens, hidden, rank = arguments.tokens, arguments.hidden, arguments.rank
        widths = (hidden, arguments.kv)
        return cls(
            rank=rank,
            x=(draw(tokens, hidden) + mean).bfloat16(),
            a=[draw(rank, hidden) * hidden**-0.5 for _ in widths],
            b=[draw(width, rank) * 0.02 for width in widths],
            base=[draw(tokens, width).bfloat16() for width in widths],
            gradients=[(draw(tokens, width) + mean).bfloat16() for width in widths],
        )


def in_fp32(given: Given) -> list[Tensor]:
    """Give outputs and all gradients, with products of fp32."""
    rank, x = given.rank, given.x
    stacked = torch.cat(given.a)
    lows = torch.split(F.linear(x.float(), stacked), rank, dim=-1)
    found, of_lows = [], []
    for low, b, base, g in zip(lows, given.b, given.base, given.gradients, strict=True):
        found.append(base + (F.linear(low, b) * SCALE).to(base.dtype))
        wide = g.float() * SCALE
        of_lows.append(wide @ b)
        found.append(wide.t() @ low)
    of_low = torch.cat(of_lows, dim=-1)
    return [*found, (of_low @ stacked).to(x.dtype), of_low.t() @ x.float()]


def in_parts(given: Given) -> list[Tensor]:
    """Give the same with products of parts in bf16."""
    rank, x = given.rank, given.x
    stacked = torch.cat(given.a)
    lows = torch.split(low_rank.narrowed(x, stacked), rank, dim=-1)
    found, of_lows = [], []
    for low, b, base, g in zip(lows, given.b, given.base, given.gradients, strict=True):
        added = low_rank.raised(low, b, SCALE, base.dtype)
        found.append((base[None] + added[None])[0])
        of_low, of_b = low_rank.back_raised(g, low, b, SCALE)
        of_lows.append(of_low)
        found.append(of_b)
    return [*found, *low_rank.back_narrowed(torch.cat(of_lows, dim=-1), x, stacked)]


def arm(work: Callable[[Given], list[Tensor]], given: Given) -> Callable[[], list[Tensor]]:
    """Give one way of multiplying, compiled with the pieces that are set now."""
    tensors = (given.x, *given.a, *given.b, *given.base, *given.gradients)

    def function(x: Tensor, *others: Tensor) -> list[Tensor]:
        pairs = [list(others[start : start + 2]) for start in range(0, 8, 2)]
        names = ("a", "b", "base", "gradients")
        return work(Given(rank=given.rank, x=x, **dict(zip(names, pairs, strict=True))))

    called = compiled(function)
    called(*tensors)
    return lambda: called(*tensors)


def errors(given: Given, *, is_split: bool) -> dict[str, tuple[float, float]]:
    """Give the errors of the products, each of what the way before it gave."""
    x, g, a, b = given.x, given.gradients[0], given.a[0], given.b[0]
    right = (x.double() @ a.double().t()).float()
    low = low_rank.narrowed(x, a) if is_split else F.linear(x.float(), a)
    if is_split:
        up = low_rank.raised(right, b, SCALE, torch.float32)
        of_low, of_b = low_rank.back_raised(g, right, b, SCALE)
        of_x, of_a = low_rank.back_narrowed(right, x, a)
    else:
        wide = g.float() * SCALE
        up = F.linear(right, b) * SCALE
        of_low, of_b = wide @ b, wide.t() @ right
        of_x, of_a = (right @ a).bfloat16(), right.t() @ x.float()
    low64, x64, g64 = right.double(), x.double(), g.double() * SCALE
    return {
        "x A^T": _error(low, x64 @ a.double().t()),
        "low B^T": _error(up, low64 @ b.double().t() * SCALE),
        "g B": _error(of_low, g64 @ b.double()),
        "g^T low": _error(of_b, g64.t() @ low64),
        "low A": _error(of_x, low64 @ a.double()),
        "low^T x": _error(of_a, low64.t() @ x64),
    }


def _error(found: Tensor, right: Tensor) -> tuple[float, float]:
    size = right.square().mean().sqrt()
    off = found.double() - right
    return float(off.square().mean().sqrt() / size), float(off.abs().max() / size)


def milliseconds(function: Callable[[], list[Tensor]], device: Device) -> float:
    """Time one pass both ways, of some that are asked for at once."""
    device.wait()
    began = time.perf_counter()
    for _ in range(AT_ONCE):
        function()
    device.wait()
    return (time.perf_counter() - began) / AT_ONCE * 1e3


def kernels_of(function: Callable[[], list[Tensor]]) -> str:
    """Give what a device runs in one pass, what takes longest first, and its sum."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
    kernels = [row for row in profile.key_averages() if row.device_type.name == "CUDA"]
    kernels.sort(key=lambda row: -row.self_device_time_total)
    lines = [
        f"  {row.self_device_time_total:9.1f} us {row.count:4} {row.key[:90]}"
        for row in kernels[:SHOWN]
    ]
    total = sum(row.self_device_time_total for row in kernels)
    return "\n".join([*lines, f"  {total:9.1f} us in all"])


def compare(arguments: argparse.Namespace, device: Device) -> None:
    """Print errors, times and kernels."""
    for mean in (0.0, 1.0):
        given = Given.drawn(arguments, device, mean)
        print(f"errors (mean square, largest), inputs of mean {mean}")
        said = {"fp32": errors(given, is_split=False)}
        for pieces in PIECES:
            low_rank.PIECE, low_rank.TOKENS_PIECE = pieces
            said[f"pieces of {pieces}"] = errors(given, is_split=True)
        for name, found in said.items():
            cells = (f"{key} {rms:.2e} {most:.2e}" for key, (rms, most) in found.items())
            print(f"  {name:<22}", "; ".join(cells), flush=True)
    given = Given.drawn(arguments, device, 0.0)
    arms = {"fp32": arm(in_fp32, given)}
    for pieces in PIECES:
        low_rank.PIECE, low_rank.TOKENS_PIECE = pieces
        arms[f"pieces of {pieces}"] = arm(in_parts, given)
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(arguments.rounds):
        for name, function in arms.items():
            times[name].append(milliseconds(function, device))
    for name, taken in times.items():
        middle = statistics.median(taken)
        print(f"  {name:<22} {middle:.3f} ms ({min(taken):.3f}..{max(taken):.3f})", flush=True)
    if not device.is_host:
        for name, function in arms.items():
            print(name, kernels_of(function), sep="\n", flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Compare both ways."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--kv", type=int, default=1024, help="width of the second module")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(words)
    compare(arguments, Device.from_name(arguments.device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
