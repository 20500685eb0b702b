"""Packages with one thing wrong, made of a sound one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from export.doctor_files import MANIFEST
from export.hf_export import export_package
from export.hf_plan import ExportRequest
from tests.support.exports import (
    byte_tokenizer,
    interleaved_rotary,
    load_here,
    make_store,
    rewrite_tensors,
)
from tests.support.packages import change_json
from tests.support.tiny_model import TINY

MODEL = replace(TINY, vocab_size=300, pad_token_id=0, bos_token_id=0, eos_token_id=0)
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
Q = "model.layers.1.self_attn.q_proj.weight"
Spoil = Callable[[Path], Any]


def sound_package(folder: Path, *, split: bool = False, keep_manifest: bool = False) -> Path:
    """Export a small model with its tokenizer; without the manifest, as a stranger's package."""
    store = make_store(folder.parent / "store", MODEL, tokenizer=byte_tokenizer(300))
    size = 300_000 if split else 1 << 30
    export_package(ExportRequest(store=str(store), out=folder, max_file_bytes=size), load_here)
    if not keep_manifest:
        (folder / MANIFEST).unlink()
    return folder


def set_json(name: str, **values: Any) -> Spoil:
    """Give what sets fields of a JSON file; None takes one away."""

    def change(document: dict[str, Any]) -> None:
        document.update(values)
        for key in [key for key, value in values.items() if value is None]:
            del document[key]

    return lambda folder: change_json(folder / name, change)


def set_weights(change: Callable[[dict[str, torch.Tensor]], Any], name: str = SINGLE) -> Spoil:
    """Give what changes the tensors of a weight file."""

    def spoil(folder: Path) -> None:
        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        os.chmod(folder / name, 0o644)

    return spoil


def rename_key(old: str, new: str) -> Spoil:
    """Give what renames a tensor."""
    return set_weights(lambda tensors: tensors.update({new: tensors.pop(old)}))


def hostile_header(folder: Path) -> None:
    """Let the header say that it has a terabyte."""
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes((1 << 40).to_bytes(8, "little") + data[8:])


def without_format(folder: Path) -> None:
    """Save the weights without the metadata that version 4 of transformers asks for."""
    save_file(load_file(folder / SINGLE), folder / SINGLE)
    os.chmod(folder / SINGLE, 0o644)


def overflowing(folder: Path) -> None:
    """Convert to fp16 as a careless converter does: a value beyond it becomes infinite."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[Q].view(-1)[:2] = 70000.0
        tensors.update({name: tensor.half() for name, tensor in tensors.items()})

    set_weights(change)(folder)
    set_json("config.json", dtype="float16", torch_dtype="float16")(folder)


def put_interleaved(package: Path, folder: Path, head_dim: int = MODEL.head_dim) -> Path:
    """Copy a package with its rotary pairs laid out the other way."""
    shutil.copytree(package, folder)
    rewrite_tensors(folder / SINGLE, interleaved_rotary(head_dim))
    os.chmod(folder / SINGLE, 0o644)
    return folder
