"""The exactness matrix: its factors, the geometry of each cell, and samples of it.

Owns which combinations exist and which are drawn. Knows nothing of how one is trained. Invariants:
a cell's geometry follows from the part of it that a resident run shares, so that cells which differ
in mode alone have one reference; a sample follows from its seed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

FACTORS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "optimizer": ("adamw", "lion", "adafactor"),
        "clip": ("none", "shard", "global"),
        "accumulation": (1, 3),
        "dtype": ("fp32", "bf16", "fp16"),
        "prefetch": ("off", "cpu"),
        "writes": ("sync", "async"),
        "store": ("durable", "active"),
    }
)
# Fields of the command line; what all of them share is in SIZES.
SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 131,
        "hidden_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "intermediate_size": 112,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
    }
)
GEOMETRIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "untied, grouped": {"num_kv_heads": 2},
        "tied": {"tied_embeddings": True},
        "tied, grouped, query and key norms": {
            "num_kv_heads": 1,
            "tied_embeddings": True,
            "qk_norm": True,
        },
        "every bias": {"attention_bias": True, "attention_output_bias": True},
        "norms, biases, grouped": {"num_kv_heads": 2, "qk_norm": True, "attention_bias": True},
        "Llama 3 scaling": {
            "num_kv_heads": 2,
            "rope_theta": 500000.0,
            "rope_scaling_type": "llama3",
            "rope_scaling_factor": 8.0,
            "rope_scaling_original_max_position_embeddings": 16,
        },
    }
)
# Further ways of carrying a run out that may not change a bit: they take turns over the matrix.
ACTIVATIONS: tuple[Mapping[str, Any], ...] = (
    {"activations": "recompute", "activation_placement": "vram"},
    {"activations": "recompute", "activation_placement": "host"},
    {"activations": "keep"},
    {"activations": "recompute", "activation_placement": "spill"},
)
WINDOWS = (1, 3, 500)
PENDING_WRITES = (1, 4)
GRADIENTS = ("vram", "host")
DECAYED = ("all", "matrices")
# Cells that differ in the last three factors alone have one reference.
MODES = 8


@dataclass(frozen=True, kw_only=True, order=True)
class Reference:
    """What decides the bits of a run, and so of the resident run that it must equal."""

    optimizer: str
    clip: str
    accumulation: int
    dtype: str

    @property
    def geometry(self) -> str:
        """Name the geometry: every one meets every value of every other factor."""
        at = self._places()
        number = at["clip"] + 3 * at["accumulation"] + 2 * at["dtype"]
        return [*GEOMETRIES][number % len(GEOMETRIES)]

    @property
    def weight_decay_scope(self) -> str:
        """Name what is decayed: both meet every value of every factor, and every geometry."""
        return DECAYED[sum(self._places().values()) % len(DECAYED)]

    def _places(self) -> dict[str, int]:
        return {f.name: FACTORS[f.name].index(getattr(self, f.name)) for f in fields(self)}


@dataclass(frozen=True, kw_only=True, order=True)
class Cell:
    """One combination of the matrix."""

    optimizer: str
    clip: str
    accumulation: int
    dtype: str
    prefetch: str
    writes: str
    store: str

    @property
    def reference(self) -> Reference:
        """Give the part that resident training shares."""
        return Reference(**{f.name: getattr(self, f.name) for f in fields(Reference)})

    @property
    def name(self) -> str:
        """Give every value in the order of the factors."""
        return " ".join(str(getattr(self, name)) for name in FACTORS)


def all_cells() -> list[Cell]:
    """Give the whole matrix."""
    return [
        Cell(**dict(zip(FACTORS, values, strict=True)))
        for values in itertools.product(*FACTORS.values())
    ]


def ways_of(cell: Cell) -> dict[str, Any]:
    """Give the further flags of a cell, by its place in the matrix.

    The pipeline of the device takes every step that it can, on a processor too.
    """
    place = 0
    for name, values in FACTORS.items():
        place = place * len(values) + values.index(getattr(cell, name))
    reference, mode = divmod(place, MODES)
    activations = ACTIVATIONS[(reference + mode) % len(ACTIVATIONS)]
    is_simple = cell.optimizer == "adamw" and cell.dtype != "fp16"
    return {
        **activations,
        "device_pipeline": "on" if is_simple and activations in ACTIVATIONS[:2] else "off",
        "gradient_placement": GRADIENTS[(reference + mode // 4) % len(GRADIENTS)],
        "prefetch_window": WINDOWS[place % len(WINDOWS)],
        "max_pending_shard_writes": PENDING_WRITES[(reference + mode // 2) % len(PENDING_WRITES)],
    }


def pairs_of(cell: Cell) -> set[tuple[str, Any, str, Any]]:
    """Give every two values of different factors that a cell brings together."""
    return {
        (one, getattr(cell, one), other, getattr(cell, other))
        for one, other in itertools.combinations(FACTORS, 2)
    }


def uncovered_pairs(cells: Iterable[Cell]) -> set[tuple[str, Any, str, Any]]:
    """Give the pairs of values that the matrix has and the cells do not."""
    every = set().union(*map(pairs_of, all_cells()))
    return every.difference(*map(pairs_of, cells))


def covering_sample(seed: int) -> list[Cell]:
    """Draw few cells in which every pair of values occurs: the best of a random handful each."""
    draw, cells = random.Random(seed), all_cells()
    missing, chosen = uncovered_pairs([]), []
    while missing:
        best = max(draw.sample(cells, 60), key=lambda cell: len(missing & pairs_of(cell)))
        if missing & pairs_of(best):
            chosen.append(best)
            missing -= pairs_of(best)
    return chosen


def spread_sample(seed: int, count: int) -> list[Cell]:
    """Draw `count` cells: one covering sample after another, so that values come up evenly."""
    found: list[Cell] = []
    for further in itertools.count(seed):
        found += [cell for cell in covering_sample(further) if cell not in found]
        if len(found) >= count:
            return found[:count]
    raise AssertionError("unreachable")


def geometries_met(references: Sequence[Reference]) -> set[tuple[str, str, Any]]:
    """Give every (geometry, factor, value) that occurs."""
    return {
        (each.geometry, f.name, getattr(each, f.name)) for each in references for f in fields(each)
    }
