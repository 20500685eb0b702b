"""A stage's inputs and its ledgers between its two passes.

Owns one ledger a micro-batch: the first pass fills it, the replay empties it. Knows nothing of what
is in them. Invariant: a ledger is used up by the replay of its own micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from trainer.gradients import GradientSum
from trainer.lora.away import LeavingTape
from trainer.lora.ledger import Keeping, Ledger, Taking
from trainer.lora.stages import AdaptedStage
from trainer.placement import Boundary
from trainer.tape import Compute, ReplayTape


class LedgerTape(ReplayTape):
    """Keeps inputs, and what products with frozen weights and attention gave."""

    def __init__(
        self,
        stage: AdaptedStage,
        compute: Compute,
        params: Mapping[str, Tensor],
        inputs: Boundary | Sequence[Tensor],
    ) -> None:
        self._binding = stage.binding
        self._ledgers: list[Ledger] = []
        super().__init__(stage, compute, params, inputs)

    def _forward(self, params: Mapping[str, Tensor], x: Tensor, index: int) -> Tensor:
        ledger = Ledger()
        self._ledgers.append(ledger)
        with self._binding.calling(Keeping(ledger)):
            return super()._forward(params, x, index)

    def _again(
        self, index: int, leaves: dict[str, Tensor], gradient: Tensor, total: GradientSum
    ) -> Tensor:
        ledger = self._ledgers[index]
        with self._binding.calling(Taking(ledger)):
            found = super()._again(index, leaves, gradient, total)
        assert not len(ledger), "a replay makes every call of the first pass"
        return found


def tape_of(
    stage: AdaptedStage,
    compute: Compute,
    params: Mapping[str, Tensor],
    inputs: Boundary | Sequence[Tensor],
    *,
    activations: str,
) -> ReplayTape:
    """Give a stage's tape, which keeps of a block what `activations` says, beside its input."""
    kinds = {"keep": LedgerTape, "attention": LeavingTape, "recompute": ReplayTape}
    kind = kinds[activations] if stage.is_block else ReplayTape
    return kind(stage, compute, params, inputs)
