"""Compare the predicted memory of a step with adapters with what steps take on a CUDA device.

Owns the grid and the table: rows of 128 to 8,192 tokens, 1 to 16 of them, three vocabularies, both
forms of the base, inputs of stages on the host, blocks that stay on the device, compiled blocks,
layers of real width. Every case trains in a store in host memory; its second step is measured.
Rows are written as they come, with the peak of each phase of a step beside the predicted one.

    python -m tools.bench.lora_grid --json rows.json
    python -m tools.bench.lora_grid --only compiled --limit-seconds 120 --json compiled.json
    python -m tools.bench.lora_grid --device cpu --model tiny --limit-seconds 20
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tools.bench.lora_grid_steps import Kind, Peaks, Trained
from trainer.ceiling import Ceiling, measure
from trainer.device import Device
from trainer.errors import InputError
from trainer.lora.forecast import Bracket, bracket_of, token_operations
from trainer.lora.model import brought_bytes
from trainer.lora.need import adapter_need
from trainer.lora.pace import Pace, measure_pace
from trainer.lora.residency import MARGIN_BYTES
from trainer.lora.stages import adapted
from trainer.lora.walk import predicted_adapter_phases
from trainer.lora.work import step_work
from trainer.model.adapter_settings import ALL_LINEAR, LoraSettings
from trainer.model.config import ModelConfig
from trainer.model.stages import build_trunk
from trainer.options import EngineOptions
from trainer.sizes import in_bytes
from trainer.vram import StepShape

ROWS = (1, 4, 16)
TOKENS = (128, 512, 2048, 8192)
VOCABULARIES = (8000, 32000, 128256)
CHUNK = 1024
SMALL = ModelConfig(
    vocab_size=8000,
    hidden_size=1024,
    num_layers=4,
    num_heads=16,
    num_kv_heads=4,
    intermediate_size=2816,
    max_position_embeddings=8192,
)
WIDE = replace(
    SMALL,
    vocab_size=VOCABULARIES[-1],
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    intermediate_size=14336,
)
MODELS = {
    "small": SMALL,
    "tiny": replace(
        SMALL, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=128
    ),
}
QV = LoraSettings(rank=16, alpha=32.0, targets=("q_proj", "v_proj"), base_quant="nf4")
PLAIN = replace(QV, base_quant="none")
EVERY = replace(QV, targets=(ALL_LINEAR,))
# Rows and tokens of the cases beside the grid.
FEW = ((1, 128), (4, 512), (16, 512), (1, 8192), (16, 8192))
COMPILED = ((1, 128), (4, 512), (1, 8192), (16, 2048))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step of one model; staying: how many blocks a budget has room for."""

    name: str
    shape: StepShape
    lora: LoraSettings
    staying: float | None = None

    @property
    def kind(self) -> Kind:
        """Give what its engine is made of."""
        return Kind(
            model=self.shape.model,
            options=self.shape.options,
            lora=self.lora,
            budget_bytes=self.budget_bytes,
        )

    @property
    def budget_bytes(self) -> int | None:
        """Give a budget of device memory, by what is predicted."""
        if self.staying is None:
            return None
        need = adapter_need(self.shape, self.lora, 1 << 50)
        one = (need.most_bytes - need.step_bytes) // need.stages
        return need.step_bytes + MARGIN_BYTES + int(self.staying * one)


def cases(model: ModelConfig, dtype: str = "bf16") -> Iterator[Case]:
    """Give the grid, then what changes a base, then layers of real width, then compiled blocks."""
    options = EngineOptions(dtype=dtype, lm_head_chunk_tokens=CHUNK)
    base = StepShape(model=model, options=options, micro_batch_size=4, accumulation=1, seq_len=512)
    for vocabulary in VOCABULARIES:
        worded = replace(base, model=replace(model, vocab_size=vocabulary))
        for tokens in TOKENS:
            for rows in ROWS:
                yield _case(f"{vocabulary:,}", worded, QV, rows, tokens)
    base = replace(base, model=replace(model, vocab_size=VOCABULARIES[1]))
    yield from _others(base)
    wide = replace(base, model=WIDE if model is SMALL else base.model)
    for rows, tokens in ((1, 512), (4, 2048), (1, 8192)):
        yield _case("wide", wide, QV, rows, tokens)
        yield _case("wide, on the host", _on_host(wide), QV, rows, tokens)
    yield from _compiled(replace(base, options=replace(options, compile_blocks=True)))


