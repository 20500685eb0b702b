"""The trainer's own errors, in the tree of `shardb.errors`.

InputError            2  a flag, a recipe or a file is wrong: mend it and start again
└── NonFiniteError    2  training diverged: the recipe has to change, nothing was committed
"""

from __future__ import annotations

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
