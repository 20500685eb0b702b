"""Stores to export, made without training: initial values, a model, perhaps a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

import shardb
from export import doctor_run, hf_export
from export.doctor_run import examine
from export.hf_export import export_package
from export.verify import Loaded
from export.verify_loading import by_stages, by_transformers
from shardb import TensorSpec, torch_adaptor
from trainer.model.config import ModelConfig
from trainer.model.initialise import fill_initial
from trainer.model.stages import build_stages
from trainer.model.stored import TOKENIZER_SHARD, write_bytes, write_model

TEXT = ["the cat sat on the mat and saw 12 dogs", "naïve élève, don't they'll", "KING HENRY. \n\n"]


def make_store(
    path: Path,
    model: ModelConfig,
    *,
    steps: int = 1,
    tokenizer: bytes | None = None,
    dtype: str = "F32",
) -> Path:
    """Commit `steps` sets of weights, each of another seed; biases and norms are not left plain."""
    with shardb.open(path, create=True) as store:
        for step in range(steps):
            with store.begin() as txn:
                for stage in build_stages(model):
                    specs = {
                        name: TensorSpec(dtype=dtype, shape=spec.shape)
                        for name, spec in stage.specs.items()
                    }
                    shard = txn.stage(f"params/{stage.name}", specs)
                    exact = {name: torch.empty(spec.shape) for name, spec in specs.items()}
                    fill_initial(stage, step, exact)
                    for name, tensor in torch_adaptor.tensors(shard).items():
                        tensor.copy_(exact[name] + _ripple(exact[name]))
                    shard.seal()
                if step == 0:
                    write_model(txn, model)
                    if tokenizer is not None:
                        write_bytes(txn, TOKENIZER_SHARD, tokenizer)
                txn.commit(step=step, state={}, metrics={"loss": 5.0 - step})
            store.create_snapshot(f"step-{step}")
    return path


def replace_weight(store: Path, stage: str, tensor: str, value: float) -> None:
    """Commit the newest weights with one value of one tensor changed."""
    with shardb.open(store) as opened, opened.begin() as txn:
        assert txn.base is not None
        name = f"params/{stage}"
        for shard in [each for each in txn.base.shards if each.startswith("params/")]:
            arrays = {key: array.copy() for key, array in txn.read(shard).arrays().items()}
            if shard == name:
                arrays[tensor].reshape(-1)[3] = value
            txn.write(shard, arrays)
        txn.commit(step=txn.base.step + 1, state={}, metrics={})


def byte_tokenizer(vocab_size: int) -> bytes:
    """Train a byte-level BPE with `<|endoftext|>` as id 0, of exactly so many ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken("<|endoftext|>", special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    assert tokenizer.get_vocab_size() == vocab_size
    return json.dumps(json.loads(tokenizer.to_str())).encode()


def load_here(folder: Path, ids_T: Tensor, loader: str, plan: Any = None) -> Loaded:
    """Load in this process what the command loads in a fresh one: seconds less."""
    outcome = by_transformers(folder, ids_T) if loader == "transformers" else by_stages(
        folder, ids_T, plan
    )  # fmt: skip
    return Loaded(
        loader=loader,
        logits_TV=outcome.logits_TV,
        versions=outcome.versions,
        faults=outcome.faults,
        disagreements=outcome.disagreements,
    )


def let_commands_load_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `export-hf` and `model-doctor`, run in this process, load what they check in it too."""
    monkeypatch.setattr(hf_export, "export_package", partial(export_package, load=load_here))
    monkeypatch.setattr(doctor_run, "examine", partial(examine, load=load_here))


def rewrite_tensors(path: Path, change: Callable[[str, Tensor], Tensor]) -> None:
    """Change the tensors of a weight file in place."""
    tensors = {name: change(name, t).contiguous() for name, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def interleaved_rotary(head_dim: int) -> Callable[[str, Tensor], Tensor]:
    """Give what lays rotary pairs out the other way in every block, as a wrong converter does."""

    def change(name: str, values: Tensor) -> Tensor:
        if "q_proj" not in name and "k_proj" not in name:
            return values
        heads = values.view(-1, 2, head_dim // 2, values[0].numel())
        return heads.transpose(1, 2).reshape(values.shape)

    return change


def params_of(store: Path, ref: str | None = None) -> Mapping[str, Mapping[str, Tensor]]:
    """Give copies of the stored parameters as params[shard][name]."""
    with shardb.open(store) as opened, opened.at(ref=ref) as view:
        return {
            name: {key: t.clone() for key, t in torch_adaptor.tensors(view.read(name)).items()}
            for name in view.names()
            if name.startswith("params/")
        }


def _ripple(tensor: Tensor) -> Tensor:
    """Small values that differ from place to place, so that a swapped or lost bias is seen."""
    return torch.linspace(-0.1, 0.1, tensor.numel()).reshape(tensor.shape)
