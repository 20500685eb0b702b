"""Does a package give the store's logits? Asked of a fresh, offline process.

Owns the bounds, the process that loads the package, and the verdict. Knows nothing of how either
side computes. `compare` serves any package, whoever wrote it.

At one dtype the bits are equal where the loader's kernels are ours: transformers with its `sdpa`
attention on a CPU calls the same matrix products, norms and attention in the same order. The bounds
below are for other kernels; a package of another model is far beyond them.

Shapes: T positions, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from export.package_memory import available_bytes
from shardb.errors import ShardbError
from shardb.extras import install

# Largest allowed difference, as a part of the largest logit (at least 1).
BOUNDS: Mapping[str, float] = MappingProxyType({"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2})
BY_TRANSFORMERS = "transformers"
BY_STAGES = "stages"
BY_LLAMA_CPP = "llama.cpp"
TAIL_CHARACTERS = 2000


class VerificationError(ShardbError):
    """The package is not the store's model; nothing was published."""

    kind = "package_differs"
    exit_code = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How far a package's logits are from the store's, at one dtype."""

    positions: int
    difference_max: float
    bound: float
    bit_equal: bool

    @property
    def holds(self) -> bool:
        """Say whether the difference is within the dtype's bound."""
        return self.difference_max <= self.bound


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What a fresh process found: logits [T, V] in fp32, versions, and faults it can name.

    disagreements: between tokenizer and configuration.
    """

    loader: str
    logits_TV: Tensor
    versions: Mapping[str, str]
    faults: Sequence[str] = field(default=())
    disagreements: Sequence[str] = field(default=())
    peak_memory_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The outcome of checking a package, for card and manifest.

    rounding_max: the largest difference to the store's fp32 logits: what the dtype costs.
    not_checked: what nobody looked at, and why. disagreements: an import's own, between its
    tokenizer and its configuration.
    """

    loader: str
    versions: Mapping[str, str]
    dtype: str
    positions: int
    difference_max: float
    bit_equal: bool
    rounding_max: float
    not_checked: str = ""
    disagreements: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Give every field by name."""
        return {**asdict(self), "versions": dict(self.versions)}


# Folder or file, ids [T], loader, and what the loader needs to know.
Load = Callable[[Path, Tensor, str, Any], Loaded]


def compare(ours_TV: Tensor, theirs_TV: Tensor, dtype: str) -> Verdict:
    """Compare logits that were computed at `dtype`; a NaN is a difference without end."""
    if ours_TV.shape != theirs_TV.shape:
        raise VerificationError(
            f"the package gives logits {list(theirs_TV.shape)}, the store {list(ours_TV.shape)}"
        )
    difference = (ours_TV.double() - theirs_TV.double()).abs()
    largest = float(torch.nan_to_num(difference, nan=torch.inf).max())
    return Verdict(
        positions=len(ours_TV),
        difference_max=largest,
        bound=BOUNDS[dtype] * max(1.0, float(ours_TV.abs().max())),
        bit_equal=bool(torch.equal(ours_TV, theirs_TV)),
    )


def check_verdict(verdict: Verdict, loaded: Loaded, dtype: str) -> None:
    """Raise VerificationError for faults of loading, and for a difference beyond the bound."""
    if loaded.faults:
        told = "; ".join(loaded.faults)
        raise VerificationError(f"loaded by {loaded.loader}, the package has faults: {told}")
    if not verdict.holds:
        raise VerificationError(
            f"loaded by {loaded.loader}, the package is another model than the store: over"
            f" {verdict.positions} positions logits differ by up to {verdict.difference_max:.3g},"
            f" {dtype} allows {verdict.bound:.3g}"
        )


def choose_loader(package_bytes: int) -> tuple[str, str]:
    """Give the loader that can be had here, and what is then not checked (empty: nothing)."""
    if importlib.util.find_spec("transformers") is None:
        return BY_STAGES, (
            "transformers is not installed, so nothing but this project's own stages loaded the"
            f" package: {install('hf')}"
        )
    free = available_bytes()
    if package_bytes * 5 // 4 > free:
        return BY_STAGES, (
            f"transformers holds all {package_bytes:,} bytes at once and {free:,} are free, so"
            " this project's own stages loaded the package, one at a time"
        )
    return BY_TRANSFORMERS, ""


def load_afresh(folder: Path, ids_T: Tensor, loader: str, plan: Any = None) -> Loaded:
    """Load a package in a process of its own, without network, and give its logits.

    plan: what a loader needs to know, as JSON can hold it: `stages` the model and where each tensor
    goes, `llama.cpp` the tokenizer that the file should have.
    """
    threads = str(torch.get_num_threads())
    answer = subprocess.run(
        [sys.executable, "-m", "export.verify_cli", str(folder.absolute()), loader, threads],
        input=json.dumps({"ids": ids_T.tolist(), "plan": plan}).encode(),
        env=_offline_environment(),
        cwd=_sources(),
        capture_output=True,
        check=False,
    )
    if answer.returncode != 0:
        said = answer.stderr.decode(errors="replace").strip()[-TAIL_CHARACTERS:]
        raise VerificationError(
            f"a fresh process with {loader} cannot load the package (exit code"
            f" {answer.returncode}): {said}"
        )
    told, _, values = answer.stdout.partition(b"\n")
    facts = json.loads(told)
    logits = torch.from_numpy(np.frombuffer(values, dtype="<f4").reshape(facts["shape"]).copy())
    return Loaded(
        loader=loader,
        logits_TV=logits,
        versions=facts["versions"],
        faults=facts["faults"],
        disagreements=facts["disagreements"],
        peak_memory_bytes=facts["peak_memory_bytes"],
    )


def _offline_environment() -> dict[str, str]:
    paths = [str(_sources()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _sources() -> Path:
    return Path(__file__).resolve().parent.parent
