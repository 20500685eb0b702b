"""The engine: trains and evaluates a model whose parameters live in a store.

Owns what a caller sees: initial values, one training step, held-out loss, logits. It knows stages
and a transaction, and nothing of files, schedules, data order or commits: the caller commits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardb import Transaction, torch_adaptor
from shardb.views import StagedShard
from trainer.adoption import AdoptingTransaction
from trainer.device import Device
from trainer.errors import InputError, NonFiniteError
from trainer.evaluate import EvalResult, Evaluator
from trainer.gradient_pass import GradientPass
from trainer.model.compiled import CompiledBlocks
from trainer.model.config import ModelConfig
from trainer.model.initialise import fill_initial
from trainer.model.stages import Stage, build_head, build_stages, build_trunk
from trainer.optimizers.bf16_masters import stored_specs
from trainer.options import EngineOptions
from trainer.pipeline.course import NextRows, PipelineCourse
from trainer.pipeline.pipeline import Pipeline, PipelineSettings, is_supported
from trainer.placement_places import ActivationPlaces
from trainer.prefetch import prefetch_of
from trainer.residency import ShardReader, ShardWindow
from trainer.step import ShardTransaction, StepOrder, StepResult, TrainStep
from trainer.step_model import StepModel
from trainer.timing import StepClock
from trainer.tokens import Tokens, check_length

__all__ = ["Engine", "EngineOptions", "EvalResult", "StepResult"]

Rows = NDArray[np.integer]


class Engine:
    """Trains and evaluates one model whose parameters live in a store."""

    def __init__(
        self,
        config: ModelConfig,
        options: EngineOptions,
        device: Device,
        *,
        spill_folder: str | None = None,
    ) -> None:
        self.config = config
        self.options = options
        self.device = device
        self.stages = build_stages(config)
        self._model = StepModel(
            trunk=build_trunk(config),
            head=build_head(config),
            tied=config.tied_embeddings,
            options=options,
            optimizer=options.update_rule(),
            device=device,
            places=ActivationPlaces(options, device, spill_folder),
            blocks=CompiledBlocks() if options.compile_blocks else None,
        )
        self.pipeline: Pipeline | None = None
        self._course: PipelineCourse | None = None

    def use_pipeline(self, settings: PipelineSettings) -> None:
        """Train through a pipeline from here on, where these options allow it; `close` ends it."""
        if self.pipeline is None and is_supported(self.options):
            self.pipeline = Pipeline(self._model, settings)

    @property
    def pipeline_steps(self) -> int:
        """How many steps went through the pipeline."""
        return 0 if self.pipeline is None else self.pipeline.steps_done

    def close(self) -> None:
        """Let go of the device and of what belongs to the stores; do it before they are closed."""
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline = self._course = None

    def initialise(self, txn: ShardTransaction, seed: int) -> None:
        """Stage first parameters and zero optimizer state for every stage.

        Random numbers come from one processor a tensor, so stages are filled side by side.
        """
        with ThreadPoolExecutor(os.cpu_count(), "initialise") as executor:
            filled = []
            for stage in self.stages:
                specs = stored_specs(stage.specs, self.options.master_weight_dtype)
                params = txn.stage(f"params/{stage.name}", like=specs)
                filled.append(executor.submit(self._fill_and_seal, stage, seed, params))
                state = txn.stage(
                    f"optim/{stage.name}", like=self._model.optimizer.state_specs(stage.specs)
                )
                for tensor in torch_adaptor.tensors(state).values():
                    tensor.zero_()
                state.seal()
            for each in filled:
                each.result()

    def _fill_and_seal(self, stage: Stage, seed: int, params: StagedShard) -> None:
        self._fill(stage, seed, torch_adaptor.tensors(params))
        params.seal()

    def prepare_base(self, txn: Transaction) -> list[str]:
        """Stage what a first step on an import needs beside the import; give what there is to say.

        Nothing, where its weights are trained.
        """
        return []

    def adopting(self, txn: ShardTransaction) -> ShardTransaction:
        """Give a transaction on an import the form of this run: masters, and state that is zero."""
        specs = {}
        for stage in self.stages:
            form = self.options.master_weight_dtype
            specs[f"params/{stage.name}"] = stored_specs(stage.specs, form)
            specs[f"optim/{stage.name}"] = self._model.optimizer.state_specs(stage.specs)
        return AdoptingTransaction(txn, specs)

    def _fill(self, stage: Stage, seed: int, tensors: Mapping[str, Tensor]) -> None:
        """Write first values; where weights are not fp32, rounded to nearest from fp32."""
        if self.options.master_weight_dtype == "fp32":
            fill_initial(stage, seed, tensors)
            return
        exact = {name: torch.empty(t.shape) for name, t in tensors.items()}
        fill_initial(stage, seed, exact)
        for name, tensor in tensors.items():
            tensor.copy_(exact[name])

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
        """Stage the next version of every shard; the caller commits.

        micro_batches: integer rows [B, T + 1] each; step: number of the new step, from 1;
        loss_scale: a power of two, for fp16; grad_norm_scale: lowers the norm of clipping;
        next_rows: gives the micro-batches of the step after this one, if there will be one: its
        forward pass may run while this one is committed. That step is to be given the same list.

        Raises:
            InputError: a batch does not fit the model, or has no label that counts.
            NonFiniteError: the loss or a gradient is not finite.
            GradientOverflowError: a gradient is not finite, and the loss was scaled.
        """
        order = StepOrder(
            step=step,
            learning_rate=learning_rate,
            loss_scale=loss_scale,
            grad_norm_scale=grad_norm_scale,
        )
        if self.pipeline is not None:
            found = self._through_pipeline(txn, order, micro_batches, next_rows)
            if found is not None:
                return found
        return TrainStep(self._model, txn, order).run(self._tokens(micro_batches))

    def _through_pipeline(
        self,
        txn: ShardTransaction,
        order: StepOrder,
        micro_batches: Sequence[Rows],
        next_rows: NextRows | None,
    ) -> StepResult | None:
        """Take a step through the pipeline; None where the plain way has to do it.

        The plain way also does again what came out not finite: it knows the words for it.
        """
        assert self.pipeline is not None
        if order.loss_scale != 1.0 or self.options.normaliser.is_due(order.step):
            return None
        if self._course is None:
            self._course = PipelineCourse(self.pipeline, self._tokens)
        if self.options.normaliser.is_due(order.step + 1):
            next_rows = None
        return self._course.train(txn, order, micro_batches, next_rows)

    def discard_step(self, txn: ShardTransaction) -> None:
        """Drop what a step staged, so that the same transaction can try again."""
        for stage in self.stages:
            for kind in ("params", "optim"):
                txn.discard(f"{kind}/{stage.name}")

    def find_non_finite(
        self, reader: ShardReader, micro_batches: Sequence[Rows]
    ) -> NonFiniteError | None:
        """Take the gradients in fp32, without a loss scale; give the error that names a bad one.

        None when all are finite: then only the range of the compute dtype was too small.
        """
        model = replace(self._model, options=replace(self.options, dtype="fp32"))
        clock = StepClock()
        window = ShardWindow(
            reader,
            model.gradient_order(),
            prefetch=prefetch_of(self.options, self.device),
            clock=clock,
        )
        try:
            with window:
                for _ in GradientPass(model, window, model.compute(clock)).run(
                    self._tokens(micro_batches)
                ):
                    pass
        except NonFiniteError as error:
            return error
        return None

    def _tokens(self, micro_batches: Sequence[Rows], device: Device | None = None) -> list[Tokens]:
        device = device or self.device
        batches = [Tokens.from_rows(rows, self.config, device) for rows in micro_batches]
        if not sum(batch.valid_count for batch in batches):
            raise InputError(
                "no label of this step counts in the loss: every one is -100. Mend the rows, or"
                " pass over them with --skip-batches 1"
            )
        return batches

    def evaluate(self, reader: ShardReader, batches: Iterable[Rows]) -> EvalResult:
        """Give the mean loss over the valid tokens of rows [B, T + 1]."""
        tokens = (Tokens.from_rows(rows, self.config, self.device) for rows in batches)
        return self._evaluator().evaluate(reader, tokens)

    def logits(self, reader: ShardReader, ids: Tensor, *, last_only: bool = False) -> Tensor:
        """Score ids [B, T]: [B, T, V] in the compute dtype, or [B, 1, V] with `last_only`."""
        check_length(ids.shape[1], self.config)
        return self._evaluator().logits(
            reader, ids.to(self.device.torch_device), last_only=last_only
        )

    def _evaluator(self) -> Evaluator:
        return Evaluator(
            trunk=self._model.trunk,
            head=self._model.head,
            compute=self._model.compute(StepClock()),
            chunk_tokens=self.options.lm_head_chunk_tokens,
            prefetch=prefetch_of(self.options, self.device),
        )
