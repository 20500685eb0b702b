"""Models with layers as large as those of real ones, made from configuration on a device.

What they are written to is memory of the host where there is a RAM disk: a store of one takes
a gigabyte or more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from export.families import places
from export.import_config import read_model_config
from tests.support.packages import config_of, import_here, write_package

RAM_DISK = Path("/dev/shm")
SIZES = {
    "vocab_size": 512,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 3,
    "max_position_embeddings": 1024,
}
HEAD = {"head_dim": 128}
WIDE = {**HEAD, "query_pre_attn_scalar": 128}
OWN: dict[str, dict[str, Any]] = {
    "qwen3": HEAD,
    "gemma": HEAD,
    "gemma2": {**WIDE, "sliding_window": 64, "final_logit_softcapping": 30.0},
    "gemma3_text": {**WIDE, "sliding_window": 64},
    "phi3": {"sliding_window": 64},
}


def large_config(model_type: str, **changes: Any) -> dict[str, Any]:
    """Give a family's configuration at the sizes of a real layer."""
    return config_of(model_type, **{**SIZES, **OWN.get(model_type, {}), **changes})


def drawn_tensors(config: dict[str, Any], device: str, seed: int = 0) -> dict[str, Tensor]:
    """Give bf16 weights: matrices that keep what passes them about as large as it was."""
    read = read_model_config(config)
    generator = torch.Generator(device).manual_seed(seed)
    found = {}
    for name, place in places(read.family, read.model).items():
        values = torch.randn(place.shape, generator=generator, device=device)
        if len(place.shape) > 1:
            values *= place.shape[1] ** -0.5
        else:
            values *= 0.1
            values += 0.0 if name.endswith("bias") or "gemma" in config["model_type"] else 1.0
        found[name] = values.bfloat16().cpu()
    return found


@contextmanager
def large_store(config: dict[str, Any], device: str) -> Iterator[tuple[Path, Path]]:
    """Give a package and the store that it was imported into, gone afterwards."""
    with TemporaryDirectory(dir=RAM_DISK if RAM_DISK.is_dir() else None) as folder:
        root = Path(folder)
        package = write_package(root / "package", config, drawn_tensors(config, device))
        import_here(package, root / "store")
        yield package, root / "store"
