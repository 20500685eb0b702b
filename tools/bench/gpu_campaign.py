"""Everything that is measured on a GPU, in three calls of less than ten minutes each.

Owns which commands a call runs, in which order, and the time each of them gets. What was measured
before a command is stopped is kept: each writes its rows as it goes, into the folder of --out. A
command that fails does not stop the ones behind it; the call's exit code says that one did.

    python -m tools.bench.gpu_campaign --part 1 --out out/      parity on the device, exactness
    python -m tools.bench.gpu_campaign --part 2 --out out/      memory both ways, A, accumulation
    python -m tools.bench.gpu_campaign --part 3 --out out/      B, 16,384 and 65,536 tokens a step
    python -m tools.bench.gpu_campaign --part 2 --out out/ --list

A needs a folder of prepared rows of 513 ids (--data-a), B one of uint16 .bin files (--data-b);
where none is given, one of random ids is made, which is as fast and as large.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.bench.gpu_product import MODELS

# A stop by the limit is a result as long as something was written.
STOPPED = 124
# Parts have to end before a call of ten minutes does.
PART_SECONDS = 560
PARITY = (
    "tests/parity/test_pipeline_equals_resident.py",
    "tests/parity/test_pipeline_encoded_state.py",
    "tests/parity/test_compiled_equals_resident_cuda.py",
    "tests/parity/test_streamed_equals_resident_cuda.py",
    "tests/parity/test_real_layer_sizes_cuda.py",
)
UNCLIPPED = ("--max-grad-norm", "1000")
LEAN = ("--activation-placement", "host", "--gradient-placement", "recompute")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One measurement: what is run after `python -m`, and for how long at most."""

    name: str
    words: tuple[str, ...]
    limit_seconds: int


def commands(part: int, out: Path, data_a: Path, data_b: Path) -> list[Command]:
    """Give a part's commands."""
    return list((_exactness, _memory_and_a, _large)[part - 1](out, data_a, data_b))


def _exactness(_out: Path, _a: Path, _b: Path) -> Iterator[Command]:
    yield Command(
        name="parity", words=("pytest", "-q", "-m", "gpu", "-rs", *PARITY), limit_seconds=150
    )
    matrix = ("tools.exactness", "--device", "cuda", "--jobs", "15", "--limit-seconds", "380")
    yield Command(name="exactness", words=matrix, limit_seconds=400)


def _memory_and_a(out: Path, data_a: Path, _b: Path) -> Iterator[Command]:
    grid = ("tools.bench.vram_grid", "--limit-seconds")
    yield Command(
        name="vram-plain", words=(*grid, "50", "--json", str(out / "plain.json")), limit_seconds=75
    )
    yield Command(
        name="vram-pipeline",
        words=(*grid, "100", "--pipeline", "--json", str(out / "pipeline.json")),
        limit_seconds=130,
    )
    rows = ("--data", str(data_a), "--model", "A")
    base = (*rows, *UNCLIPPED, "--check", "--vram-budget", "off,6GiB")
    yield _throughput("a", base, out, 90)
    few = (*rows, "--arms", "recorded", "--rounds", "3")
    yield _throughput("a-clipped", (*few, "--max-grad-norm", "0.01"), out, 50)
    lean = (*few, *UNCLIPPED, "--micro-batch-size", "16", "--accumulation", "4", *LEAN)
    yield _throughput("a-lean", (*lean, "--chunk", "2048"), out, 50)
    for count in (1, 4, 16):
        same = ("--micro-batch-size", "32", "--accumulation", str(count), "--steps", "4")
        yield _throughput(f"accumulation-{count}", (*few, *UNCLIPPED, *same), out, 45)


def _large(out: Path, _a: Path, data_b: Path) -> Iterator[Command]:
    rows = ("--data", str(data_b), "--model", "B", "--seq-len", "1024", *UNCLIPPED)
    few = ("--rounds", "3", "--steps", "4")
    recompute = ("--gradient-placement", "recompute", "--vram-budget", "10GiB", "--chunk", "1024")
    lean = "--micro-batch-size 4 --accumulation 4 --activation-placement host --vram-budget 3.3GiB"
    fast = (*rows, *few, "--micro-batch-size", "16", *recompute, "--also", lean)
    yield _throughput("b16", (*fast, "--arms", "recorded"), out, 230)
    many = (*rows, *few, "--micro-batch-size", "8", "--accumulation", "8", *LEAN)
    large = ("--chunk", "2048", "--arms", "recorded", "--also", "--vram-budget 4GiB")
    yield _throughput("b64", (*many, "--vram-budget", "8GiB", *large), out, 300)


def _throughput(name: str, words: Sequence[str], out: Path, limit_seconds: int) -> Command:
    return Command(
        name=name,
        words=("tools.bench.gpu_throughput", *words, "--json", str(out / f"{name}.json")),
        limit_seconds=limit_seconds,
    )


def run(command: Command, out: Path, seconds: float) -> int:
    """Run a command within so many seconds; its output goes to a file of its own."""
    limit = min(float(command.limit_seconds), seconds)
    with open(out / f"{command.name}.txt", "w", encoding="utf-8") as file:
        try:
            done = subprocess.run(
                [sys.executable, "-m", *command.words],
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return STOPPED
    return done.returncode


def write_rows(out: Path) -> tuple[Path, Path]:
    """Make rows of random ids for both models; give their folders."""
    random = np.random.default_rng(0)
    a, b = out / "rows-a", out / "rows-b"
    for folder in (a, b):
        folder.mkdir(parents=True, exist_ok=True)
    vocabulary = 8000
    np.save(a / "rows.npy", random.integers(0, vocabulary, (4096, 513), dtype=np.int32))
    ids = random.integers(0, MODELS["B"]["vocab_size"], 8 << 20, dtype=np.uint16)
    (b / "rows.bin").write_bytes(ids.tobytes())
    return a, b


def main(words: Sequence[str] | None = None) -> int:
    """Run a part; 1 where a command failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", type=int, choices=(1, 2, 3), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for what is written")
    parser.add_argument("--data-a", type=Path)
    parser.add_argument("--data-b", type=Path)
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    given = parser.parse_args(words)
    made = given.out / "rows-a", given.out / "rows-b"
    if not given.list:
        given.out.mkdir(parents=True, exist_ok=True)
        if given.data_a is None or given.data_b is None:
            write_rows(given.out)
    wanted = commands(given.part, given.out, given.data_a or made[0], given.data_b or made[1])
    if given.list:
        for each in wanted:
            print(f"{each.name} ({each.limit_seconds} s): python -m {shlex.join(each.words)}")
        return 0
    started, failed = time.monotonic(), 0
    for each in wanted:
        left = PART_SECONDS - (time.monotonic() - started)
        if left < 10:
            print(f"{each.name}: left out, {PART_SECONDS} s are over", flush=True)
            continue
        began = time.monotonic()
        code = run(each, given.out, left)
        failed += code not in (0, STOPPED)
        print(f"{each.name}: exit {code} after {time.monotonic() - began:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
