"""Adapters beside a streamed base: one step here and in `soup-cli`, interleaved.

    python -m tools.bench.lora_soup (--package DIR | --geometry H,L,F,V) [--rows DIR]
           [--device cpu|cuda] [--dtype fp32|bf16] [--quant none|nf4] [--seq-len 256,…]
           [--micro-batch 1] [--accumulation 1,4] [--rank 8] [--targets q_proj,v_proj]
           [--rounds 3] [--threads 1] [--compile] [--activations keep|attention|recompute]
           [--placement vram|host] [--chunk 4096] [--work DIR] [--markdown FILE]

Owns the protocol: the same package, rows, first adapters, AdamW and number of threads on both
sides, each in a process of its own that waits while the other steps; within a round each side makes
one step of each length of rows and number of micro-batches, the order turned about each time, and
ratios are taken within a round. One round before these is dropped, and in one behind them the most
that a device held is taken step by step. Both sides are made ready at the same time. Processor
seconds are those of a side's own process, all threads together: on a machine that others use too
they say more than the clock. Needs `soup-cli` (0.77) and `peft` beside this project. DIR of --rows
holds `.npy` files of token rows; without it rows are random ids.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from trainer.device import Device

SEED = 7
# Losses of two programs that sum in another order differ by their rounding.
LOSS_GAP_MAX = {"fp32": 2e-5, "bf16": 2e-2}
ARMS = ("ours", "soup")
# Tokens of a row, micro-batches of a step.
Case = tuple[int, int]


@dataclass(kw_only=True)
class Arm:
    """One side: its process, what it answered to its first line, and its steps by case."""

    process: subprocess.Popen[str]
    ready_seconds: float = 0.0
    steps: dict[Case, list[dict[str, Any]]] = field(default_factory=dict)

    def answer(self) -> dict[str, Any]:
        """Give the next answer; what else a library prints is passed over."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("=>"):
                found: dict[str, Any] = json.loads(line[2:])
                return found
        raise SystemExit(f"error: a side ended with {self.process.wait()}: see its messages above")

    def step(self, rows: Sequence[np.ndarray], *, anew: bool) -> dict[str, Any]:
        """Have a step made; with `anew` a device's peak is that of this step alone."""
        assert self.process.stdin is not None
        line = json.dumps({"rows": [each.tolist() for each in rows], "anew": anew})
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()


