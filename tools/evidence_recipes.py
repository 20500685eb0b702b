"""The recipes of the evidence: the flags of every run, and which runs make up a part.

Owns geometries, rates, schedules and step counts. Knows nothing of processes. A scale of its own,
`tiny`, trains every part in seconds on a processor: it tries the machinery and proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Flags = Mapping[str, Any]

MAIN_STEPS = 3000
KILLED_STEPS = 300
SEED = 1
# What a run's batches, losses and weights depend on, beside model and rate.
COMMON: Flags = {
    "seed": SEED,
    "dtype": "bf16",
    "optimizer": "adamw",
    "weight-decay": 0.1,
    "weight-decay-scope": "matrices",
    "beta1": 0.9,
    "beta2": 0.95,
    "max-grad-norm": 1.0,
    "grad-clip-mode": "global",
    "lr-schedule": "cosine",
    "min-lr-ratio": 0.1,
    "micro-batch-size": 64,
    "gradient-accumulation-steps": 1,
    "lm-head-chunk-tokens": 4096,
    "max-validation-batches": 1000,
    # The mixture has no manifest that tells which id ends a text: the first one here.
    "pad-token-id": 0,
    "bos-token-id": 0,
    "eos-token-id": 0,
    # A last batch of fewer rows would be compiled for itself.
    "validation-whole-batches": True,
}
ROW_TOKENS = 512
# Between the two best of the search over 100 steps (7.5e-4, 1.5e-3, 3e-3).
PEAK_RATE = 1.2e-3
# The source's published recipe of its 291 M run, by its command line.
SOURCE_V25: Flags = {
    "preset": "perkunas-v2.5",
    "seed": SEED,
    "micro-batch-size": 32,
    "gradient-accumulation-steps": 4,
    "dtype": "fp16",
    "master-weight-dtype": "fp32",
    "optimizer": "adamw",
    "learning-rate": 1e-5,
    "weight-decay": 0.05,
    "beta1": 0.9,
    "beta2": 0.95,
    "adam-eps": 1e-8,
    "max-grad-norm": 1.0,
    "grad-clip-mode": "global",
    "lr-schedule": "tokens",
    "warmup-tokens": 0,
    "decay-tokens": 500_000_000,
    "min-lr-ratio": 0.5,
    "lm-head-chunk-tokens": 4096,
    "prefetch-shards": "cpu",
    "prefetch-window": 27,
    "max-pending-shard-writes": 8,
    "validate-every": 100,
    "max-validation-batches": 50,
    "validation-whole-batches": True,
}
GUARDS: Mapping[str, Flags] = {
    "loose": {"guard-replay-loss-tolerance": 0.1, "guard-replay-loss-tolerance-ratio": 0.01},
    "moderate": {"guard-replay-loss-tolerance": 0.02, "guard-replay-loss-tolerance-ratio": 0.002},
    "strict": {"guard-replay-loss-tolerance": 0.0, "guard-replay-loss-tolerance-ratio": 0.0},
}
# Sizes that a processor trains in a second or two; the vocabulary stays that of the data.
TINY: Flags = {
    "preset": "demo",
    "vocab-size": 8000,
    "hidden-size": 32,
    "num-layers": 2,
    "num-heads": 2,
    "intermediate-size": 64,
    "max-position-embeddings": 512,
    "micro-batch-size": 1,
    "gradient-accumulation-steps": 1,
    "max-validation-batches": 2,
    "device-pipeline": "on",
}


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One run: its name, its flags, and how many steps it makes."""

    name: str
    flags: Flags
    steps: int


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large a campaign is: `tiny` tries every part on a processor in seconds."""

    device: str = "cuda"
    is_tiny: bool = False
    over: Flags = field(default_factory=dict)

    @classmethod
    def tiny(cls) -> Scale:
        """Give the scale that a processor can do."""
        return cls(device="cpu", is_tiny=True, over=TINY)

    def arm(self, name: str, flags: Flags, steps: int) -> Arm:
        """Give an arm of this scale; a tiny one makes a hundredth of the steps, and at least 8."""
        given = {**flags, **self.over, "device": self.device}
        if self.is_tiny and given.get("dtype") == "fp16":
            given["device-pipeline"] = "auto"
        return Arm(name=name, flags=given, steps=max(8, steps // 100) if self.is_tiny else steps)


def step_tokens(flags: Flags) -> int:
    """Give the tokens of one step."""
    return int(flags["micro-batch-size"] * flags["gradient-accumulation-steps"]) * ROW_TOKENS


def scheduled(flags: Flags, rate: float, steps: int, warmup_steps: int) -> Flags:
    """Add a peak rate, a warm-up and a cosine that ends with the last of `steps`."""
    tokens = step_tokens(flags)
    return {
        **flags,
        "learning-rate": rate,
        "warmup-tokens": warmup_steps * tokens,
        "decay-tokens": (steps - warmup_steps) * tokens,
    }


def main_arm(scale: Scale, rate: float = PEAK_RATE) -> Arm:
    """Give the run of 3,000 steps; its control and the killed run have the same flags."""
    flags = {**COMMON, "preset": "perkunas-v2.9-100m"}
    flags |= {"validate-every": 100, "snapshot-best": True, "durable-every": 0}
    return scale.arm("main", scheduled(flags, rate, MAIN_STEPS, 150), MAIN_STEPS)


def rate_arms(scale: Scale, rates: tuple[float, ...], steps: int) -> list[Arm]:
    """Give the search of the peak rate: the main recipe over fewer steps, its schedule with it."""
    flags = {**COMMON, "preset": "perkunas-v2.9-100m", "validate-every": 50}
    return [
        scale.arm(f"rate-{rate:g}", scheduled(flags, rate, steps, max(1, steps // 10)), steps)
        for rate in rates
    ]


def ablation_arms(scale: Scale) -> list[Arm]:
    """Give the arms of the source's roadmap, on the geometry that it names, on equal tokens."""
    steps = 200
    base = {**COMMON, "preset": "perkunas-v2.8-50m", "validate-every": 40, "max-grad-norm": 0.5}
    base = dict(scheduled(base, PEAK_RATE, steps, 20))
    shard = {**base, "grad-clip-mode": "shard"}
    evened = {
        "global-optimizer-every": 50,
        "global-optimizer-blend": 0.25,
        "global-optimizer-min-scale": 0.5,
        "global-optimizer-max-scale": 2.0,
    }
    # The slowest first, and not as far on the same schedule: it takes as long as others.
    arms = {
        "fp16": {**base, "dtype": "fp16"},
        "clip-global": base,
        "clip-shard": shard,
        "clip-shard-normaliser": {**shard, **evened},
        "clip-global-seed-2": {**base, "seed": 2},
        **{f"guard-{name}": {**base, **guarded(flags)} for name, flags in GUARDS.items()},
    }
    return [scale.arm(name, flags, 80 if name == "fp16" else steps) for name, flags in arms.items()]


