"""Is somebody's package the model of a store? The comparison that finds what nothing else does.

A package with a consistently wrong rotary layout has the right names, shapes and sizes, loads
everywhere and gives fluent text for a while: only logits tell. Owns the choice of ids and dtype for
a package that was not made here just now. Knows nothing of what is done about the answer.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from export.package_tensors import STORED_DTYPES, TORCH_DTYPES, TORCH_NAMES
from export.package_weights import Weights
from export.reference_logits import check_ids, stage_logits
from export.verify import (
    BY_LLAMA_CPP,
    BY_TRANSFORMERS,
    Load,
    Loaded,
    Verdict,
    compare,
    load_afresh,
)
from trainer.errors import InputError
from trainer.model.stored import TOKENIZER_SHARD, read_bytes


def compare_folder(
    folder: Path, weights: Weights, load: Load = load_afresh
) -> tuple[Verdict, Loaded]:
    """Load a package with transformers and compare it with the store, at the package's dtype.

    The verdict says whether the difference is within the dtype's bound; what was loaded names
    tensors that were missing or too many, and disagreements of the tokenizer. VerificationError
    where the package cannot be loaded at all, or has another vocabulary.
    """
    dtype = told_dtype(folder)
    ids_T = check_ids(weights.model, weights.commit.id)
    loaded = load(folder, ids_T, BY_TRANSFORMERS, None)
    ours_TV = stage_logits(weights.model, weights.read, ids_T, TORCH_DTYPES[dtype])
    return compare(ours_TV, loaded.logits_TV, TORCH_NAMES[dtype]), loaded


def compare_gguf(
    file: Path, weights: Weights, dtype: str = "float32", load: Load = load_afresh
) -> tuple[Verdict, Loaded]:
    """Load a GGUF file with llama.cpp and compare it with the store's fp32 logits.

    `dtype` chooses the bound: float32, float16, or bfloat16 for bf16 and q8_0 files.
    """
    ids_T = check_ids(weights.model, weights.commit.id)
    tokenizer = None
    if TOKENIZER_SHARD in weights.view.names():
        tokenizer = read_bytes(weights.view, TOKENIZER_SHARD).decode()
    loaded = load(file, ids_T, BY_LLAMA_CPP, {"tokenizer": tokenizer})
    ours_TV = stage_logits(weights.model, weights.read, ids_T, torch.float32)
    return compare(ours_TV, loaded.logits_TV, dtype), loaded


def told_dtype(folder: Path) -> str:
    """Give the form that the configuration names; InputError where it names none."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path}: cannot be read ({error}): give the folder of a package"
        ) from error
    told = config.get("dtype") or config.get("torch_dtype") or "float32"
    named = {TORCH_NAMES[form]: form for form in STORED_DTYPES.values()}
    if told not in named:
        raise InputError(f"{path}: dtype is {told!r}: one of {', '.join(named)} can be compared")
    return named[told]
