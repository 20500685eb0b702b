"""What a run was asked to do: the `Recipe` that decides its bits and the `Settings` that do not.

Owns both records, their checks, their JSON and the recipe's digest. Knows nothing of flags, stores
or files. Invariants: two runs with equal recipes make equal shards at every step on one machine, so
nothing that depends on a path, a clock or a stopping point is in a recipe; everything that can
change a bit is. The settings travel in the state of each commit, the recipe in the shard
`meta/recipe`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import xxhash

from trainer.errors import InputError
from trainer.model.adapter_settings import QUANTS, LoraSettings
from trainer.model.config import ModelConfig
from trainer.model.stored import canonical_json
from trainer.schedule import SHAPES, Schedule

FORMAT = 1
PLACE_FIELDS = frozenset(("optimizer_device", "optimizer_host_stages"))
LORA_FIELDS = frozenset("lora_rank lora_alpha lora_targets lora_dropout base_quant".split())
CHOICES: dict[str, tuple[str, ...]] = {
    "dtype": ("fp32", "bf16", "fp16"),
    "master_weight_dtype": ("fp32", "bf16"),
    "optimizer": ("adamw", "lion", "adafactor"),
    # `auto` is what a plan makes one of the others of: no stored recipe has it.
    "optimizer_device": ("auto", "gpu", "cpu", "split"),
    "optimizer_state_dtype": ("fp32", "bf16", "int8"),
    "data_dtype": ("npy", "uint16", "uint32"),
    "row_order": ("shuffled", "sequential"),
    "weight_decay_scope": ("all", "matrices"),
    "grad_clip_mode": ("global", "shard", "none"),
    "guard_replay_on_exhaust": ("accept", "skip"),
    "lr_schedule": SHAPES,
    "prefetch_shards": ("off", "cpu", "gpu", "secondary-gpu"),
    "activations": ("auto", "keep", "attention", "recompute"),
    "device_pipeline": ("auto", "on", "off"),
    "gradient_placement": ("vram", "host", "recompute"),
    "base_quant": QUANTS,
    "base_tier": ("auto", "ram", "disk"),
    "disk_kind": ("auto", "nvme", "ssd", "rotating"),
    "activation_placement": ("auto", "vram", "host", "spill"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything that decides the bytes of a run's shards."""

    model: ModelConfig
    data_digest: str
    seq_len: int
    seed: int
    device: str
    threads: int
    dtype: str = "fp32"
    compile_blocks: bool = False
    master_weight_dtype: str = "fp32"
    micro_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    shuffle_train: bool = True
    row_order: str = "shuffled"
    shuffle_buffer_size: int = 0
    optimizer: str = "adamw"
    optimizer_state_dtype: str = "fp32"
    optimizer_device: str = "gpu"
    optimizer_host_stages: tuple[str, ...] = ()
    learning_rate: float = 3e-4
    weight_decay: float = 0.05
    weight_decay_scope: str = "all"
    beta1: float = 0.9
    beta2: float = 0.95
    adam_eps: float = 1e-8
    max_grad_norm: float = 1.0
    grad_clip_mode: str = "global"
    lr_schedule: str = "constant"
    warmup_tokens: int = 0
    decay_tokens: int = 0
    min_lr_ratio: float = 0.1
    lm_head_chunk_tokens: int = 4096
    loss_scale: float = 65536.0
    loss_scale_growth_steps: int = 2000
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
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_targets: tuple[str, ...] = ("q_proj", "v_proj")
    lora_dropout: float = 0.0
    base_quant: str = "none"
    records_apart: bool = False

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_numbers(self)
        _check_scales(self)
        _check_adapters(self)
        if math.frexp(self.loss_scale)[0] != 0.5:
            raise InputError(
                f"--loss-scale is {self.loss_scale:g}: give a power of two, so that taking it out"
                " of a gradient changes no bit"
            )
        if self.seq_len > self.model.max_position_embeddings:
            raise InputError(
                f"the rows hold {self.seq_len} tokens (--seq-len), more than"
                f" --max-position-embeddings {self.model.max_position_embeddings}:"
                " raise it, or prepare shorter rows"
            )
        if self.micro_batch_size * self.seq_len > MICRO_BATCH_TOKENS_MAX:
            raise InputError(
                f"--micro-batch-size {self.micro_batch_size} of rows of {self.seq_len} tokens is"
                f" {self.micro_batch_size * self.seq_len:,} tokens at once: give at most"
                f" {MICRO_BATCH_TOKENS_MAX // self.seq_len}"
            )
        if self.lr_schedule in ("linear", "cosine") and self.decay_tokens == 0:
            raise InputError(
                f"--lr-schedule {self.lr_schedule} needs --decay-tokens: over how many tokens the"
                " rate falls (--max-steps is only a stop and never a schedule's horizon)"
            )

    @property
    def rows_per_step(self) -> int:
        """Rows that one step consumes, over all its micro-batches."""
        return self.micro_batch_size * self.gradient_accumulation_steps

    @property
    def schedule(self) -> Schedule:
        """The learning rate over tokens."""
        return Schedule(
            shape=self.lr_schedule,
            peak=self.learning_rate,
            warmup_tokens=self.warmup_tokens,
            decay_tokens=self.decay_tokens,
            min_lr_ratio=self.min_lr_ratio,
        )

    @property
    def lora(self) -> LoraSettings | None:
        """What adapters there are beside a frozen base; None where the weights are trained."""
        if not self.lora_rank:
            return None
        return LoraSettings(
            rank=self.lora_rank,
            alpha=self.lora_alpha,
            targets=self.lora_targets,
            base_quant=self.base_quant,
            dropout=self.lora_dropout,
        )

    @property
    def digest(self) -> str:
        """xxh3-128 of the canonical JSON, in hex."""
        return xxhash.xxh3_128_hexdigest(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Give canonical JSON: sorted keys, no spaces, so that equal recipes are equal bytes.

        Without adapters their fields are left out, and so is what rows without records do not need:
        recipes from before keep their bytes.
        """
        values = _plain(self) | {"model": self.model.to_json(), "format": FORMAT}
        if not self.lora_rank:
            values = {k: v for k, v in values.items() if k not in LORA_FIELDS}
        if self.optimizer_device == "gpu":  # left out for the same reason
            values = {k: v for k, v in values.items() if k not in PLACE_FIELDS}
        if not self.records_apart:
            del values["records_apart"]
        if not self.shuffle_buffer_size:
            del values["shuffle_buffer_size"]
        return canonical_json(values)

    @classmethod
    def from_bytes(cls, data: bytes) -> Recipe:
        """Read what `to_bytes` wrote; InputError when a newer version wrote it."""
        values = json.loads(data)
        if values.pop("format") != FORMAT:
            raise InputError("this run's recipe was written by a newer version: update to read it")
        model = ModelConfig.from_json(values.pop("model"))
        _refuse_unknown(cls, values, extra=("model",))
        # JSON has no tuples.
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(model=model, **values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How a run is carried out: where its data lies, when it stops, what is measured and kept."""

    data_dir: str
    val_data_dir: str | None = None
    data_dtype: str = "npy"
    preset: str | None = None
    active: str | None = None
    active_copies: int = 3
    durable_every: int = 0
    max_steps: int | None = None
    max_skipped_steps: int = 20
    validate_every: int = 100
    max_validation_batches: int = 50
    validation_whole_batches: bool = False
    snapshot_every: int = 0
    snapshot_best: bool = False
    prefetch_shards: str = "off"
    prefetch_window: int = 1
    prefetch_optimizer_shards: bool = True
    activations: str = "auto"
    activation_placement: str = "auto"
    vram_budget: str | None = None
    device_pipeline: str = "auto"
    gradient_placement: str = "vram"
    pinned_budget: str | None = None
    async_shard_writes: bool = True
    max_pending_shard_writes: int = 4
    timing_sync_cuda: bool = False
    poison_buffers: bool = False
    base_tier: str = "auto"
    disk_kind: str = "auto"
    tensorboard: str | None = None

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_numbers(self)

    def to_json(self) -> dict[str, Any]:
        """Give a plain dictionary, for the state of a commit."""
        return _plain(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Settings:
        """Read what `to_json` gave."""
        _refuse_unknown(cls, values)
        return cls(**values)


def flag_of(field: str) -> str:
    """Name the flag that sets a field: `rope_theta` is `--rope-theta`."""
    return "--" + field.replace("_", "-")


# Tokens of a micro-batch, far below where the size of a tensor in it would overflow.
MICRO_BATCH_TOKENS_MAX = 2**31
# Lowest and highest allowed value; a third element True excludes the lowest itself.
_LIMITS: dict[str, tuple[float, float, bool]] = {
    "seq_len": (1, 2**20, False),
    "seed": (0, 2**63 - 1, False),
    "threads": (1, 4096, False),
    "micro_batch_size": (1, 2**20, False),
    "gradient_accumulation_steps": (1, 2**20, False),
    "shuffle_buffer_size": (0, 2**31, False),
    "learning_rate": (0.0, 100.0, True),
    "weight_decay": (0.0, 100.0, False),
    "adam_eps": (0.0, 1.0, True),
    "max_grad_norm": (0.0, math.inf, True),
    "warmup_tokens": (0, 2**63 - 1, False),
    "decay_tokens": (0, 2**63 - 1, False),
    "min_lr_ratio": (0.0, 1.0, False),
    "lm_head_chunk_tokens": (1, 2**31, False),
    "loss_scale": (1.0, 2.0**24, False),
    "loss_scale_growth_steps": (1, 2**53, False),
    "global_optimizer_every": (0, 2**53, False),
    "global_optimizer_blend": (0.0, 1.0, False),
    "global_optimizer_min_scale": (0.0, 1.0, True),
    "global_optimizer_max_scale": (1.0, 2.0**32, False),
    "guard_replay_max_replays": (0, 1024, False),
    "guard_replay_loss_tolerance": (0.0, math.inf, False),
    "guard_replay_loss_tolerance_ratio": (0.0, math.inf, False),
    "lora_rank": (0, 2**16, False),
    "lora_alpha": (0.0, math.inf, True),
    "active_copies": (2, 64, False),
    "durable_every": (0, 2**53, False),
    "max_steps": (0, 2**53, False),
    "max_skipped_steps": (1, 2**53, False),
    "validate_every": (0, 2**53, False),
    "max_validation_batches": (1, 2**53, False),
    "snapshot_every": (0, 2**53, False),
    "prefetch_window": (1, 2**20, False),
    "max_pending_shard_writes": (1, 4096, False),
}


def _check_choices(record: Recipe | Settings) -> None:
    for field in fields(record):
        allowed = CHOICES.get(field.name)
        value = getattr(record, field.name)
        if allowed is not None and value not in allowed:
            raise InputError(
                f"{flag_of(field.name)} is {value!r}: choose from {', '.join(allowed)}"
            )


def _check_numbers(record: Recipe | Settings) -> None:
    for field in fields(record):
        value = getattr(record, field.name)
        if value is None:
            continue
        if field.name in ("beta1", "beta2") and not 0.0 <= value < 1.0:
            raise InputError(f"{flag_of(field.name)} is {value}: it must be at least 0 and below 1")
        if field.name in _LIMITS:
            _check_limits(field.name, value)


def _check_limits(name: str, value: float) -> None:
    lowest, highest, lowest_excluded = _LIMITS[name]
    below = value <= lowest if lowest_excluded else value < lowest
    if below or value > highest or math.isnan(value):
        least = f"above {lowest:g}" if lowest_excluded else f"at least {lowest:g}"
        most = "" if math.isinf(highest) else f" and at most {_limit_text(highest)}"
        raise InputError(f"{flag_of(name)} is {value}: it must be {least}{most}")


def _limit_text(limit: float) -> str:
    """A limit as one would type it: whole numbers with every digit."""
    return str(limit) if isinstance(limit, int) else f"{limit:g}"


def _check_scales(recipe: Recipe) -> None:
    for name in ("guard_replay_lr_scales", "guard_replay_grad_norm_scales"):
        scales = getattr(recipe, name)
        if not scales or not all(0.0 < scale < math.inf for scale in scales):
            raise InputError(
                f"{flag_of(name)} is {','.join(map(str, scales)) or 'empty'}: give numbers above 0"
                " with commas between them, the first attempt's first"
            )


def _check_adapters(recipe: Recipe) -> None:
    if recipe.lora is not None and recipe.optimizer_device not in ("auto", "gpu"):
        raise InputError(
            f"--optimizer-device {recipe.optimizer_device}: adapters are updated where the step"
            " computes: leave it out"
        )
    if recipe.lora is not None and recipe.master_weight_dtype != "fp32":
        raise InputError("--master-weight-dtype: adapters are kept in fp32: leave it out")
    if recipe.lora is None and recipe.base_quant != "none":
        raise InputError(
            f"--base-quant {recipe.base_quant} is for a frozen base: give --lora-rank too"
        )


def _plain(record: Recipe | Settings) -> dict[str, Any]:
    return {f.name: getattr(record, f.name) for f in fields(record) if f.name != "model"}


def _refuse_unknown(
    record: type[Recipe] | type[Settings], values: Mapping[str, Any], extra: tuple[str, ...] = ()
) -> None:
    unknown = set(values) - {field.name for field in fields(record)} - set(extra)
    if unknown:
        raise InputError(
            f"this run was written by a newer version: {record.__name__.lower()} has"
            f" {', '.join(sorted(unknown))}, which this version does not know"
        )
