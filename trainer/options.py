"""How the engine trains: every setting that changes a step's arithmetic or its course.

Owns the settings' rules. Knows nothing of models, data or stores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from trainer.errors import InputError
from trainer.guard_policy import GuardPolicy
from trainer.normaliser import NormaliserSettings
from trainer.optimizers.adafactor import Adafactor
from trainer.optimizers.adamw import AdamW
from trainer.optimizers.bf16_masters import Bf16Masters
from trainer.optimizers.encoded_adamw import EncodedAdamW
from trainer.optimizers.lion import Lion
from trainer.optimizers.rule import UpdateRule

_CHOICES = {
    "dtype": ("fp32", "bf16", "fp16"),
    "master_weight_dtype": ("fp32", "bf16"),
    "optimizer": ("adamw", "lion", "adafactor"),
    "optimizer_device": ("gpu", "cpu", "split"),
    "optimizer_state_dtype": ("fp32", "bf16", "int8"),
    "grad_clip_mode": ("global", "shard", "none"),
    "weight_decay_scope": ("all", "matrices"),
    "prefetch": ("off", "cpu", "gpu", "secondary-gpu"),
    "activations": ("recompute", "attention", "keep"),
    "activation_placement": ("vram", "host", "spill"),
}
_TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Settings of a training step.

    dtype: of compute; updates are fp32 always.
    compile_blocks: run blocks through `trainer.model.compiled`, which rounds otherwise.
    master_weight_dtype: of stored parameters; `bf16` is inexact, see `Bf16Masters`, which `seed`
        is for.
    optimizer: `adamw`, `lion` or `adafactor` (which has no use for beta1, beta2 and adam_eps).
    optimizer_state_dtype: of stored AdamW state; all but `fp32` are inexact, see `EncodedAdamW`.
    optimizer_device: `gpu` updates where the step computes, `cpu` on the processor, `split` so for
        the stages of `optimizer_host_stages`. A GPU rounds otherwise than a processor.
    grad_clip_mode: `global` (one norm over the model, exact), `shard` (one each), `none`.
    lm_head_chunk_tokens: tokens whose logits exist at once.
    records_apart: rows may hold records that do not see each other.
    weight_decay_scope: `all` parameters, or `matrices` only (norms and biases are spared).
    prefetch: `cpu` reads the next `prefetch_window` shards in a thread while one computes; `gpu`
        and `secondary-gpu` also copy parameters there ahead.
    timing_sync_cuda: wait for the device around every timing.
    global_optimizer_*: the periodic normaliser, see `trainer.normaliser`.
    guarded_step_replay, guard_replay_*: see `trainer.guard`.
    activations: `recompute` keeps each stage's inputs and computes the stage twice; `keep` holds
        everything between forward and backward, as resident training does, and not the parameters;
        `attention` (compiled blocks with adapters) keeps what attention gave as well.
    activation_placement: where stages' inputs wait for the backward pass: `vram` is the memory of
        the device that computes, `host` host memory, `spill` a file; `keep` needs `vram`.
    pinned_budget_bytes: host memory that may be page-locked; None is no limit.

    Raises:
        InputError: a value is outside its range; the message names the flag.
    """

    seed: int = 0
    dtype: str = "fp32"
    compile_blocks: bool = False
    master_weight_dtype: str = "fp32"
    optimizer: str = "adamw"
    optimizer_state_dtype: str = "fp32"
    optimizer_device: str = "gpu"
    optimizer_host_stages: tuple[str, ...] = ()
    grad_clip_mode: str = "global"
    max_grad_norm: float = 1.0
    lm_head_chunk_tokens: int = 4096
    records_apart: bool = False
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    weight_decay: float = 0.1
    weight_decay_scope: str = "all"
    prefetch: str = "off"
    prefetch_window: int = 1
    prefetch_optimizer_shards: bool = True
    timing_sync_cuda: bool = False
    activations: str = "recompute"
    activation_placement: str = "vram"
    pinned_budget_bytes: int | None = None
    global_optimizer_every: int = 0
    global_optimizer_blend: float = 0.25
    global_optimizer_min_scale: float = 0.5
    global_optimizer_max_scale: float = 2.0
    guarded_step_replay: bool = False
    guard_replay_max_replays: int = 2
    guard_replay_loss_tolerance: float = 0.02
    guard_replay_loss_tolerance_ratio: float = 0.002
    guard_replay_lr_scales: tuple[float, ...] = (1.0, 0.5, 0.25)
    guard_replay_grad_norm_scales: tuple[float, ...] = (1.0, 0.75, 0.5)
    guard_replay_on_exhaust: str = "accept"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            _require(value in choices, name, value, f"choose one of {', '.join(choices)}")
        _require(
            self.optimizer == "adamw" or self.optimizer_state_dtype == "fp32",
            "optimizer_state_dtype",
            self.optimizer_state_dtype,
            f"it is for adamw; with --optimizer {self.optimizer} give fp32",
        )
        _require(
            self.activations != "keep" or self.activation_placement == "vram",
            "activation_placement",
            self.activation_placement,
            "activations that are kept stay where they are computed: give --activations recompute",
        )
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(0 <= value < 1, name, value, "give a value from 0 to below 1")
        for name in ("adam_eps", "max_grad_norm"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value > 0, name, value, "give more than 0")
        decay = self.weight_decay
        _require(math.isfinite(decay) and decay >= 0, "weight_decay", decay, "give 0 or more")
        for name in ("lm_head_chunk_tokens", "prefetch_window"):
            value = getattr(self, name)
            _require(value >= 1, name, value, "give 1 or more")

    @property
    def torch_dtype(self) -> torch.dtype:
        """Give the compute dtype."""
        return _TORCH_DTYPES[self.dtype]

    @property
    def normaliser(self) -> NormaliserSettings:
        """Give the settings of the periodic normaliser."""
        return NormaliserSettings(
            every=self.global_optimizer_every,
            blend=self.global_optimizer_blend,
            min_scale=self.global_optimizer_min_scale,
            max_scale=self.global_optimizer_max_scale,
        )

    @property
    def guard(self) -> GuardPolicy | None:
        """Give what decides whether a step is accepted; None when every step is."""
        if not self.guarded_step_replay:
            return None
        return GuardPolicy(
            attempts_max=1 + self.guard_replay_max_replays,
            tolerance=self.guard_replay_loss_tolerance,
            tolerance_ratio=self.guard_replay_loss_tolerance_ratio,
            learning_rate_scales=self.guard_replay_lr_scales,
            grad_norm_scales=self.guard_replay_grad_norm_scales,
            on_exhaust=self.guard_replay_on_exhaust,
        )

    def updates_on_host(self, stage: str) -> bool:
        """Say whether a stage is updated on the processor, beside the device."""
        if self.optimizer_device == "split":
            return stage in self.optimizer_host_stages
        return self.optimizer_device == "cpu"

    def update_rule(self) -> UpdateRule:
        """Give the update rule."""
        rule = self._rule_of_fp32_weights()
        if self.master_weight_dtype == "fp32":
            return rule
        return Bf16Masters(inner=rule, seed=self.seed)

    def _rule_of_fp32_weights(self) -> UpdateRule:
        matrices_only = self.weight_decay_scope == "matrices"
        if self.optimizer == "lion":
            return Lion(
                beta1=self.beta1,
                beta2=self.beta2,
                weight_decay=self.weight_decay,
                decay_matrices_only=matrices_only,
            )
        if self.optimizer == "adafactor":
            return Adafactor(weight_decay=self.weight_decay, decay_matrices_only=matrices_only)
        adamw = AdamW(
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.adam_eps,
            weight_decay=self.weight_decay,
            decay_matrices_only=matrices_only,
        )
        if self.optimizer_state_dtype == "fp32":
            return adamw
        return EncodedAdamW(inner=adamw, encoding=self.optimizer_state_dtype)


def _require(holds: bool, name: str, value: object, remedy: str) -> None:
    if not holds:
        raise InputError(f"--{name.replace('_', '-')} is {value}: {remedy}")