def _compiled(compiled: StepShape) -> Iterator[Case]:
    """Give compiled blocks, with attention kept and computed again."""
    for rows, tokens in COMPILED:
        yield _case("compiled", compiled, QV, rows, tokens)
    yield _case("compiled, all linear", compiled, EVERY, 4, 512)
    yield _case("compiled, plain base", compiled, PLAIN, 4, 512)
    many = replace(compiled, accumulation=3)
    yield _case("compiled, on the host", _on_host(many), QV, 4, 512)
    yield _case("compiled, attention kept", _keeping(compiled, "attention"), QV, 4, 512)
    waiting = _on_host(_keeping(many, "attention"))
    yield _case("compiled, attention kept, on the host", waiting, QV, 4, 2048)
    wide = replace(waiting, model=WIDE if compiled.model.hidden_size > 64 else compiled.model)
    for rows, tokens in ((4, 2048), (1, 8192), (4, 512)):
        name = "compiled, wide, attention kept, on the host"
        yield _case(name, wide, QV, rows, tokens)
    yield _case("compiled, wide, on the host", _keeping(wide, "recompute"), QV, 4, 2048)


def _others(base: StepShape) -> Iterator[Case]:
    """Give what changes the form of the base, micro-batches and places."""
    for rows, tokens in FEW:
        yield _case("plain base", base, PLAIN, rows, tokens)
    for rows, tokens in FEW:
        yield _case("on the host", _on_host(base), QV, rows, tokens)
    for count in (2, 4, 8):
        many = replace(base, accumulation=count)
        yield _case(f"{count} micro-batches", many, QV, 4, 512)
        yield _case(f"{count} micro-batches, on the host", _on_host(many), QV, 4, 512)
    for staying in (0.5, 2.5, 4.5):
        yield replace(_case(f"{staying} stay", base, QV, 4, 512), staying=staying)
        yield replace(_case(f"{staying} stay, plain", base, PLAIN, 4, 512), staying=staying)
    yield _case("all linear", base, EVERY, 4, 512)
    yield _case("all linear, plain base", base, replace(EVERY, base_quant="none"), 4, 512)
    yield _case("rank 64", base, replace(QV, rank=64), 4, 512)
    lion = replace(base, options=replace(base.options, optimizer="lion"))
    yield _case("lion", lion, QV, 4, 512)
    wide = replace(base, options=replace(base.options, dtype="fp32"))
    yield _case("fp32", wide, QV, 4, 512)
    for lora, name in ((QV, "kept"), (PLAIN, "kept, plain base")):
        yield _case(name, _keeping(base, "keep"), lora, 4, 512)
    yield _case(
        "2 micro-batches, kept", _keeping(replace(base, accumulation=2), "keep"), QV, 4, 512
    )
    tied = replace(base, model=replace(base.model, tied_embeddings=True))
    yield _case("tied", tied, QV, 4, 512)


def _case(name: str, base: StepShape, lora: LoraSettings, rows: int, tokens: int) -> Case:
    shape = replace(base, micro_batch_size=rows, seq_len=tokens)
    return Case(name=f"{name} {rows} x {tokens}", shape=shape, lora=lora)


def _on_host(base: StepShape) -> StepShape:
    return replace(base, options=replace(base.options, activation_placement="host"))


