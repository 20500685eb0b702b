"""Passes of compiled blocks with adapters, recorded once and done again: one call for a hundred.

Owns the recordings and the fixed memory that they read and write. Every block of a model computes
with the same shapes: one recording of each way serves all of them, as long as its weights lie where
those of the recorded one lay; what else it takes is copied to fixed places before, and what it
gives from there. Knows nothing of stages or of arithmetic. Invariants: a recording is made of work
that was done twice before, so that everything is compiled; it does the same kernels on the same
values, so no bit changes; adapters are copied anew in every visit. Where nothing can be recorded,
passes are computed as they are.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from trainer.device_lanes import Lanes
from trainer.gradients import GradientSum
from trainer.lora.targets import linear_modules
from trainer.lora.waiting import laid_out
from trainer.model.stages import Stage

# Set to 0, blocks are computed as they are: to compare the two.
SWITCH = "SHARDB_RECORD_PASSES"
# How often work is done as it is before it is recorded.
WARM_RUNS = 2
# Forward and back, for a few shapes and places of weights.
RECORDINGS_MAX = 16
# One for each block that stays on a device.
REPEATED_MAX = 64
# Tokens times weights of a block; above, a device takes longer than a host takes to ask for it.
PRODUCTS_MAX = 1 << 39

Named = Mapping[str, Tensor]


def is_worth_recording(block: Stage, tokens: int) -> bool:
    """Say whether passes of a block with so many tokens are worth recording."""
    if os.environ.get(SWITCH) == "0":
        return False
    return tokens * sum(a * b for a, b in linear_modules(block).values()) <= PRODUCTS_MAX


class Call(Protocol):
    """A block as it is bound for one visit."""

    @property
    def functions(self) -> object:
        """Give what computes, the same object for all blocks that are alike."""
        ...

    @property
    def angles(self) -> tuple[Tensor, Tensor]:
        """Give the rotary tables."""
        ...

    @property
    def weights(self) -> Named:
        """Give the frozen tensors."""
        ...

    @property
    def leaves(self) -> Named:
        """Give the adapters."""
        ...

    @property
    def number(self) -> tuple[object, int]:
        """Say which visit it is."""
        ...

    def with_leaves(self, leaves: Named) -> Self:
        """Give the same with other adapters."""
        ...

    def forward(self, x: Tensor, left: list[Tensor] | None) -> Tensor:
        """Give the output; what is kept for the replay is added to `left`."""
        ...

    def back(
        self, x: Tensor, gradient: Tensor, left: list[Tensor] | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the block again, but for `left`; give the gradients of x and leaves."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Fixed:
    """Places of one shape: the input; the output and both gradients in turn; what was left."""

    x: Tensor
    other: Tensor
    left: list[Tensor]

    @property
    def named(self) -> dict[str, Tensor]:
        """Give all places by name."""
        return {"x": self.x, "other": self.other} | _numbered(self.left)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Adapters:
    """Places of adapters and their gradients; `number` is the visit whose adapters are there."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recorded:
    """Does a pass again; `reads` is what it reads beside weights and places, and has to last."""

    again: Callable[[], None]
    reads: Sequence[Tensor]


