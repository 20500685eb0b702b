"""Training on a GPU through the whole product against resident training of the same blocks.

Arms, interleaved in one process: `train` as a run makes its steps (data loader, active store on a
RAM disk, one commit a step), once for each memory setting; resident training with every block
checkpointed; the same without the cost of asking for single kernels (`recorded`); and without
checkpoints. Ratios are taken within a round. Memory is what an arm held at most in its first steps,
above what was held before it was made, what its recordings use inside included. With --check, the
run's weights are compared with the resident ones, bit for bit, after the same steps. With --also
the same run goes on with other settings, timed in turn with the same resident arms, or with new
ones where a step has other tokens.
`tools.bench.gpu_campaign` makes every published row.

    python -m tools.bench.gpu_throughput --data rows/ --model A --vram-budget off,2GiB --json a.json
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from tools.bench.gpu_arms import Recorded, Resident
from tools.bench.gpu_product import MODELS, Product, differences, given_of, rows_of, trace
from trainer.budget import step_shape
from trainer.ceiling import step_flops
from trainer.device import Device
from trainer.errors import InputError
from trainer.plan import Plan
from trainer.sizes import in_bytes, size_of
from trainer.step_memory import DeviceNeed, device_need

WARM_STEPS = 7


def held_bytes(device: Device) -> int:
    """Give what tensors hold now."""
    device.wait()
    device.forget_peak()
    return device.peak_bytes()


def timed(device: Device, step: Callable[[], object], count: int) -> list[float]:
    """Give the seconds of each of `count` steps, the device idle at both ends of all."""
    device.wait()
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    device.wait()
    return seconds


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What makes one of its steps, and the device that knows what its recordings use inside."""

    step: Callable[[], object]
    device: Device


def resident_arm(name: str, plan: Plan) -> Arm:
    """Make a resident arm, on a few steps' rows in turn."""
    recorded = Recorded(plan) if name == "recorded" else None
    trainer = recorded or Resident(plan, checkpointed=name == "checkpointed")
    rows = cycle([rows_of(plan, step) for step in range(1, 5)])
    return Arm(
        step=lambda: trainer.step(next(rows), plan.recipe.learning_rate),
        device=recorded.place if recorded else Device.from_name(plan.recipe.device),
    )


