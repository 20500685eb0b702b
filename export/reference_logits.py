"""Logits by this project's own stages, a stage at a time: what every package is measured against.

Owns the order of the stages, the dtype rule (what is looked up stays as stored, the rest computes
in the chosen dtype) and the file of reference logits. Knows nothing of packages or commits: the
shards come from a function. Memory is one stage and the activations between two.

Shapes: T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer.errors import InputError
from trainer.model.config import ModelConfig
from trainer.model.stages import Stage, build_head, build_trunk

POSITIONS = 128
ALIGNMENT_BYTES = 64

ReadShard = Callable[[str], Mapping[str, Tensor]]


def check_ids(model: ModelConfig, seed: str, vocabulary: int | None = None) -> Tensor:
    """Give ids [T] for a comparison: drawn evenly, a pure function of `seed`, in hex.

    `vocabulary` bounds them where the tokenizer has fewer than the model.
    """
    # The generator takes 32 bits; an id of a commit ends with random ones.
    generator = torch.Generator().manual_seed(int(seed[-8:], 16))
    positions = min(POSITIONS, model.max_position_embeddings)
    bound = min(model.vocab_size, vocabulary or model.vocab_size)
    return torch.randint(0, bound, (positions,), generator=generator)


def stage_logits(model: ModelConfig, read: ReadShard, ids_T: Tensor, dtype: torch.dtype) -> Tensor:
    """Score every position [T, V]; computed in `dtype`, given in fp32.

    `read` gives the tensors of a shard such as `params/block_000`.
    """
    x = ids_T[None]
    with torch.no_grad():
        for stage in (*build_trunk(model), build_head(model)):
            x = stage.forward(_parameters(stage, read, dtype), x)
            if stage.keeps_master_dtype:
                x = x.to(dtype)
    return x[0].float()


def write_reference(path: Path, ids_T: Tensor, logits_TV: Tensor) -> None:
    """Write `ids` [T] int64 and `logits` [T, V] fp32 as an `.npz` file."""
    with path.open("wb") as out:
        np.savez(out, ids=ids_T.numpy(), logits=logits_TV.numpy())


def read_reference(path: Path) -> tuple[Tensor, Tensor]:
    """Read what `write_reference` wrote; InputError where the file is something else."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            ids, logits = arrays["ids"], arrays["logits"]
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{path}: no file of reference logits ({error})") from error
    if ids.ndim != 1 or logits.ndim != 2 or len(ids) != len(logits):
        raise InputError(
            f"{path}: ids {list(ids.shape)} and logits {list(logits.shape)} do not belong together:"
            " ids are [positions], logits [positions, vocabulary]"
        )
    return torch.from_numpy(ids.astype(np.int64)), torch.from_numpy(logits.astype(np.float32))


def _parameters(stage: Stage, read: ReadShard, dtype: torch.dtype) -> dict[str, Tensor]:
    shard = read(f"params/{stage.name}")
    wanted = torch.float32 if stage.keeps_master_dtype else dtype
    return {name: _aligned(shard[name].to(wanted)) for name in stage.parameters}


def _aligned(tensor: Tensor) -> Tensor:
    """Copy a tensor that lies askew: matrix kernels may round differently on other alignments."""
    return tensor if tensor.data_ptr() % ALIGNMENT_BYTES == 0 else tensor.clone()