class Recorder:
    """Computes passes where a micro-batch has at most `tokens_max` tokens.

    may_record: from recordings, that is; else as they are, and without autograd too.
    """

    def __init__(self, lanes: Lanes) -> None:
        self.tokens_max = 0
        self.may_record = False
        self._lanes = lanes
        self._is_off = False
        self._runs: Counter[tuple[object, ...]] = Counter()
        self._recorded: dict[tuple[object, ...], _Recorded] = {}
        self._repeated: dict[tuple[object, ...], Callable[[], None]] = {}
        self._memory: dict[str, Tensor] = {}
        self._fixed: dict[tuple[object, ...], _Fixed] = {}
        self._adapters: dict[object, _Adapters] = {}
        self._there: tuple[object, tuple[object, int]] | None = None

    @property
    def count(self) -> int:
        """Give how many recordings there are."""
        return len(self._recorded) + len(self._repeated)

    def takes(self, x: Tensor) -> bool:
        """Say whether passes of such an input go this way."""
        return not self._is_off and x.shape[:-1].numel() <= self.tokens_max

    def forward(self, call: Call, x: Tensor, left: list[Tensor] | None) -> Tensor:
        """Give a block's output; what is kept for the replay is added to `left`."""
        form = ("forward", call.functions, x.shape, x.dtype, left is not None)
        recorded = self._known(form, call, x)
        if recorded is None:
            output = call.forward(x, left)
            self._note(form, x, left)
            return output
        fixed = self._fixed[_place(form)]
        self._fill(fixed.named, {"x": x})
        recorded.again()
        if left is not None:
            left += [each.clone() for each in fixed.left]
        return fixed.other.clone()

    def back(
        self,
        call: Call,
        x: Tensor,
        gradient: Tensor,
        left: list[Tensor] | None,
        total: GradientSum,
    ) -> Tensor:
        """Compute a block again and go back; give the gradient of x, in the place of `gradient`."""
        form = ("back", call.functions, x.shape, x.dtype, bool(left))
        recorded = self._known(form, call, x)
        if recorded is None:
            found, terms = call.back(x, gradient, left)
            self._note(form, x, left)
            total.add(terms)
            return found
        fixed = self._fixed[_place(form)]
        self._fill(fixed.named, {"x": x, "other": gradient} | _numbered(left or ()))
        recorded.again()
        self._gathered(total, call)
        return gradient.copy_(fixed.other)

    def _fill(self, places: Named, values: Named) -> None:
        for name, each in values.items():
            places[name].copy_(each)

    def _gathered(self, total: GradientSum, call: Call) -> None:
        _add(total, self._adapters[call.functions].gradients)

    def repeat(self, key: tuple[object, ...], work: Callable[[], object]) -> None:
        """Do work that reads and writes at the same addresses each time, which `key` has.

        What it reads beside them has to last.
        """
        if key in self._repeated:
            self._repeated[key]()
            return
        work()
        if self._is_off or not self.may_record or len(self._repeated) >= REPEATED_MAX:
            return
        self._runs[key] += 1
        if self._runs[key] >= WARM_RUNS:
            captured = self._captured(work)
            if captured is not None:
                self._repeated[key] = captured

    def _known(self, form: tuple[object, ...], call: Call, x: Tensor) -> _Recorded | None:
        """Give the recording of a pass, with this visit's adapters in their places."""
        if not self.may_record or self._runs[form] < WARM_RUNS:
            return None
        key = (*form, *(each.data_ptr() for each in call.weights.values()))
        if key not in self._recorded:
            if len(self._recorded) >= RECORDINGS_MAX:
                return None
            recorded = self._record(form, call)
            if recorded is None:
                return None
            self._recorded[key] = recorded
        self._bring(call)
        return self._recorded[key]

    def _bring(self, call: Call) -> None:
        """Copy a visit's adapters to their places, once a visit."""
        visit = (call.functions, call.number)
        if self._there != visit and call.leaves:
            places = self._adapters[call.functions].values
            torch._foreach_copy_([*places.values()], [call.leaves[name] for name in places])
            self._there = visit

    def _note(self, form: tuple[object, ...], x: Tensor, left: list[Tensor] | None) -> None:
        """Count a pass that was computed as it is, and take places of its forms."""
        self._runs[form] += 1
        if _place(form) not in self._fixed:
            whole = x.contiguous()
            self._fixed[_place(form)] = _Fixed(
                x=self._place_like("x", whole), other=self._place_like("other", whole), left=[]
            )
        fixed = self._fixed[_place(form)]
        if left and not fixed.left:
            fixed.left.extend(self._place_like(*each) for each in _numbered(left).items())

    def _place_like(self, kind: str, tensor: Tensor) -> Tensor:
        """Give a place laid out as a tensor is; shapes share memory, for passes come in turn."""
        [piece], size = laid_out([tensor])
        known = self._memory.get(kind)
        if known is None or known.nbytes < size:
            known = torch.zeros(size, dtype=torch.uint8, device=tensor.device)
            self._memory[kind] = known
        return piece.of(known)

    def _record(self, form: tuple[object, ...], call: Call) -> _Recorded | None:
        way, *_, has_left = form
        if call.functions not in self._adapters:
            self._adapters[call.functions] = _Adapters(
                values={name: torch.zeros_like(each) for name, each in call.leaves.items()},
                gradients={name: torch.zeros_like(each) for name, each in call.leaves.items()},
            )
        adapters, fixed = self._adapters[call.functions], self._fixed[_place(form)]
        bound = call.with_leaves(adapters.values)

        def forward() -> None:
            left: list[Tensor] | None = [] if has_left else None
            output = bound.forward(fixed.x, left)
            for place, each in zip(fixed.left, left or (), strict=False):
                place.copy_(each)
            fixed.other.copy_(output)

        def back() -> None:
            left = [*fixed.left] if has_left else None
            found, terms = bound.back(fixed.x, fixed.other, left)
            fixed.other.copy_(found)
            if terms:
                torch._foreach_copy_([*adapters.gradients.values()], [*terms.values()])

        again = self._captured(forward if way == "forward" else back)
        return None if again is None else _Recorded(again=again, reads=call.angles)

    def _captured(self, work: Callable[[], object]) -> Callable[[], None] | None:
        """Record work; None where that cannot be done, now or ever."""

        def silent() -> None:  # what it gives lies where it is wanted already
            work()

        for is_last in (False, True):
            try:
                captured = self._lanes.capture(silent)
            except Exception as error:  # noqa: BLE001 - such work was done without one before
                if is_last:
                    self._end(error)
                    return None
                work()  # should something have been compiled while it was recorded
            else:
                self._is_off = captured is None
                return None if captured is None else captured[1]
        return None

    def _end(self, error: BaseException) -> None:
        """Record nothing more, and use nothing that was recorded: a half of it may be wrong."""
        self._is_off = True
        self._recorded.clear()
        self._repeated.clear()
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warnings.warn(f"blocks are computed without recordings: {first}", stacklevel=2)


def _place(form: tuple[object, ...]) -> tuple[object, ...]:
    """Give what all passes of one shape share places by."""
    return form[1:-1]


def _numbered(left: Sequence[Tensor]) -> dict[str, Tensor]:
    return {f"left {index}": each for index, each in enumerate(left)}


def _add(total: GradientSum, terms: Named) -> None:
    """Add terms that stay where they are: the first ones are copied."""
    if not terms:
        return
    if total.gradients:
        sums = [total.gradients[name] for name in terms]
        torch._foreach_add_(sums, [*terms.values()])
        return
    copies = {name: torch.empty_like(each) for name, each in terms.items()}
    torch._foreach_copy_([*copies.values()], [*terms.values()])
    total.add(copies)
