"""What `--fit` chooses: how a step's rows are cut, and what is kept, for a budget of device memory.

Owns the order of preference. The predictor decides what fits.
Knows nothing of devices. Invariants: rows a step, and so the batch that a step learns from, stay
what they were; nothing is chosen that the predictor puts above the budget.

Preferred, in this order: activations kept with the largest micro-batch that fits, as long as a
micro-batch holds enough tokens to fill a device; then computed again, likewise, from inputs that
wait on the device, then from such that wait in host memory; then with fewer tokens a chunk of
logits; at last with any micro-batch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isqrt

from trainer.errors import InputError
from trainer.sizes import in_bytes
from trainer.vram import StepShape, predicted_bytes

FULL_TOKENS = 4096
# Ways of cutting a step's rows that are all tried; of more, a few are.
TRIED_ONE_BY_ONE = 8
CHUNKS = (4096, 2048, 1024, 512, 256)
# What may be kept of the passes, and where, the fastest first.
WAYS = (("keep", "vram"), ("recompute", "vram"), ("recompute", "host"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """The step that was chosen, and what it is predicted to take."""

    shape: StepShape
    bytes: int

    @property
    def text(self) -> str:
        """Say what was chosen, by the flags that would choose the same."""
        return (
            f"--fit chose --micro-batch-size {self.shape.micro_batch_size}"
            f" --gradient-accumulation-steps {self.shape.accumulation}"
            f" --lm-head-chunk-tokens {self.shape.options.lm_head_chunk_tokens}"
            f" --activations {self.shape.options.activations} --activation-placement"
            f" {self.shape.options.activation_placement}"
        )


def fit(
    shape: StepShape,
    budget_bytes: int,
    placement: str = "auto",
    *,
    predict: Callable[[StepShape], int] = predicted_bytes,
    ways: Sequence[tuple[str, str]] | None = None,
) -> Fitted:
    """Give the first choice that fits; InputError with the least that is needed if none does.

    placement: where boundary activations have to wait, or `auto`; predict: gives what a step takes;
    ways: what is kept of the passes, and where, the preferred first; None: all that there are.
    """
    tried: dict[StepShape, Fitted] = {}

    def fits(candidate: StepShape) -> bool:
        if candidate not in tried:
            tried[candidate] = Fitted(shape=candidate, bytes=predict(candidate))
        return tried[candidate].bytes <= budget_bytes

    ways = ways or _ways(placement)
    groups = [*_groups(shape, ways)]
    is_long = max(map(len, groups)) > TRIED_ONE_BY_ONE
    # Of a long list nothing fits where the smallest micro-batches with the fewest tokens a chunk do
    # not, which are last: then no more is tried.
    if not is_long or any(fits(group[-1]) for group in groups[-len(ways) :]):
        for group in groups:
            found = _first_that_fits(group, fits)
            if found is not None:
                return tried[found]
    least = min(tried.values(), key=lambda each: each.bytes)
    raise InputError(
        f"--fit: no step of {shape.micro_batch_size * shape.accumulation} rows fits into"
        f" {in_bytes(budget_bytes)}; the least is {in_bytes(least.bytes)}: raise --vram-budget, or"
        " take shorter rows, a smaller model or --grad-clip-mode shard"
    )


def _first_that_fits(
    group: Sequence[StepShape], fits: Callable[[StepShape], bool]
) -> StepShape | None:
    """Give the largest micro-batch of a group that fits; a long group is halved again and again.

    With smaller micro-batches a step of the same rows takes less, so the first that fits lies
    behind all that do not.
    """
    if len(group) <= TRIED_ONE_BY_ONE:
        return next(filter(fits, group), None)
    if not fits(group[-1]):
        return None
    return group[bisect_left(group, True, key=fits)]


def _groups(shape: StepShape, ways: Sequence[tuple[str, str]]) -> Iterator[list[StepShape]]:
    """Yield the candidates in order of preference, those that differ in micro-batches together."""
    rows = shape.micro_batch_size * shape.accumulation
    lower = [size for size in range(1, isqrt(rows) + 1) if rows % size == 0]
    sizes = sorted({*lower, *(rows // size for size in lower)}, reverse=True)
    full = [size for size in sizes if size * shape.seq_len >= FULL_TOKENS]
    small = sizes[len(full) :]
    given = shape.options.lm_head_chunk_tokens
    chunks = [given, *(chunk for chunk in CHUNKS if chunk < given)]
    for group in filter(None, (full, small)):
        for chunk in chunks:
            for activations, place in ways:
                options = replace(
                    shape.options,
                    activations=activations,
                    activation_placement=place,
                    lm_head_chunk_tokens=chunk,
                )
                yield [
                    replace(
                        shape, options=options, micro_batch_size=size, accumulation=rows // size
                    )
                    for size in group
                ]


def _ways(placement: str) -> list[tuple[str, str]]:
    if placement == "auto":
        return [*WAYS]
    return [way for way in WAYS if way[1] == placement] or [("recompute", placement)]
