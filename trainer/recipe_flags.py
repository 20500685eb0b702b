"""The flags of `train`: one table from which the command line and its help are made.

Owns names, types, grouping and help texts. Knows nothing of defaults, which are the recipe's, nor
of what a flag does. Invariant: a flag that parses is applied, refused, or answered with a note;
none is silently ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Scope(StrEnum):
    """What a flag may change, and when."""

    COMMAND = "This command"
    MODEL = "Model (fixed when the run begins; without --preset the sizes are needed)"
    FIXED = "Fixed when the run begins"
    TRAINING = "Training (a change on resume is applied, printed and recorded)"
    SETTING = "Running (never changes a bit of the result)"
    NO_EFFECT = "Accepted for older command lines, without effect here"
    NOT_YET = "Not available yet (refused)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One option of the command line; `field` is also the name of the recipe's or model's field."""

    field: str
    kind: type
    scope: Scope
    help: str
    also: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The spellings that typer takes; a boolean has a `--no-` form."""
        name = "--" + self.field.replace("_", "-")
        if self.kind is bool and self.scope is not Scope.COMMAND:
            return (f"{name}/--no-{name[2:]}", *self.also)
        return (name, *self.also)


def _flags(scope: Scope, *rows: tuple[str, type, str]) -> tuple[Flag, ...]:
    return tuple(Flag(field=f, kind=kind, scope=scope, help=text) for f, kind, text in rows)


_COMMAND = _flags(
    Scope.COMMAND,
    ("store", str, "The run's store, made if it does not exist; holds the step log in logs/."),
    ("dry_run", bool, "Print model, parameter count, shards and budgets, and stop."),
    ("json", bool, "With --dry-run: print the same as JSON."),
    ("allow_network", bool, "Use a network file system: only one machine may ever open the store."),
    ("accept_changed_data", bool, "Go on although the training data is not what the run began on."),
)
_MODEL = _flags(
    Scope.MODEL,
    ("vocab_size", int, "Entries of the vocabulary."),
    ("hidden_size", int, "Width of the model."),
    ("num_layers", int, "Decoder blocks."),
    ("num_heads", int, "Attention heads."),
    ("num_kv_heads", int, "Key and value heads; --num-heads if not given."),
    ("intermediate_size", int, "Width of the feed-forward layer."),
    ("head_dim", int, "Width of a head; --hidden-size / --num-heads if not given."),
    ("max_position_embeddings", int, "Longest sequence that the model is made for."),
    ("rope_theta", float, "Base of the rotary positions."),
    ("rms_norm_eps", float, "Epsilon of the norms."),
    ("initializer_range", float, "Standard deviation of the initial weights."),
    ("tied_embeddings", bool, "Use the embeddings as the head."),
    ("attention_bias", bool, "Biases in the attention projections."),
    ("attention_output_bias", bool, "A bias in the attention's output projection."),
    ("qk_norm", bool, "Norms on queries and keys."),
    ("pad_token_id", int, "Id of padding; the data's document end if not given."),
    ("bos_token_id", int, "Id of a text's begin; the data's document end if not given."),
    ("eos_token_id", int, "Id of a text's end; the data's document end if not given."),
    ("dropout", float, "Must be 0: recomputed activations have to be the same twice."),
)
_FIXED = _flags(
    Scope.FIXED,
    ("preset", str, "A named model; the flags below change its fields."),
    ("seed", int, "Decides the initial weights and the order of the data. Default: 0."),
    ("seq_len", int, "Tokens a row; checked against the data, which decides it."),
)
_TRAINING = _flags(
    Scope.TRAINING,
    ("device", str, "cpu, cuda or auto. Default: auto."),
    ("threads", int, "Threads of the CPU; stored, because sums depend on it. Default: all cores."),
    ("dtype", str, "Compute in fp32 or bf16."),
    ("master_weight_dtype", str, "Stored weights: fp32."),
    ("micro_batch_size", int, "Rows that pass the model at once."),
    ("gradient_accumulation_steps", int, "Micro-batches a step."),
    ("shuffle_train", bool, "Shuffle the rows; the order depends on --seed alone."),
    ("optimizer", str, "adamw, lion or adafactor."),
    ("learning_rate", float, "Peak of the schedule."),
    ("weight_decay", float, "Decoupled decay a unit of learning rate."),
    ("weight_decay_scope", str, "all parameters, or matrices only."),
    ("beta1", float, "Decay of the first moment."),
    ("beta2", float, "Decay of the second moment."),
    ("adam_eps", float, "Epsilon of AdamW."),
    ("max_grad_norm", float, "Norm to which gradients are clipped."),
    ("grad_clip_mode", str, "global (one norm of the whole model), shard, or none."),
    ("lr_schedule", str, "constant, tokens (linear by tokens), linear or cosine."),
    ("warmup_tokens", int, "Tokens of the linear warm-up."),
    ("decay_tokens", int, "Tokens, after the warm-up, over which the rate falls."),
    ("min_lr_ratio", float, "Floor of the rate, as a part of the peak."),
    ("lm_head_chunk_tokens", int, "Tokens whose logits are in memory at once."),
)
_SETTING = (
    *_flags(
        Scope.SETTING,
        ("data_dir", str, "Folder of token rows (.npy) to train on."),
        ("val_data_dir", str, "Folder of held-out token rows; without it nothing is validated."),
        ("max_steps", int, "Stop at this step: a stop only, never a schedule's horizon."),
        ("validate_every", int, "Validate at every N-th step, and at the last; 0: never."),
        ("max_validation_batches", int, "Batches of one validation."),
        ("prefetch_shards", str, "off, or cpu: read the next shard while this one computes."),
        ("activations", str, "keep them for the backward pass, recompute, or auto: what fits."),
        ("async_shard_writes", bool, "Write shards in the background of the step."),
        ("max_pending_shard_writes", int, "Shards that may wait to be written."),
    ),
    Flag(
        field="snapshot_every",
        kind=int,
        scope=Scope.SETTING,
        help="Pin a snapshot step-N at every N-th step; 0: none (each step is durable anyway).",
        also=("--save-every",),
    ),
)
_NO_EFFECT = _flags(
    Scope.NO_EFFECT,
    ("train", bool, "Training is what this command does."),
    ("init_shards", bool, "A run that does not exist is begun."),
    ("max_resident_shards", int, "One shard is resident, two with prefetch."),
    ("prefetch_window", int, "The next shard is prefetched."),
    ("prefetch_optimizer_shards", bool, "Prefetch takes both shards of a stage."),
    ("clear_cuda_cache_between_shards", bool, "No cache is cleared."),
    ("shard_log_every", int, "Shards are listed by `shardb show`."),
    ("trainer_state_every", int, "The state is in every commit."),
)
_NOT_YET = _flags(
    Scope.NOT_YET,
    ("active_run_dir", str, "A second store in memory."),
    ("durable_flush_every", int, "Publishing from a store in memory."),
    ("global_optimizer_every", int, "Periodic normaliser."),
    ("global_optimizer_blend", float, "Periodic normaliser."),
    ("global_optimizer_min_scale", float, "Periodic normaliser."),
    ("global_optimizer_max_scale", float, "Periodic normaliser."),
    ("guarded_step_replay", bool, "Try a step on its own batch before it is committed."),
    ("guard_replay_max_replays", int, "Guarded replay."),
    ("guard_replay_loss_tolerance", float, "Guarded replay."),
    ("guard_replay_loss_tolerance_ratio", float, "Guarded replay."),
    ("guard_replay_lr_scales", str, "Guarded replay."),
    ("guard_replay_grad_norm_scales", str, "Guarded replay."),
    ("guard_replay_on_exhaust", str, "Guarded replay."),
    ("timing_sync_cuda", bool, "Synchronised timings."),
)
_RUN_DIR = Flag(
    field="run_dir",
    kind=str,
    scope=Scope.NOT_YET,
    help="It is called --store here.",
)
_STORAGE_FORMAT = Flag(
    field="shard_storage_format",
    kind=str,
    scope=Scope.NO_EFFECT,
    help="Shards are always safetensors; torch is refused.",
)

FLAGS: tuple[Flag, ...] = (
    *_COMMAND,
    *_FIXED,
    *_MODEL,
    *_TRAINING,
    *_SETTING,
    *_NO_EFFECT,
    _STORAGE_FORMAT,
    *_NOT_YET,
    _RUN_DIR,
)

# Values of available flags that are planned and not built: named, so that the refusal says so.
VALUES_NOT_YET: dict[str, tuple[str, ...]] = {
    "dtype": ("fp16",),
    "master_weight_dtype": ("fp16", "bf16"),
    "prefetch_shards": ("gpu", "secondary-gpu"),
}


def fields_of(scope: Scope) -> frozenset[str]:
    """Give the fields that flags of one scope set."""
    return frozenset(flag.field for flag in FLAGS if flag.scope is scope)
