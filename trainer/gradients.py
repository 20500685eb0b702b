"""The sum of a stage's gradients over micro-batches or chunks, kept in fp32.

Knows nothing of stages. Invariant: whatever the compute dtype is, sums are taken in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class GradientSum:
    """Adds gradients by name; `gradients` holds contiguous fp32 tensors that the sum owns."""

    def __init__(self, start: dict[str, Tensor] | None = None) -> None:
        self.gradients: dict[str, Tensor] = start if start is not None else {}

    def add(self, terms: Mapping[str, Tensor]) -> None:
        """Add one micro-batch's gradients; fp32 tensors may be taken over, not copied."""
        for name, term in terms.items():
            if name in self.gradients:
                self.gradients[name].add_(term)
            else:
                self.gradients[name] = term.to(
                    torch.promote_types(term.dtype, torch.float32)
                ).contiguous()


class PlacedSum(GradientSum):
    """The same sum in tensors that are there already; the first terms are written, not added."""

    def __init__(self, gradients: dict[str, Tensor], *, has_terms: bool = False) -> None:
        super().__init__(gradients)
        self._terms = int(has_terms)
        self._is_half = not has_terms

    def add(self, terms: Mapping[str, Tensor]) -> None:
        """Add one micro-batch's gradients."""
        if self._terms == 0:
            torch._foreach_copy_([self.gradients[name] for name in terms], list(terms.values()))
        else:
            super().add(terms)
        self._terms += 1
        self._is_half &= all(term.dtype == torch.bfloat16 for term in terms.values())

    @property
    def has_terms(self) -> bool:
        """Say whether something was added yet."""
        return self._terms > 0

    def added_elsewhere(self) -> None:
        """Note that terms were added to the tensors behind this sum's back."""
        self._terms += 1
        self._is_half = False

    @property
    def fits_half(self) -> bool:
        """Say whether bf16 holds the sum exactly: it is one term, and that was bf16."""
        return self._terms == 1 and self._is_half


def taken(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give what `gradients` holds and empty it, so that whoever takes it is the only holder."""
    found = dict(gradients)
    gradients.clear()
    return found
