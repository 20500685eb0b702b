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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.device import Device
from trainer.model import low_rank
from trainer.model.adapters import Adapter
from trainer.model.compiled import compiled

PIECES = (256, 512, 1024, 2048, 1 << 20)
SCALE = 2.0
AT_ONCE = 10


class Given:
    """Drawn tensors of one block: x, A and B of two modules, their bases and gradients."""

    def __init__(self, arguments: argparse.Namespace, device: Device, mean: float) -> None:
        place = device.torch_device
        generator = torch.Generator(place).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=place)

        tokens, hidden, rank = arguments.tokens, arguments.hidden, arguments.rank
        widths = (hidden, arguments.kv)
        self.rank = rank
        self.x = (draw(tokens, hidden) + mean).bfloat16()
        self.a = [draw(rank, hidden) * hidden**-0.5 for _ in widths]
        self.b = [draw(width, rank) * 0.02 for width in widths]
        self.base = [draw(tokens, width).bfloat16() for width in widths]
        self.gradients = [(draw(tokens, width) + mean).bfloat16() for width in widths]

    def leaves(self) -> list[Tensor]:
        """Give what gradients are taken of."""
        return [t.detach().requires_grad_() for t in (self.x, *self.a, *self.b, *self.base)]


def arm(rank: int, *, in_parts: bool) -> Callable[..., Any]:
    """Give both modules' outputs by one way of multiplying; a new function each, compiled anew."""

    def forward(x: Tensor, a0: Tensor, a1: Tensor, b0: Tensor, b1: Tensor, *bases: Tensor) -> Any:
        joined = torch.cat([a0, a1])
        if in_parts:
            lows = torch.split(low_rank.low_of(x, joined), rank, dim=-1)
            return [
                low_rank.added_low(base, low, b, scale=SCALE, rounds_first=True)
                for base, low, b in zip(bases, lows, (b0, b1), strict=True)
            ]
        lows = torch.split(F.linear(x.float(), joined), rank, dim=-1)
        return [
            Adapter(a_RI=joined, b_OR=b, scale=SCALE, rounds_first=True).added_low(base, low)
            for base, low, b in zip(bases, lows, (b0, b1), strict=True)
        ]

    torch._dynamo.reset()
    return compiled(forward)


def once(function: Callable[..., Any], given: Given) -> list[Tensor]:
    """Go forward and back; give outputs and gradients."""
    leaves = given.leaves()
    outputs = function(*leaves)
    return [*outputs, *torch.autograd.grad(outputs, leaves, given.gradients)]


def errors(given: Given, *, in_parts: bool) -> dict[str, tuple[float, float]]:
    """Give the errors of the products, each of what the way before it gave."""
    x, g, a, b = given.x, given.gradients[0], given.a[0], given.b[0]
    right = (x.double() @ a.double().t()).float()
    low = low_rank.narrowed(x, a) if in_parts else F.linear(x.float(), a)
    if in_parts:
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


def milliseconds(function: Callable[..., Any], given: Given, device: Device) -> float:
    """Time one pass both ways, of some that are asked for at once."""
    device.wait()
    began = time.perf_counter()
    for _ in range(AT_ONCE):
        once(function, given)
    device.wait()
    return (time.perf_counter() - began) / AT_ONCE * 1e3


def kernels_of(function: Callable[..., Any], given: Given) -> str:
    """Give what a device runs in one pass, what takes longest first."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        once(function, given)
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)
    return "\n".join(
        f"  {row.self_device_time_total:9.1f} us {row.count:4} {row.key[:90]}"
        for row in rows[:24]
        if row.self_device_time_total > 0
    )


def compare(arguments: argparse.Namespace, device: Device) -> None:
    """Print errors, times and kernels."""
    for mean in (0.0, 1.0):
        given = Given(arguments, device, mean)
        print(f"errors (mean square, largest), inputs of mean {mean}")
        said = {"fp32": errors(given, in_parts=False)}
        for piece in PIECES:
            low_rank.PIECE = piece
            said[f"pieces of {piece}"] = errors(given, in_parts=True)
        for name, found in said.items():
            cells = (f"{key} {rms:.2e} {most:.2e}" for key, (rms, most) in found.items())
            print(f"  {name:<18}", "; ".join(cells), flush=True)
    given = Given(arguments, device, 0.0)
    arms = {"fp32": arm(given.rank, in_parts=False)}
    for piece in PIECES:
        low_rank.PIECE = piece
        arms[f"pieces of {piece}"] = arm(given.rank, in_parts=True)
        once(arms[f"pieces of {piece}"], given)
    times: dict[str, list[float]] = {name: [] for name in arms}
    once(arms["fp32"], given)
    for _ in range(arguments.rounds):
        for name, function in arms.items():
            times[name].append(milliseconds(function, given, device))
    for name, taken in times.items():
        middle = statistics.median(taken)
        print(f"  {name:<18} {middle:.3f} ms ({min(taken):.3f}..{max(taken):.3f})", flush=True)
    if not device.is_host:
        for name in ("fp32", "pieces of 512"):
            print(name, kernels_of(arms[name], given), sep="\n")


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
