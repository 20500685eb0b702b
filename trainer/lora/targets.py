"""Which weights of a model get adapters, and what shapes those have.

Owns the names. Knows nothing of values or stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from shardb import TensorSpec
from trainer.errors import InputError
from trainer.model.adapter_settings import ALL_LINEAR, LoraSettings, is_called
from trainer.model.adapters import A_ENDS, B_ENDS
from trainer.model.stages import Parameter, Stage

# They are asked for many times a step; what is given must not be changed.
KNOWN_STAGES = 1024


@lru_cache(maxsize=KNOWN_STAGES)
def linear_modules(stage: Stage) -> dict[str, tuple[int, ...]]:
    """Give the modules of a block that multiply by a matrix, and the matrices' shapes."""
    if not stage.name.startswith("block_"):
        return {}
    return {
        name.removesuffix(".weight"): parameter.shape
        for name, parameter in stage.parameters.items()
        if name.endswith(".weight") and len(parameter.shape) == 2
    }


@lru_cache(maxsize=KNOWN_STAGES)
def adapter_parameters(stage: Stage, lora: LoraSettings) -> dict[str, Parameter]:
    """Give a stage's adapters, in the order of the weights they belong to: A [r, in], B [out, r].

    `initial` of A is not used: it is drawn as `peft` draws it.
    """
    found = {}
    for module, (outputs, inputs) in linear_modules(stage).items():
        if lora.is_target(module):
            found[module + A_ENDS] = Parameter(shape=(lora.rank, inputs), initial="normal")
            found[module + B_ENDS] = Parameter(shape=(outputs, lora.rank), initial="zeros")
    return found


def modules_of(stages: Iterable[Stage], name: str) -> frozenset[str]:
    """Give the modules that a target names, over all blocks."""
    modules = {module for stage in stages for module in linear_modules(stage)}
    return frozenset(each for each in modules if name == ALL_LINEAR or is_called(each, name))


def named_once(stages: Iterable[Stage], targets: Sequence[str]) -> tuple[str, ...]:
    """Leave out each name whose modules the other ones name; one that names none stays."""
    stages, kept = tuple(stages), list(dict.fromkeys(targets))
    for name in reversed(kept):
        modules = modules_of(stages, name)
        others = [modules_of(stages, other) for other in kept if other != name]
        if modules and modules <= frozenset().union(*others):
            kept.remove(name)
    return tuple(kept)


def meaning(stages: Iterable[Stage], targets: Sequence[str]) -> frozenset[str]:
    """Give what targets mean, however they are written: modules, and names that no module has."""
    stages = tuple(stages)
    return frozenset().union(*(modules_of(stages, name) or frozenset((name,)) for name in targets))


def check_targets(stages: Iterable[Stage], lora: LoraSettings) -> None:
    """Refuse a name that no module of the model has; InputError lists those there are."""
    modules: Mapping[str, None] = dict.fromkeys(
        module for stage in stages for module in linear_modules(stage)
    )
    for name in lora.targets:
        found = any(is_called(module, name) for module in modules)
        if name != ALL_LINEAR and not found:
            there = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in modules))
            raise InputError(
                f"--lora-targets: no module of this model is called {name}; there are {there}, and"
                f" {ALL_LINEAR} means all of them"
            )


def adapter_specs(stage: Stage, lora: LoraSettings) -> dict[str, TensorSpec]:
    """Give the stored form of a stage's adapters; empty where it has none."""
    return {
        name: TensorSpec(dtype="F32", shape=each.shape)
        for name, each in adapter_parameters(stage, lora).items()
    }
