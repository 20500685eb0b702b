"""Stages whose weights are frozen and whose adapters are trained.

Owns how a stage of any model runs with adapters: its own `forward`, with weights that are bound for
the length of a visit. Knows nothing of where weights come from. Invariant: between visits a stage
holds no weight, so nothing that outlives a visit can.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch import Tensor

from trainer.lora import nf4
from trainer.lora.ledger import Calls, Product, valueless
from trainer.lora.linears import AdaptedLinears, matrix_product
from trainer.lora.slots import Lease, LookUp, StaleSlotError
from trainer.lora.targets import adapter_parameters, linear_modules
from trainer.model.adapter_settings import LoraSettings
from trainer.model.adapters import A_ENDS, B_ENDS, Adapter
from trainer.model.micro_batch import MicroBatch
from trainer.model.packed import PREFIX
from trainer.model.stages import Block, Parameter, Stage


class Binding:
    """The weights of the visit that is going on.

    is_replay: stages are computed again for their gradients, and nobody looks at their outputs.
    calls: who computes products and attention, where it is not the stage itself.
    left: what a compiled block's first pass leaves for its replay; None where nothing is kept.
    visits: how many there were, with the one that is going on.
    """

    def __init__(self) -> None:
        self._lease: Lease | None = None
        self.visits = 0
        self.is_replay = False
        self.calls: Calls | None = None
        self.left: list[Tensor] | None = None

    @contextmanager
    def leaving(self, left: list[Tensor] | None) -> Iterator[None]:
        """Let a compiled block leave something for its replay, or take what was left."""
        assert self.left is None
        self.left = left
        try:
            yield
        finally:
            self.left = None

    @contextmanager
    def calling(self, calls: Calls) -> Iterator[None]:
        """Let products and attention of a block be computed, or taken, by `calls`."""
        assert self.calls is None
        self.calls = calls
        try:
            yield
        finally:
            self.calls = None

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Let what is computed in a block be asked for its gradients alone."""
        self.is_replay = True
        try:
            yield
        finally:
            self.is_replay = False

    @contextmanager
    def bound(self, lease: Lease) -> Iterator[None]:
        """Bind weights for a block."""
        assert self._lease is None, "a stage is visited once at a time"
        self._lease = lease
        self.visits += 1
        try:
            yield
        finally:
            self._lease = None

    @property
    def rows_of(self) -> LookUp | None:
        """Give what looks rows up for a device, in a table in host memory."""
        return None if self._lease is None else self._lease.rows_of

    def weights(self) -> Mapping[str, Tensor]:
        """Give the weights; StaleSlotError outside a visit."""
        if self._lease is None:
            raise StaleSlotError("a stage ran outside a visit: it has no weights")
        return self._lease.tensors()


@contextmanager
def leased(stage: AdaptedStage, lease: Lease, *, poison: bool = False) -> Iterator[None]:
    """Have a lease's weights bound to a stage for a block, and the lease ended behind it."""
    try:
        with stage.binding.bound(lease):
            yield
    finally:
        lease.end(poison=poison)


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedStage(Stage):
    """A stage whose parameters are its adapters; the weights are bound beside them."""

    inner: Stage
    lora: LoraSettings
    binding: Binding = field(default_factory=Binding)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def is_table(self) -> bool:
        """Say whether weights are only looked up: they stay in host memory, as they are stored."""
        return self.inner.keeps_master_dtype

    @property
    def parameters(self) -> dict[str, Parameter]:
        return adapter_parameters(self.inner, self.lora)

    def forward(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return self.forward_of(MicroBatch(), params, x)

    def forward_of(self, batch: MicroBatch, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        weights = self.binding.weights()
        if self.is_table:
            return self._looked_up(weights, x)
        products: dict[str, Product] = {}
        if nf4.holds(weights):
            weights, products = self._unpacking(weights, x)
        last = self._unasked(weights, products)
        linears = AdaptedLinears(
            self._adapters(batch, weights, params),
            [(weights[name], product) for name, product in (products | last).items()],
            self.binding.calls,
            [weights[name] for name in last],
        )
        # A resident model multiplies [B, T, D]; for [N, D] a device may choose other kernels.
        rows = x[None] if x.dim() == 2 and x.is_floating_point() else x
        with linears:
            output = self.inner.forward_of(batch, weights, rows)
        # Not by an index: its way back would fill a tensor of this size with zeros first.
        output = output.squeeze(0) if rows is not x else output
        assert linears.unused == 0, f"{self.name}: an adapter was passed by"
        return output

    def _looked_up(self, weights: Mapping[str, Tensor], ids: Tensor) -> Tensor:
        [table] = weights.values()
        if self.binding.rows_of is not None:
            return self.binding.rows_of(table, ids)
        return self.inner.forward(weights, ids.to(table.device)).to(ids.device)

    @property
    def is_block(self) -> bool:
        """Say whether this is one of the stages that are all alike."""
        return self.name.startswith("block_")

    @property
    def is_packed(self) -> bool:
        """Say whether the frozen shard is one of `trainer.lora.nf4`."""
        return self.lora.base_quant == "nf4" and bool(linear_modules(self.inner))

    @property
    def shard(self) -> str:
        """Give the name of the frozen shard that is bound."""
        return (PREFIX if self.is_packed else "params/") + self.name

    def _unasked(
        self, weights: Mapping[str, Tensor], products: Mapping[str, Product]
    ) -> dict[str, Product]:
        """Give the product that a replay has no use for, a quarter of a block's, by its weight."""
        name = self.inner.added_last
        if name is None:
            return {}
        product = products.get(name) or matrix_product(weights[name])
        return {name: valueless(product) if self.binding.is_replay else product}

    def _unpacking(
        self, packed: Mapping[str, Tensor], x: Tensor
    ) -> tuple[Mapping[str, Tensor], dict[str, Product]]:
        """Give weights without content in the place of packed ones, and what multiplies by each."""
        multiplied = nf4.products(self.inner, packed, nf4.code_tables(x.device))
        weights = {
            name: x.new_empty(()).expand(parameter.shape) if name in multiplied else packed[name]
            for name, parameter in self.inner.parameters.items()
        }
        return weights, multiplied

    def _adapters(
        self, batch: MicroBatch, weights: Mapping[str, Tensor], params: Mapping[str, Tensor]
    ) -> list[tuple[Tensor, Adapter]]:
        modules = [name.removesuffix(A_ENDS) for name in params if name.endswith(A_ENDS)]
        return [
            (
                weights[f"{module}.weight"],
                Adapter(
                    a_RI=params[module + A_ENDS],
                    b_OR=params[module + B_ENDS],
                    scale=self.lora.scale,
                    rounds_first=self.is_packed,
                    dropout=self.lora.dropout,
                    drop_seed=batch.drop_seed(self.name, module),
                ),
            )
            for module in modules
        ]


def adapted(stage: Stage, lora: LoraSettings) -> AdaptedStage:
    """Give a stage with adapters, or with its weights merely frozen where it has no target."""
    inner = replace(stage, angles_on_device=True) if isinstance(stage, Block) else stage
    return AdaptedStage(stage.config, inner, lora)