def _keeping(base: StepShape, activations: str) -> StepShape:
    return replace(base, options=replace(base.options, activations=activations))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A case, what was predicted, phase by phase, and what it took."""

    name: str
    predicted: int
    phases: dict[str, int]
    peaks: Peaks
    foretold_to_stay: int
    seconds: float
    tokens: int
    bracket: Bracket | None = None

    @property
    def ratio(self) -> float | None:
        """Give predicted over measured: below 1 is a prediction that was too low."""
        return self.predicted / self.peaks.total if self.peaks.total else None

    @property
    def line(self) -> str:
        """Give a line of the table."""
        ratio = "" if self.ratio is None else f"{self.ratio:.4f}"
        phases = self.peaks.phases
        beside = ", ".join(
            f"{_short(name)} {self.phases[name] - held:+,}"
            for name, held in phases.items()
            if name in self.phases
        )
        return (
            f"{self.name:<34} {in_bytes(self.predicted):>11} {in_bytes(self.peaks.total):>11}"
            f" {ratio:>7} {self.predicted - self.peaks.total:>13,} bytes"
            f" {_fullest(self.phases)}/{_fullest(phases)} [{beside}] {self.seconds:.1f} s"
            f"{self.speed}"
        )

    @property
    def speed(self) -> str:
        """Give the rate of the step beside the one that is foretold."""
        if self.bracket is None or not self.peaks.seconds:
            return ""
        rate = self.tokens / self.peaks.seconds
        return f" {rate:,.0f} tokens/s in {self.bracket.least:,.0f} to {self.bracket.most:,.0f}"


def _short(phase: str) -> str:
    return phase.replace("forward", "f").replace("backward", "b")


def _fullest(phases: dict[str, int]) -> str:
    return max(phases, key=lambda phase: phases[phase]) if phases else "-"


class Rates:
    """What the machine does at most, measured once for each kind of steps."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._ceilings: dict[torch.dtype, Ceiling] = {}
        self._paces: dict[Kind, Pace] = {}

    def bracket(self, case: Case) -> Bracket:
        """Foretell the rate of a case."""
        shape, dtype = case.shape, case.shape.options.torch_dtype
        if dtype not in self._ceilings:
            self._ceilings[dtype] = measure(dtype, self._device)
        kind = replace(case.kind, model=SMALL, budget_bytes=None)
        if kind not in self._paces:
            self._paces[kind] = measure_pace(shape, case.lora, self._device)
        tokens = shape.micro_batch_size * shape.accumulation * shape.seq_len
        each = token_operations(shape.model, case.lora, shape.seq_len, shape.options.activations)
        blocks = [adapted(each, case.lora) for each in build_trunk(shape.model)]
        base = sum(brought_bytes(block, dtype) for block in blocks if block.is_block)
        return bracket_of(
            tokens,
            each * tokens,
            2 * base,
            step_work(shape, case.lora, is_host=self._device.is_host),
            self._ceilings[dtype],
            self._paces[kind],
            is_host=self._device.is_host,
            is_compiled=shape.options.compile_blocks,
        )


def measured(case: Case, trained: Trained | None, *, is_host: bool, rates: Rates | None) -> Row:
    """Measure a case."""
    began = time.monotonic()
    if is_host:
        phases, foretold, size = predicted_adapter_phases(case.shape, case.lora, is_host=True), 0, 0
    else:
        need = adapter_need(case.shape, case.lora, case.budget_bytes)
        phases, foretold = need.phases, need.kept
        size = 0 if not foretold else _block_bytes(case)
    peaks = Peaks() if trained is None else trained.peaks(case.kind, case.shape)
    return Row(
        name=case.name,
        predicted=max(phases.values()) + foretold * size,
        phases=phases,
        peaks=peaks,
        foretold_to_stay=foretold,
        seconds=time.monotonic() - began,
        tokens=case.shape.micro_batch_size * case.shape.accumulation * case.shape.seq_len,
        bracket=None if rates is None else rates.bracket(case),
    )


def _block_bytes(case: Case) -> int:
    need = adapter_need(case.shape, case.lora, 1 << 50)
    return (need.most_bytes - need.step_bytes) // need.stages


def arguments_of(words: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--predict-only", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", choices=sorted(MODELS), default="small")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--leave-out", default="no such case", help="none with this in their name")
    parser.add_argument("--speed", action="store_true", help="foretell tokens/s as well")
    parser.add_argument("--limit-seconds", type=float, default=110)
    parser.add_argument("--json", type=Path, help="file for the rows")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Print the table and one line that sums it up; 1 where a prediction was too low."""
    given = arguments_of(words)
    try:
        device = None if given.predict_only else Device.from_name(given.device)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    trained = None if device is None else Trained(device)
    rates = Rates(device) if given.speed and device is not None else None
    began, rows, left = time.monotonic(), list[Row](), 0
    for case in cases(MODELS[given.model], given.dtype):
        if given.only not in case.name or given.leave_out in case.name:
            continue
        if time.monotonic() - began > given.limit_seconds:
            left += 1
            continue
        is_host = device is not None and device.is_host
        rows.append(measured(case, trained, is_host=is_host, rates=rates))
        print(rows[-1].line, flush=True)
        if given.json:
            given.json.write_text(json.dumps([_row(row) for row in rows], indent=1))
    return _sum_up(rows, left, time.monotonic() - began)


def _row(row: Row) -> dict[str, Any]:
    return asdict(row) | {"ratio": row.ratio}


def _sum_up(rows: Sequence[Row], left: int, seconds: float) -> int:
    ratios = [row.ratio for row in rows if row.ratio is not None]
    if ratios:
        under, over = sum(r < 1 for r in ratios), sum(r > 1.01 for r in ratios)
        print(
            f"lora_grid: {len(ratios)} cases, {under} under, {over} more than 1 % over;"
            f" predicted/measured from {min(ratios):.4f} to {max(ratios):.4f}; {left} left out,"
            f" {seconds:.0f} s"
        )
    return int(any(ratio < 1 for ratio in ratios))


if __name__ == "__main__":
    sys.exit(main())
