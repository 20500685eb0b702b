"""The engine of a run with adapters: the base is read, never written.

Owns what a caller of `trainer.engine` sees, for a model with adapters. Knows nothing of files,
schedules or commits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shardb import TensorSpec, Transaction
from trainer.device import Device
from trainer.device_lanes import lanes_of
from trainer.engine import Engine, Rows
from trainer.errors import InputError, NonFiniteError
from trainer.evaluate import EvalResult
from trainer.lora import nf4
from trainer.lora.adoption import NewAdapters
from trainer.lora.feeding import DeviceBase
from trainer.lora.host_base import HostBase
from trainer.lora.model import AdaptedModel
from trainer.lora.residency import Residency
from trainer.lora.step import AdapterPass, AdapterStep
from trainer.lora.visits import AdaptedEvaluator, open_visits, read_adapters
from trainer.model.adapter_settings import LoraSettings
from trainer.model.config import ModelConfig
from trainer.options import EngineOptions
from trainer.pipeline.course import NextRows
from trainer.pipeline.pipeline import PipelineSettings
from trainer.residency import ShardReader
from trainer.step import ShardTransaction, StepOrder, StepResult
from trainer.timing import StepClock
from trainer.tokens import Tokens, check_length


class AdapterEngine(Engine):
    """Trains and evaluates the adapters of one model whose base lives in a store.

    poison: fill slots that were given back with NaN, to find whoever still reads them.
    keeps_base: let a device's copies of the base stay in host memory.
    copies_base: where the host computes, keep a copy of what is stored in another dtype.
    vram_budget_bytes: device memory that frozen blocks may fill; None lets none of them stay.

    Raises:
        InputError: a target is no module of the model, or an option does not go with adapters.
    """

    def __init__(
        self,
        config: ModelConfig,
        options: EngineOptions,
        device: Device,
        lora: LoraSettings,
        *,
        seed: int = 0,
        spill_folder: str | None = None,
        poison: bool = False,
        keeps_base: bool = True,
        copies_base: bool = False,
        vram_budget_bytes: int | None = None,
    ) -> None:
        check_options(options, lora)
        if lora.base_quant == "nf4":
            nf4.library()
        super().__init__(config, options, device, spill_folder=spill_folder)
        self.lora = lora
        self._seed = seed
        self._poison = poison
        base = copies = None
        if device.is_host:
            if copies_base and not poison:
                copies = HostBase(device, lanes_of(device), options.torch_dtype)
        else:
            device.split_exactly()  # what is foretold is to the byte
            base = DeviceBase(
                device,
                options.torch_dtype,
                poison=poison,
                keeps_host=keeps_base,
                inputs_on_host=options.activation_placement == "host",
            )
        self.adapted = AdaptedModel.of(self._model, lora, poison=poison, base=base, copies=copies)
        self._residency = None if base is None else Residency(self.adapted, vram_budget_bytes)

    def use_pipeline(self, settings: PipelineSettings) -> None:
        """Stay on the plain way: the pipeline is for shards that are updated."""

    def initialise(self, txn: ShardTransaction, seed: int) -> None:
        """Refuse: adapters need a base."""
        raise InputError("--lora-rank needs a model that was imported: see `import-hf --help`")

    def shard_specs(self) -> dict[str, dict[str, TensorSpec]]:
        """Give the form of every shard that a step stages."""
        found = {}
        for stage in self.adapted.owners:
            found[f"adapters/{stage.name}"] = dict(stage.specs)
            found[f"optim/{stage.name}"] = dict(self._model.optimizer.state_specs(stage.specs))
        return found

    def prepare_base(self, txn: Transaction) -> list[str]:
        """Stage the packed base where it is asked for and not there; give what there is to say."""
        if self.lora.base_quant == "none":
            return []
        known = txn.base.shards if txn.base else {}
        packed = nf4.stage_quantised(txn, self.stages, known, self.device.torch_device)
        size = f"{packed.bytes:,} bytes, {packed.bytes_a_value:.4f} each"
        return [f"base in nf4: {packed.values:,} parameters in {size}"]

    def adopting(self, txn: ShardTransaction) -> ShardTransaction:
        """Give a transaction on an import adapters with their first values."""
        stages = {stage.name: stage for stage in self.adapted.owners}
        return NewAdapters(txn, stages, self.shard_specs(), self._seed)

    def train_step(
        self,
        txn: ShardTransaction,
        micro_batches: Sequence[Rows],
        *,
        step: int,
        learning_rate: float,
        loss_scale: float = 1.0,
        grad_norm_scale: float = 1.0,
        next_rows: NextRows | None = None,
    ) -> StepResult:
        """Stage the next version of every adapter; the caller commits. See `Engine.train_step`."""
        order = StepOrder(
            step=step,
            learning_rate=learning_rate,
            loss_scale=loss_scale,
            grad_norm_scale=grad_norm_scale,
        )
        at_end = partial(self._look_up_ahead, next_rows)
        this_step = AdapterStep(self.adapted, txn, order, at_end=at_end)
        result = this_step.run(self._placed_tokens(micro_batches))
        if self._residency is not None:
            self._residency.stepped()
        return result

    def _placed_tokens(self, micro_batches: Sequence[Rows]) -> list[Tokens]:
        """Give ids where their rows are looked up, and labels in one copy: each copy is waited for.

        Records that are kept apart need all of it where masks are made.
        """
        if self.adapted.base is None or self.options.records_apart:
            return self._tokens(micro_batches)
        batches = self._tokens(micro_batches, Device.from_name("cpu"))
        sizes = [batch.labels.numel() for batch in batches]
        labels = self.device.to_device(torch.cat([batch.labels.flatten() for batch in batches]))
        return [
            replace(batch, labels=its.view(batch.labels.shape))
            for batch, its in zip(batches, torch.split(labels, sizes), strict=True)
        ]

    def _look_up_ahead(self, next_rows: NextRows | None) -> None:
        """Bring the next step's first rows of embeddings to a device that is still at work."""
        if self.adapted.base is None or next_rows is None:
            return
        try:
            rows = next_rows()
            if rows:
                ids = Tokens.from_rows(rows[0], self.config, Device.from_name("cpu")).ids
                self.adapted.base.copies.look_up_ahead(ids)
        except InputError:
            return  # of that step, which will meet it again

    def discard_step(self, txn: ShardTransaction) -> None:
        """Drop what a step staged, so that the same transaction can try again."""
        for name in self.shard_specs():
            txn.discard(name)

    def find_non_finite(
        self, reader: ShardReader, micro_batches: Sequence[Rows]
    ) -> NonFiniteError | None:
        """Take the gradients in fp32, without a loss scale; give the error that names a bad one."""
        plain = replace(self.options, dtype="fp32", activations="recompute")
        fp32 = replace(self._model, options=plain)
        model = AdaptedModel.of(fp32, self.lora, poison=self._poison)
        clock = StepClock()
        try:
            views = read_adapters(model, reader)
            with open_visits(model, reader, model.gradient_order(), clock) as visits:
                adapter_pass = AdapterPass(model, visits, model.step.compute(clock), views)
                for _ in adapter_pass.run(self._tokens(micro_batches)):
                    pass
        except NonFiniteError as error:
            return error
        return None

    def evaluate(self, reader: ShardReader, batches: Iterable[Rows]) -> EvalResult:
        """Give the mean loss over the valid tokens of rows [B, T + 1]."""
        tokens = (Tokens.from_rows(rows, self.config, self.device) for rows in batches)
        return AdaptedEvaluator(self.adapted).evaluate(reader, tokens)

    def logits(self, reader: ShardReader, ids: Tensor, *, last_only: bool = False) -> Tensor:
        """Score ids [B, T]: [B, T, V] in the compute dtype, or [B, 1, V] with `last_only`."""
        check_length(ids.shape[1], self.config)
        ids = ids.to(self.device.torch_device)
        return AdaptedEvaluator(self.adapted).logits(reader, ids, last_only=last_only)


def check_options(options: EngineOptions, lora: LoraSettings) -> None:
    """Refuse what is made for shards of whole weights, and what compiled blocks do not know."""
    if options.compile_blocks and (lora.dropout or options.records_apart):
        what = "--lora-dropout" if lora.dropout else "records that are kept apart"
        raise InputError(f"--compile-blocks: compiled blocks know no {what}: leave it out")
    if options.master_weight_dtype != "fp32":
        raise InputError("--master-weight-dtype: adapters are kept in fp32: leave it out")
    if options.global_optimizer_every:
        raise InputError("--global-optimizer-every is not for adapters: leave it out")
    if options.activations == "attention" and not options.compile_blocks:
        raise InputError(
            "--activations attention is for compiled blocks: give --compile-blocks, or"
            " --activations keep"
        )
    if options.activations == "attention" and options.activation_placement == "spill":
        raise InputError(
            "--activations attention: nothing of it is kept in a file: give --activations"
            " recompute, or --activation-placement host"
        )
    if options.activations == "keep" and options.compile_blocks:
        raise InputError(
            "--activations keep: beside a frozen base compiled blocks keep what attention gave, or"
            " nothing: give --activations attention, or leave --compile-blocks out"
        )