def main() -> int:
    """Measure and print; exit code 1 when the losses are not the same."""
    asked = parsed()
    with tempfile.TemporaryDirectory(prefix="lora-soup-", dir=asked.work) as folder:
        work = Path(folder)
        package = asked.package or random_package(work / "package", asked.geometry, asked.dtype)
        arms = measured(asked, package, work)
    table, same = markdown(asked, arms)
    print(table)
    if asked.markdown is not None:
        with asked.markdown.open("a") as file:
            file.write(table)
    return 0 if same else 1


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--package", type=Path)
    parser.add_argument("--geometry", type=_numbers, help="hidden,layers,intermediate,vocabulary")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--quant", choices=("none", "nf4"), default="none")
    parser.add_argument("--seq-len", type=_numbers, default=[256])
    parser.add_argument("--accumulation", type=_numbers, default=[1, 4])
    parser.add_argument(
        "--targets", type=lambda text: text.split(","), default=["q_proj", "v_proj"]
    )
    for name, value in (("micro-batch", 1), ("rank", 8), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="our blocks compiled")
    ways = ("keep", "attention", "recompute")
    parser.add_argument("--activations", choices=ways, help="ours; keep on a cpu")
    parser.add_argument("--placement", choices=("vram", "host"), default="vram")
    parser.add_argument("--chunk", type=int, default=4096, help="tokens whose logits we have")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    if (asked.package is None) == (asked.geometry is None):
        parser.error("give --package or --geometry, one of them")
    asked.activations = asked.activations or ("keep" if asked.device == "cpu" else "recompute")
    return asked


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def random_package(out: Path, geometry: Sequence[int], dtype: str) -> Path:
    """Write a Llama of this geometry with random weights; heads are 128 wide, four a key head."""
    transformers = __import__("transformers")
    hidden, layers, inner, vocabulary = geometry
    heads = max(4, hidden // 128)
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=inner,
        vocab_size=vocabulary,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        dtype={"fp32": "float32", "bf16": "bfloat16"}[dtype],
        architectures=["LlamaForCausalLM"],
    )
    out.mkdir(parents=True)
    config.save_pretrained(out)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    place = Device.from_name("auto").torch_device
    torch.manual_seed(SEED)
    form = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    tensors = {
        name: torch.ones(tensor.shape, dtype=form)
        if "norm" in name
        else (torch.randn(tensor.shape, device=place) * 0.02).to(form).cpu()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def measured(asked: argparse.Namespace, package: Path, work: Path) -> dict[str, Arm]:
    """Start both sides and have them step in turns."""
    names = (
        *("device", "dtype", "quant", "rank", "targets", "threads"),
        *("compile", "activations", "placement", "chunk"),
    )
    plan = {name: getattr(asked, name) for name in names}
    plan |= {"package": str(package), "work": str(work)}
    arms = {}
    rows = _rows(asked, package)
    try:
        for name in ARMS:  # ours first: it writes the first adapters of both
            call = [sys.executable, "-m", "tools.bench.lora_soup_arms", name, json.dumps(plan)]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            # The peer writes its shards below the folder of temporary files and nowhere else.
            pipes["env"] = {**os.environ, "TMPDIR": str(work)}
            arms[name] = Arm(process=subprocess.Popen(call, text=True, **pipes))
        for name, arm in arms.items():
            arm.ready_seconds = arm.answer()["ready_seconds"]
            _say(f"{name}: ready in {arm.ready_seconds:.1f} s")
        last = asked.rounds + 1
        for index in range(last + 1):
            for case in _cases(asked):
                batches = [next(rows)[:, : case[0] + 1] for _ in range(case[1])]
                for name in ARMS if index % 2 else reversed(ARMS):
                    found = arms[name].step(batches, anew=index == last)
                    arms[name].steps.setdefault(case, []).append(found)
                    _say(f"{name} {case[0]} x {case[1]}: {found['seconds']:.3g} s")
    finally:
        for arm in arms.values():
            arm.process.kill()
            arm.process.wait()
    return arms


def _cases(asked: argparse.Namespace) -> list[Case]:
    return [(length, count) for length in asked.seq_len for count in asked.accumulation]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _rows(asked: argparse.Namespace, package: Path) -> Any:
    """Yield micro-batches [B, T + 1], the same ones for the same arguments."""
    width = max(asked.seq_len) + 1
    if asked.rows is None:
        random = np.random.default_rng(SEED)
        vocabulary = json.loads((package / "config.json").read_text())["vocab_size"]
        while True:
            yield random.integers(3, vocabulary, (asked.micro_batch, width))
    files = sorted(asked.rows.glob("*.npy"))
    ids = np.concatenate([np.load(file)[:, :-1].reshape(-1) for file in files]).astype(np.int64)
    ids = ids[: len(ids) // width * width].reshape(-1, width)
    for start in range(0, len(ids) - asked.micro_batch, asked.micro_batch):
        yield ids[start : start + asked.micro_batch]


def markdown(asked: argparse.Namespace, arms: dict[str, Arm]) -> tuple[str, bool]:
    """Give the table, and whether the losses are the same throughout."""
    head = (
        "tokens x micro-batches", "largest gap of losses", "ours, tokens/s", "soup, tokens/s",
        "ours / soup", "the same by processor seconds",
        "peak memory, ours / soup", "device memory, ours / soup",
    )  # fmt: skip
    title = (
        f"{asked.device}, {asked.dtype}, base {asked.quant}, rank {asked.rank} on"
        f" {','.join(asked.targets)}, {asked.micro_batch} rows a micro-batch,"
        f" {asked.rounds} rounds{_ways(asked)}; made ready in"
        f" {arms['ours'].ready_seconds:.1f} /"
        f" {arms['soup'].ready_seconds:.1f} s"
    )
    lines = [
        title,
        "",
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
    ]
    worst = 0.0
    for case in _cases(asked):
        ours, soup = (arms[name].steps[case] for name in ARMS)
        gaps = [abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(ours, soup, strict=True)]
        worst = max(worst, *gaps)
        tokens = case[0] * case[1] * asked.micro_batch
        rates = [[tokens / each["seconds"] for each in side[1:-1]] for side in (ours, soup)]
        ratios = [a / b for a, b in zip(*rates, strict=True)]
        spent = [[each["cpu_seconds"] for each in side[1:-1]] for side in (ours, soup)]
        by_processor = [theirs / own for own, theirs in zip(*spent, strict=True)]
        cells = [
            f"{case[0]} x {case[1]}",
            f"{max(gaps):.1e}",
            *(_spread(each, 4) for each in rates),
            _spread(ratios, 3),
            _spread(by_processor, 3),
            _sizes(ours, soup, "peak_bytes"),
            _sizes(ours, soup, "device_bytes"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", ""]), worst <= LOSS_GAP_MAX[asked.dtype]


def _ways(asked: argparse.Namespace) -> str:
    """Say what is ours alone."""
    found = f", ours with {asked.chunk} logits at once, stages' inputs in {asked.placement},"
    found += f" activations {asked.activations}"
    return found + (", blocks compiled" if asked.compile else "")


def _spread(values: Sequence[float], digits: int) -> str:
    middle = statistics.median(values)
    return f"{middle:.{digits}g} ({min(values):.{digits}g} to {max(values):.{digits}g})"


def _sizes(ours: list[dict[str, Any]], soup: list[dict[str, Any]], name: str) -> str:
    if name not in ours[-1]:
        return "none"
    return " / ".join(f"{side[-1][name] / 2**30:.2f} GiB" for side in (ours, soup))


if __name__ == "__main__":
    sys.exit(main())
