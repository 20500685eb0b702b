"""The trainer's own errors, in the tree of `shardb.errors`.

InputError                  2  a flag, a recipe or a file is wrong: mend it and start again
├── NonFiniteError          2  training diverged: the recipe has to change, nothing was committed
│   └── GradientOverflowError  the loss scale is too large for this batch: skip it, scale less
├── UpdateRejectedError     2  the guard let no attempt at this batch pass: skip it
└── SkipLimitError          2  too many batches in a row were skipped: the recipe has to change
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardb.errors import ShardbError


class InputError(ShardbError):
    """What the user gave cannot be used; the message names the field or file and the remedy."""

    kind = "bad_input"
    exit_code = 2


class NonFiniteError(InputError):
    """A gradient or the loss is not finite; the step was not committed."""

    kind = "non_finite"

    def __init__(self, message: str, *, shard: str, tensor: str) -> None:
        super().__init__(message)
        self.shard = shard
        self.tensor = tensor


class GradientOverflowError(NonFiniteError):
    """A gradient of a scaled loss is not finite; the batch is skipped and the scale halved."""

    kind = "gradient_overflow"


class UpdateRejectedError(InputError):
    """Every attempt at a batch made its own loss clearly worse; the batch is skipped."""

    kind = "update_rejected"

    def __init__(self, message: str, *, details: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.details = details


class SkipLimitError(InputError):
    """So many batches in a row were skipped that going on would only burn data."""

    kind = "skip_limit"