class Comparison:
    """The arms of one call, made one after the other, then timed in turn.

    stack: of what ends with the call; a run that goes on with other settings ends before.
    """

    def __init__(self, arguments: argparse.Namespace, stack: ExitStack) -> None:
        self._arguments = arguments
        # What is entered last ends first: runs before the folders that they are in.
        self._places = stack.enter_context(ExitStack())
        self._runs = stack.enter_context(ExitStack())
        self._folders: list[Path] = []
        self._arms: dict[str, Arm] = {}
        self._memory: dict[str, int] = {}
        self._products: dict[str, Product] = {}
        self._differences: list[str] = []

    def measure(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Make every arm, measure its memory, then time all of them in turn.

        Each time it gives what was measured last, and with it all that was measured so far, before
        a run goes on with other settings.
        """
        for budget in self._arguments.vram_budget.split(","):
            name = "train" if budget == "off" else f"train {budget}"
            self._add(name, partial(self._product, name, budget))
        first = next(iter(self._products.values()))
        if self._arguments.trace:
            trace(first, self._arguments.trace)
        if self._arguments.check:
            self._differences = differences(first, len(first.lines))
            print("differences:", self._differences[:8], len(self._differences), flush=True)
        for name in ("recorded", "checkpointed", "resident"):
            if name in self._arguments.arms.split(","):
                self._add(name, partial(resident_arm, name, first.plan))
        result = self._result(first, self._timed())
        yield result, result
        for words in self._arguments.also:
            del first
            first = self._go_on(words)
            more = self._result(first, self._timed())
            if more["tokens_per_step"] != result["tokens_per_step"]:
                result.setdefault("others", {})[words] = more
            else:
                for key in ("rows", "captured_bytes", "predicted_bytes", "lines"):
                    result[key] = more[key] | result[key]
            yield more, result

    def _go_on(self, words: str) -> Product:
        """End the run and let it go on with other settings."""
        before = next(iter(self._products.values())).plan.recipe
        self._runs.close()
        for name in self._products:
            del self._arms[name]
        self._products.clear()
        gc.collect()
        self._arguments = arguments = self._arguments.anew(words)
        name = f"train {words}"
        self._add(name, partial(self._product, name, arguments.vram_budget))
        plan = self._products[name].plan
        if plan.recipe.rows_per_step != before.rows_per_step:
            for resident in [each for each in self._arms if each != name]:
                del self._arms[resident]
                gc.collect()
                self._add(resident, partial(resident_arm, resident, plan))
        if arguments.trace:
            path = arguments.trace
            trace(
                self._products[name],
                path.with_stem(f"{path.stem}-{arguments.activation_placement}"),
            )
        return self._products[name]

    def _product(self, name: str, budget: str) -> Arm:
        arguments = self._arguments
        if not self._folders or self._products:
            places = [
                tempfile.TemporaryDirectory(dir=p) for p in (arguments.store, arguments.active)
            ]
            self._folders = [Path(self._places.enter_context(place)) for place in places]
        # A budget counts all that the process holds: the arms that are there already, too.
        held = held_bytes(Device.from_name(arguments.device))
        if budget != "off" and held:
            budget = str(held + size_of(budget, "--vram-budget"))
        store, active = self._folders
        made = Product(self._runs, given_of(arguments, store, active, budget))
        self._products[name] = made
        return Arm(step=made.step, device=made.run.engine.device)

    def _add(self, name: str, make: Callable[[], Arm]) -> None:
        before = held_bytes(Device.from_name(self._arguments.device))
        began = time.perf_counter()
        arm = self._arms[name] = make()
        timed(arm.device, arm.step, WARM_STEPS)
        arm.device.forget_peak()
        timed(arm.device, arm.step, 2)
        self._memory[name] = arm.device.peak_bytes() - before
        seconds = time.perf_counter() - began
        inside = in_bytes(arm.device.captured_bytes)
        print(
            f"{name}: made in {seconds:.1f} s, {in_bytes(self._memory[name])}, of it {inside}"
            " inside recordings",
            flush=True,
        )

    def _timed(self) -> dict[str, list[list[float]]]:
        seconds: dict[str, list[list[float]]] = {name: [] for name in self._arms}
        for _ in range(self._arguments.rounds):
            for name, arm in self._arms.items():
                seconds[name].append(timed(arm.device, arm.step, self._arguments.steps))
        return seconds

    def _result(self, first: Product, seconds: dict[str, list[list[float]]]) -> dict[str, Any]:
        recipe = first.plan.recipe
        tokens = recipe.rows_per_step * recipe.seq_len
        ceiling = first.run.ceiling.matmul_flops_per_second
        return {
            "model": self._arguments.model,
            "differences": self._differences,
            "arguments": {k: v for k, v in vars(self._arguments).items() if k != "anew"},
            "tokens_per_step": tokens,
            "device": recipe.device,
            "torch": torch.__version__,
            "rows": rows_summary(seconds, self._memory, tokens, step_flops(recipe) / ceiling),
            "captured_bytes": {name: arm.device.captured_bytes for name, arm in self._arms.items()},
            "predicted_bytes": {
                name: need_of_plan(each.plan).most_bytes for name, each in self._products.items()
            },
            "lines": {
                name: [_short(line) for line in each.lines[-self._arguments.steps :]]
                for name, each in self._products.items()
            },
        }


def need_of_plan(plan: Plan) -> DeviceNeed:
    """Give what the pre-flight predicts for a plan."""
    budget = plan.budget
    shape = step_shape(plan.recipe, plan.settings, budget.activations, budget.placement)
    return device_need(shape, plan.settings)


def rows_summary(
    seconds: dict[str, list[list[float]]], memory: dict[str, int], tokens: int, least: float
) -> dict[str, dict[str, float]]:
    """Give an arm's median, its ratios to the resident arms by round, and its memory."""
    medians = {name: [statistics.median(r) for r in rounds] for name, rounds in seconds.items()}
    found: dict[str, dict[str, float]] = {}
    for name, mine in medians.items():
        middle = statistics.median(mine)
        row: dict[str, float] = {
            "step_ms": 1e3 * middle,
            "tokens_per_second": tokens / middle,
            "ceiling_percent": 100 * least / middle,
            "peak_bytes": memory[name],
        }
        for base in ("recorded", "checkpointed", "resident"):
            if base in medians:
                ratios = [b / m for b, m in zip(medians[base], mine, strict=True)]
                row[f"of_{base}"] = statistics.median(ratios)
                row[f"of_{base}_low"], row[f"of_{base}_high"] = min(ratios), max(ratios)
        found[name] = row
    return found


def _short(line: dict[str, Any]) -> dict[str, Any]:
    wanted = (
        *("step", "seconds", "commit_seconds", "publish_seconds", "clip_scale", "grad_norm"),
        *("loss", "timings", "bytes_read", "bytes_written", "device_peak_bytes"),
    )
    return {key: line[key] for key in wanted if key in line}


def print_table(result: dict[str, Any]) -> None:
    """Print a line an arm."""
    print(f"{result['model']}, {result['tokens_per_step']:,} tokens a step")
    for name, row in result["rows"].items():
        ratios = " ".join(
            f"{row[key]:.3f} ({row[f'{key}_low']:.3f}-{row[f'{key}_high']:.3f}) {key}"
            for key in ("of_recorded", "of_checkpointed", "of_resident")
            if key in row
        )
        print(
            f"  {name:16} {row['step_ms']:8.1f} ms {row['tokens_per_second']:9,.0f} tokens/s"
            f" {row['ceiling_percent']:5.1f} % {row['peak_bytes'] / 2**30:6.2f} GiB  {ratios}",
            flush=True,
        )


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; `anew` reads it with more words behind."""
    first = sys.argv[1:] if words is None else [*words]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", required=True, help="folder of prepared rows, or of .bin files")
    parser.add_argument("--seq-len", type=int, default=0, help="of uint16 .bin files")
    parser.add_argument("--model", choices=MODELS, default="A")
    parser.add_argument("--micro-batch-size", type=int, default=64)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--learning-rate", type=float, default=6e-4)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--vram-budget", default="off", help="one or more, with commas")
    parser.add_argument("--activation-placement", default="vram")
    parser.add_argument("--gradient-placement", default="vram")
    parser.add_argument("--pipeline", default="auto")
    parser.add_argument("--durable-every", type=int, default=0)
    parser.add_argument("--arms", default="recorded,checkpointed,resident")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--store", default="/tmp")
    parser.add_argument("--active", default="/dev/shm")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        help="flags of the same run when it goes on, such as '--micro-batch-size 4'",
    )
    found = parser.parse_args(first)
    found.anew = lambda more: arguments_of([*first, *shlex.split(more)])
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; 1 when --check found a difference."""
    arguments = arguments_of(words)
    try:
        with ExitStack() as stack:
            for shown, result in Comparison(arguments, stack).measure():
                print_table(shown)
                if arguments.json:
                    arguments.json.write_text(json.dumps(result, default=str))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if result["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
