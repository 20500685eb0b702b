"""Tiny Hugging Face packages with random weights, made without transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import shardb
from export.families import places
from export.import_config import read_model_config
from export.import_run import Imported, plan_import, run_import
from export.source_package import read_source

Tensors = dict[str, Tensor]
SIZES: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WIDE = {"head_dim": 16, "query_pre_attn_scalar": 16}
# What is particular to a family is set so that it changes the logits within a few positions.
OWN: Mapping[str, Mapping[str, Any]] = {
    "llama": {"rope_theta": 500000.0, "tie_word_embeddings": False},
    "mistral": {"sliding_window": None, "tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": False},
    "gemma": {"head_dim": 16},
    "gemma2": {**_WIDE, "sliding_window": 8, "final_logit_softcapping": 3.0},
    "gemma3_text": {
        **_WIDE,
        "sliding_window": 8,
        "rope_local_base_freq": 100.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": 8, "pad_token_id": 0},
}
FAMILY_NAMES = tuple(OWN)
NATIVE = ("llama", "mistral", "qwen2", "qwen3")


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    """Give a configuration as a package has it; a change to None takes the field away."""
    values = {"model_type": model_type, "torch_dtype": "bfloat16", **SIZES, **OWN[model_type]}
    return {k: v for k, v in (values | changes).items() if v is not None or k == "sliding_window"}


def random_tensors(
    config: Mapping[str, Any], *, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Tensors:
    """Give every tensor that the configuration asks for."""
    read = read_model_config(config)
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(place.shape, generator=generator) * 0.2 + 0.05).to(dtype)
        for name, place in places(read.family, read.model).items()
    }


def write_package(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Tensors | None = None,
    *,
    split: bool = False,
) -> Path:
    """Write config.json and weights, in one file or in two with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = random_tensors(config) if tensors is None else tensors
    if not split:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(tensors)
    halves = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    weight_map: dict[str, str] = {}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def change_json(path: Path, change: Callable[[Any], None]) -> None:
    """Change a JSON file in place."""
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def import_here(package: Path, store: Path, branch: str = "main", **how: Any) -> Imported:
    """Import inside the test."""
    return run_import(plan_import(package, **how), store, branch=branch)


def stored_tensors(store: Path, ref: str | None = None) -> Tensors:
    """Give what a store holds under the package's own names, copied."""
    with shardb.open(store) as opened, opened.at(ref=ref) as view:
        source = read_source(view)
        assert source is not None
        found = {}
        for entry in source.tensors:
            tensors = shardb_tensors(view, entry.shard)
            found[entry.name] = tensors[entry.tensor].clone()
        return found


def shardb_tensors(view: shardb.ReadView, shard: str) -> Tensors:
    """Give a shard's tensors; they share its memory."""
    from shardb import torch_adaptor

    return torch_adaptor.tensors(view.read(shard))


def resident(package: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load a package as transformers does, offline; every tensor must find its place."""
    import transformers

    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        package, dtype=dtype, local_files_only=True, output_loading_info=True
    )
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()
