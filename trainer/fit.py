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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from trainer.errors import InputError
from trainer.sizes import in_bytes
from trainer.vram import StepShape, predicted_bytes

FULL_TOKENS = 4096
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
    least: Fitted | None = None
    for candidate in _candidates(shape, ways or _ways(placement)):
        found = Fitted(shape=candidate, bytes=predict(candidate))
        if found.bytes <= budget_bytes:
            return found
        if least is None or found.bytes < least.bytes:
            least = found
    assert least is not None, "the step as it was given is a candidate"
    raise InputError(
        f"--fit: no step of {shape.micro_batch_size * shape.accumulation} rows fits into"
        f" {in_bytes(budget_bytes)}; the least is {in_bytes(least.bytes)}: raise --vram-budget, or"
        " take shorter rows, a smaller model or --grad-clip-mode shard"
    )


def _candidates(shape: StepShape, ways: Sequence[tuple[str, str]]) -> Iterator[StepShape]:
    rows = shape.micro_batch_size * shape.accumulation
    sizes = [size for size in range(rows, 0, -1) if rows % size == 0]
    full = [size for size in sizes if size * shape.seq_len >= FULL_TOKENS]
    small = [size for size in sizes if size not in full]
    given = shape.options.lm_head_chunk_tokens
    chunks = [given, *(chunk for chunk in CHUNKS if chunk < given)]
    for group in (full, small):
        for chunk in chunks:
            for activations, place in ways:
                for size in group:
                    options = replace(
                        shape.options,
                        activations=activations,
                        activation_placement=place,
                        lm_head_chunk_tokens=chunk,
                    )
                    yield replace(
                        shape, options=options, micro_batch_size=size, accumulation=rows // size
                    )


def _ways(placement: str) -> list[tuple[str, str]]:
    if placement == "auto":
        return [*WAYS]
    return [way for way in WAYS if way[1] == placement] or [("recompute", placement)]
