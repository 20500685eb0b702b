"""The updates of all adapters: one after the other where the host computes, else all at once.

Owns how old values reach the device and new ones the staged images. The arithmetic is the rule's.
Knows nothing of gradients' making. Invariant: values are those of one shard after the other, since
a rule looks at no more than one tensor at a time, or, where all are made one, at one element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardb import ShardView, StagedShard, torch_adaptor
from trainer.backward import StageGradients
from trainer.device import Device
from trainer.lora.forms import SlotForm
from trainer.lora.model import AdaptedModel
from trainer.lora.runs import Runs, shards_of
from trainer.lora.small_copies import SmallCopies, copy_small
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.lion import Lion
from trainer.optimizers.rule import UpdateRule
from trainer.optimizers.tiles import ShardUpdate
from trainer.step import ShardTransaction, StepOrder, write_update

# Rules that do the same to every element, whichever tensor it is of.
ELEMENTWISE = (AdamW, Lion)


class Updates:
    """One stage after the other."""

    def __init__(
        self,
        model: AdaptedModel,
        txn: ShardTransaction,
        order: StepOrder,
        views: Mapping[str, ShardView],
    ) -> None:
        self._model = model
        self._txn = txn
        self._order = order
        self._views = views

    def begin(self, ready: Sequence[StageGradients], scales: Mapping[str, Tensor]) -> None:
        """Do what needs no look at a device: the backward pass is asked for, and may still run.

        What is not finite is found behind this, and forgotten.
        """

    def forget(self) -> None:
        """Drop what `begin` made: there will be no update."""

    def update(self, ready: Sequence[StageGradients], scales: Mapping[str, float]) -> None:
        """Stage the next version of every adapter and its state."""
        for each in ready:
            name = each.stage.name
            state_view = self._txn.read(f"optim/{name}")
            params = self._txn.stage(f"adapters/{name}", like=each.view)
            state = self._txn.stage(f"optim/{name}", like=state_view)
            scale = scales[name]
            write_update(self._model.step, self._order, each, state_view, params, state, scale)
            params.seal()
            state.seal()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Old:
    form: SlotForm
    image: Tensor
    staged: Mapping[str, StagedShard]


class _Copied(Updates):
    """What goes to a device and comes back."""

    def __init__(
        self,
        model: AdaptedModel,
        txn: ShardTransaction,
        order: StepOrder,
        views: Mapping[str, ShardView],
        copies: SmallCopies,
    ) -> None:
        super().__init__(model, txn, order, views)
        self._copies = copies


def update_as_one(
    rule: UpdateRule,
    device: Device,
    params: Tensor,
    states: Mapping[str, Tensor],
    gradient: Tensor,
    *,
    learning_rate: float,
    step: int,
) -> None:
    """Update rows [1, N] in place as one tensor of one shard; states: a row a kind."""
    state = {f"all.{kind}": row for kind, row in states.items()}
    update = ShardUpdate(
        name="adapters",
        params={"all": params},
        state=state,
        new_params={"all": params},
        new_state=state,
        gradients={"all": gradient},
        gradient_scale=1.0,
        learning_rate=learning_rate,
        step=step,
    )
    rule.update(device, update)


class FlatUpdates(_Copied):
    """All stages as if they were one tensor, between two copies, before anybody looks."""

    def __init__(self, *given: Any, states: Mapping[str, ShardView], runs: Runs) -> None:
        super().__init__(*given)
        self._states = states
        self._runs = runs
        self._staged: dict[str, StagedShard] = {}

    def begin(self, ready: Sequence[StageGradients], scales: Mapping[str, Tensor]) -> None:
        """See `Updates`."""
        runs, rule, device = self._runs, self._model.step.optimizer, self._model.step.device
        shards = shards_of(self._views, self._states)
        image = self._copies.run_to_device(runs.bodies, shards)
        params, states = runs.flat_adapters(image), runs.flat_states(image)
        gradient = runs.flat({each.stage.name: each.gradients for each in ready})
        if len({id(scale) for scale in scales.values()}) == 1:
            gradient.mul_(next(iter(scales.values())))
        else:
            for name, part in runs.by_stage(gradient).items():
                part.mul_(scales[name])
        update_as_one(
            rule,
            device,
            params,
            states,
            gradient,
            learning_rate=self._order.learning_rate,
            step=self._order.step,
        )
        runs.put_states(image, states)
        self._copies.run_to_host(image)
        # Staging takes a host a while, and here the device has work.
        self._staged = {shard: self._txn.stage(shard, like=view) for shard, view in shards.items()}

    def forget(self) -> None:
        """See `Updates`."""
        for shard in self._staged:
            self._txn.discard(shard)
        self._staged = {}

    def update(self, ready: Sequence[StageGradients], scales: Mapping[str, float]) -> None:
        """See `Updates`."""
        self._model.step.device.wait()
        for shard in self._copies.fill(self._runs.bodies, self._staged):
            self._staged[shard].seal()
        self._staged = {}


class UpdatesAtOnce(_Copied):
    """All stages in a few kernels, between two copies."""

    _old: _Old | None = None

    def begin(self, ready: Sequence[StageGradients], scales: Mapping[str, Tensor]) -> None:
        """See `Updates`."""
        states = {name: self._txn.read(f"optim/{name}") for name in self._views}
        shards = shards_of(self._views, states)
        stored = {
            f"{shard}:{name}": tensor
            for shard, view in shards.items()
            for name, tensor in torch_adaptor.tensors(view).items()
        }
        form, image = self._copies.to_device(stored)
        # Staging takes a host a while, and here the device has work.
        staged = {shard: self._txn.stage(shard, like=view) for shard, view in shards.items()}
        self._old = _Old(form=form, image=image, staged=staged)

    def forget(self) -> None:
        """See `Updates`."""
        if self._old is not None:
            for shard in self._old.staged:
                self._txn.discard(shard)
            self._old = None

    def update(self, ready: Sequence[StageGradients], scales: Mapping[str, float]) -> None:
        """See `Updates`."""
        old = self._old
        assert old is not None, "values were not brought in"
        image = torch.empty_like(old.image)
        values, targets = old.form.tensors(old.image), old.form.tensors(image)
        for scale in sorted(set(scales.values())):
            chosen = [each for each in ready if scales[each.stage.name] == scale]
            gradients = {
                f"{each.stage.name}:{name}": gradient
                for each in chosen
                for name, gradient in each.gradients.items()
            }
            stages = {each.stage.name for each in chosen}
            self._model.step.optimizer.update(
                self._model.step.device,
                ShardUpdate(
                    name="adapters",
                    params=_of("adapters", stages, values),
                    state=_of("optim", stages, values),
                    new_params=_of("adapters", stages, targets),
                    new_state=_of("optim", stages, targets),
                    gradients=gradients,
                    gradient_scale=scale,
                    learning_rate=self._order.learning_rate,
                    step=self._order.step,
                ),
            )
        found = self._copies.to_host(old.form, image)
        for shard, staged in old.staged.items():
            for name, tensor in torch_adaptor.tensors(staged).items():
                copy_small(found[f"{shard}:{name}"], tensor)
            staged.seal()
        self._old = None


class UpdatesBehind(_Copied):
    """Those of a device. Which ones is asked when they begin, for there the device has work."""

    _chosen: Updates | None = None

    def begin(self, ready: Sequence[StageGradients], scales: Mapping[str, Tensor]) -> None:
        """See `Updates`."""
        self._chosen = self._choose()
        self._chosen.begin(ready, scales)

    def forget(self) -> None:
        """See `Updates`."""
        if self._chosen is not None:
            self._chosen.forget()

    def update(self, ready: Sequence[StageGradients], scales: Mapping[str, float]) -> None:
        """See `Updates`."""
        assert self._chosen is not None, "an update was not begun"
        self._chosen.update(ready, scales)

    def _choose(self) -> Updates:
        given = (self._model, self._txn, self._order, self._views, self._copies)
        if isinstance(self._model.step.optimizer, ELEMENTWISE):
            states = {name: self._txn.read(f"optim/{name}") for name in self._views}
            runs = Runs.of(self._views, states)
            if runs is not None:
                return FlatUpdates(*given, states=states, runs=runs)
        return UpdatesAtOnce(*given)


def _of(kind: str, stages: set[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for key, tensor in tensors.items():
        its_kind, _, rest = key.partition("/")
        if its_kind == kind and rest.partition(":")[0] in stages:
            found[rest] = tensor
    return found


def updates_of(
    model: AdaptedModel,
    txn: ShardTransaction,
    order: StepOrder,
    views: Mapping[str, ShardView],
) -> Updates:
    """Give what updates the adapters of a step."""
    if model.base is None:
        return Updates(model, txn, order, views)
    return UpdatesBehind(model, txn, order, views, model.base.copies)