def hot_arms(scale: Scale) -> list[Arm]:
    """Give the guard's arms at a rate far too high, where there is something to guard against."""
    return _guarded_arms(scale, "hot", 20)


def brisk_arms(scale: Scale) -> list[Arm]:
    """Give the guard's arms at a rate that is too high and can still be trained at."""
    return _guarded_arms(scale, "brisk", 5)


def _guarded_arms(scale: Scale, name: str, times: int) -> list[Arm]:
    """Give a run without a guard, and one with each, all without a warm-up."""
    steps = 150
    base = {**COMMON, "preset": "perkunas-v2.8-50m", "validate-every": 50, "max-grad-norm": 0.5}
    base = dict(scheduled(base, times * PEAK_RATE, steps, 1))
    arms = {f"{name}-off": base}
    arms |= {f"{name}-{guard}": {**base, **guarded(flags)} for guard, flags in GUARDS.items()}
    return [scale.arm(name, flags, steps) for name, flags in arms.items()]


def guarded(tolerance: Flags) -> Flags:
    """Give the flags of a guard that skips what no attempt could mend."""
    return {
        "guarded-step-replay": True,
        "guard-replay-max-replays": 2,
        "guard-replay-on-exhaust": "skip",
        "max-skipped-steps": 100,
        **tolerance,
    }


def v25_arms(scale: Scale) -> list[Arm]:
    """Give the source's run of 291 M: its recipe in bf16 for 200 steps, in fp16 for 12."""
    bf16 = {**SOURCE_V25, "dtype": "bf16"}
    return [scale.arm("v25-bf16", bf16, 200), scale.arm("v25-fp16", SOURCE_V25, 12)]


def words_of(flags: Flags) -> list[str]:
    """Give the words of a command line."""
    words: list[str] = []
    for name, value in flags.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def fields_of(flags: Flags) -> dict[str, Any]:
    """Give the same flags by field, as a plan takes them."""
    found: dict[str, Any] = {}
    for name, value in flags.items():
        is_off = name.startswith("no-")
        found[name.removeprefix("no-").replace("-", "_")] = not is_off if value is True else value
    return found
