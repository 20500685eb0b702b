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
    REFUSED = "Called otherwise here (refused)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One option of the command line; `field` is also the name of the recipe's or model's field."""

    field: str
    kind: type
    scope: Scope
    help: str
    also: tuple[str, ...] = ()
    spelled: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The spellings that typer takes; a boolean has a `--no-` form."""
        name = self.spelled or "--" + self.field.replace("_", "-")
        if self.kind is bool and self.scope is not Scope.COMMAND:
            return (f"{name}/--no-{name[2:]}", *self.also)
        return (name, *self.also)


def _flags(scope: Scope, *rows: tuple[str, type, str]) -> tuple[Flag, ...]:
    return tuple(Flag(field=f, kind=kind, scope=scope, help=text) for f, kind, text in rows)


_COMMAND = _flags(
    Scope.COMMAND,
    ("store", str, "The run's store, made if it does not exist; holds the step log in logs/."),
    ("dry_run", bool, "Print model, parameter count, shards and budgets, and stop."),
    ("fit", bool, "Measure this machine, choose how a step spends memory, forecast its speed."),
    ("trace", str, "Write the lanes of the first 20 steps made now to this file, for Perfetto."),
    ("json", bool, "With --dry-run: print the same as JSON."),
    ("allow_network", bool, "Use a network file system: only one machine may ever open the store."),
    ("accept_changed_data", bool, "Go on although the training data is not what the run began on."),
    ("accept_other_tokenizer", bool, "Begin on rows of another tokenizer than the import's."),
    ("branch", str, "Train on this branch of the store. Default: main."),
    ("skip_batches", int, "Pass over the next N steps' rows, once: at the first step made now."),
)
_FROM = Flag(
    field="from_ref",
    kind=str,
    scope=Scope.COMMAND,
    help="With --branch: begin that branch at this step, snapshot, branch or commit.",
    spelled="--from",
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
    ("rope_scaling_type", str, "Rotary scaling for longer sequences: none, linear or llama3."),
    ("rope_scaling_factor", float, "How much longer sequences get; slow rotations slow by it."),
    ("rope_scaling_low_freq_factor", float, "llama3: waves longer than original/this are scaled."),
    ("rope_scaling_high_freq_factor", float, "llama3: waves shorter than original/this stay."),
    ("rope_scaling_original_max_position_embeddings", int, "llama3: first trained length."),
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
    ("lora_rank", int, "Train adapters of this rank beside an imported, frozen base; 0: none."),
    ("lora_alpha", float, "Adapters count alpha / rank times. Default: 16."),
    ("lora_targets", str, "Modules with adapters, or all-linear. Default: q_proj,v_proj."),
    ("lora_dropout", float, "Part of an adapter's input that is dropped in training. Default: 0."),
    ("base_quant", str, "Form of the frozen base: none (as imported) or nf4. Default: none."),
)
_TRAINING = _flags(
    Scope.TRAINING,
    ("device", str, "cpu, cuda or auto. Default: auto."),
    ("threads", int, "Threads of the CPU; stored, because sums depend on it. Default: all cores."),
    ("dtype", str, "Compute in fp32, bf16 or fp16."),
    ("compile_blocks", bool, "Compile the blocks; stored, because sums depend on it. On for CUDA."),
    ("master_weight_dtype", str, "Stored weights: fp32 or bf16 (inexact); fixed at the begin."),
    ("micro_batch_size", int, "Rows that pass the model at once."),
    ("gradient_accumulation_steps", int, "Micro-batches a step."),
    ("shuffle_train", bool, "Shuffle the rows; the order depends on --seed alone."),
    ("row_order", str, "Of a shuffled file: shuffled rows, or sequential (whole files shuffled)."),
    ("shuffle_buffer_size", int, "Rows shuffled together with --row-order sequential; 0: none."),
    ("optimizer", str, "adamw, lion or adafactor; fixed at the begin."),
    ("optimizer_state_dtype", str, "AdamW's state: fp32, or bf16, int8 (inexact); fixed as well."),
    ("optimizer_device", str, "Updates: gpu (where steps compute), cpu, split; auto measures."),
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
    ("loss_scale", float, "First loss scale of fp16, a power of two; it adapts itself from there."),
    ("loss_scale_growth_steps", int, "Steps without an overflow after which it is doubled."),
    ("global_optimizer_every", int, "Even out the shards' gradients every N steps; 0: never."),
    ("global_optimizer_blend", float, "How much of the evening out is applied, 0 to 1."),
    ("global_optimizer_min_scale", float, "Least factor for a shard's gradients."),
    ("global_optimizer_max_scale", float, "Largest factor for a shard's gradients."),
    ("guarded_step_replay", bool, "Try each step on its own batch before it is committed."),
    ("guard_replay_max_replays", int, "Attempts after the first one."),
    ("guard_replay_loss_tolerance", float, "Rise of the batch's loss that is let through."),
    ("guard_replay_loss_tolerance_ratio", float, "The same, as a part of the loss."),
    ("guard_replay_lr_scales", str, "Factors of the learning rate, attempt by attempt."),
    ("guard_replay_grad_norm_scales", str, "Factors of --max-grad-norm, attempt by attempt."),
    ("guard_replay_on_exhaust", str, "accept the last attempt when all fail, or skip the step."),
)
_SETTING = (
    *_flags(
        Scope.SETTING,
        ("data_dir", str, "Folder of token rows (.npy) to train on."),
        ("data_dtype", str, "npy, or uint16, uint32: raw .bin files, cut into rows of --seq-len."),
        ("val_data_dir", str, "Folder of held-out token rows; without it, or off: no validation."),
        ("max_steps", int, "Stop at this step: a stop only, never a schedule's horizon."),
        ("max_skipped_steps", int, "Stop when so many steps in a row were skipped."),
        ("validate_every", int, "Validate at every N-th step, and at the last; 0: never."),
        ("max_validation_batches", int, "Batches of one validation."),
        ("validation_whole_batches", bool, "Leave a last batch with fewer rows out."),
        ("snapshot_best", bool, "Pin best-step-N at the lowest validation loss so far."),
        ("active_copies", int, "Copies of all shards that the active store holds at most."),
        ("prefetch_shards", str, "off; cpu: read coming shards ahead; gpu, secondary-gpu: there."),
        ("prefetch_window", int, "Shards that are read ahead at most."),
        ("prefetch_optimizer_shards", bool, "Read optimizer shards ahead too."),
        ("activations", str, "Kept for the way back: keep (all), attention, recompute, or auto."),
        ("activation_placement", str, "What waits for the backward pass: vram, host, spill, auto."),
        ("vram_budget", str, "Device memory to fill (8GiB), or with --fit to fit into; or off."),
        ("device_pipeline", str, "Copy, compute and update at once: on, off, or auto: on a GPU."),
        ("gradient_placement", str, "Where gradients await the norm: vram, host or recompute."),
        ("pinned_budget", str, "Host memory that may be page-locked: 16GiB, or off: nine tenths."),
        ("async_shard_writes", bool, "Write shards in the background of the step."),
        ("max_pending_shard_writes", int, "Shards that may wait to be written."),
        ("timing_sync_cuda", bool, "Wait for the GPU around each timing: for diagnosis, slower."),
        ("poison_buffers", bool, "Fill a frozen base's used buffers with NaN: for diagnosis."),
        ("base_tier", str, "A frozen base waits in ram, on disk, or auto: where there is room."),
        ("disk_kind", str, "nvme, ssd, rotating: what the store's disk is; auto: asks the kernel."),
        ("tensorboard", str, "Folder for TensorBoard's event files, or off."),
    ),
    Flag(
        field="snapshot_every",
        kind=int,
        scope=Scope.SETTING,
        help="Pin a snapshot step-N at every N-th step; 0: none (each step is durable anyway).",
        also=("--save-every",),
    ),
    Flag(
        field="active",
        kind=str,
        scope=Scope.SETTING,
        help="Folder on a RAM disk for a second store to train in, published to --store; or off.",
        also=("--active-run-dir",),
    ),
    Flag(
        field="durable_every",
        kind=int,
        scope=Scope.SETTING,
        help="Publish every N-th step of the active store; 0: snapshots, bests and the end alone.",
        also=("--durable-flush-every",),
    ),
)
_NO_EFFECT = _flags(
    Scope.NO_EFFECT,
    ("train", bool, "Training is what this command does."),
    ("init_shards", bool, "A run that does not exist is begun."),
    ("max_resident_shards", int, "One shard is resident, with prefetch --prefetch-window more."),
    ("clear_cuda_cache_between_shards", bool, "No cache is cleared."),
    ("shard_log_every", int, "Shards are listed by `shardb show`."),
    ("trainer_state_every", int, "The state is in every commit."),
    ("shard_storage_format", str, "Shards are always safetensors."),
)
_RUN_DIR = Flag(
    field="run_dir",
    kind=str,
    scope=Scope.REFUSED,
    help="It is called --store here.",
)

FLAGS: tuple[Flag, ...] = (
    *_COMMAND,
    _FROM,
    *_FIXED,
    *_MODEL,
    *_TRAINING,
    *_SETTING,
    *_NO_EFFECT,
    _RUN_DIR,
)


def fields_of(scope: Scope) -> frozenset[str]:
    """Give the fields that flags of one scope set."""
    return frozenset(flag.field for flag in FLAGS if flag.scope is scope)
