"""A commit's adapters as a folder that `peft` loads: its configuration and one weight file.

Owns the names and the fields, which are those of `peft`'s own files, and the check that what was
written is what the base has a place for. Knows nothing of the command line.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from export.package_publish import Draft, check_apart
from export.package_weights import Weights, open_weights
from export.source_package import SourcePackage
from export.verify import VerificationError
from shardb import torch_adaptor
from trainer.errors import InputError
from trainer.model.adapter_settings import ALL_LINEAR, LoraSettings
from trainer.model.adapters import A_ENDS, B_ENDS, PREFIX

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME_PREFIX = "base_model.model."
SPARE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterReport:
    """What was made; `nonzero_tensors` of them are not zero throughout."""

    out: str
    commit: str
    step: int
    tensors: int
    nonzero_tensors: int
    parameters: int
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """Give every field by name."""
        return asdict(self)


def export_adapter(
    store: str,
    out: Path,
    *,
    ref: str | None,
    overwrite: bool,
    allow_network: bool = False,
    base_model: str | None = None,
) -> AdapterReport:
    """Write the folder; raises a ShardbError or OSError and leaves nothing behind.

    base_model: the name or folder of the base, where its own configuration does not tell it.
    """
    if base_model == "":
        raise InputError("--base-model is empty: give the base's name or folder")
    check_apart(out, Path(store))
    with open_weights(store, ref=ref, allow_network=allow_network) as weights:
        lora = weights.adapters[-1]
        if lora is None or weights.source is None:
            raise InputError(
                f"--adapter: step {weights.commit.step} holds no adapters: train them with"
                " `train --lora-rank`, or leave the flag out"
            )
        tensors = package_adapters(weights, weights.source)
        size = sum(tensor.nbytes for tensor in tensors.values())
        with Draft(out, is_directory=True, overwrite=overwrite) as draft:
            draft.check_space(size + SPARE_BYTES)
            save_file(tensors, draft.path / ADAPTER_WEIGHTS, metadata={"format": "pt"})
            config = adapter_config(lora, weights.source, list(tensors), base_model)
            text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            (draft.path / ADAPTER_CONFIG).write_text(text)
            check_adapter(draft.path, tensors, weights.source)
            draft.publish()
        return AdapterReport(
            out=str(out),
            commit=weights.commit.id,
            step=weights.commit.step,
            tensors=len(tensors),
            nonzero_tensors=sum(bool(tensor.any()) for tensor in tensors.values()),
            parameters=sum(tensor.numel() for tensor in tensors.values()),
            bytes=size,
        )


def package_adapters(weights: Weights, source: SourcePackage) -> dict[str, Tensor]:
    """Give every adapter under the name that `peft` has for it."""
    names = {(each.shard, each.tensor): each.name for each in source.tensors}
    found = {}
    for shard in sorted(name for name in weights.view.names() if name.startswith(PREFIX)):
        base = "params/" + shard.removeprefix(PREFIX)
        for name, tensor in torch_adaptor.tensors(weights.view.read(shard)).items():
            ends = A_ENDS if name.endswith(A_ENDS) else B_ENDS
            weight = names[base, name.removesuffix(ends) + ".weight"]
            found[NAME_PREFIX + weight.removesuffix(".weight") + ends] = tensor.clone()
    return dict(sorted(found.items()))


def adapter_config(
    lora: LoraSettings, source: SourcePackage, names: list[str], base_model: str | None = None
) -> dict[str, Any]:
    """Give adapter_config.json."""
    modules = {name.removesuffix(A_ENDS).rpartition(".")[2] for name in names if A_ENDS in name}
    targets = modules if ALL_LINEAR in lora.targets else set(lora.targets)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model or str(source.config.get("_name_or_path") or ""),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def check_adapter(folder: Path, expected: Mapping[str, Tensor], source: SourcePackage) -> None:
    """Read the file again; every tensor must be there and have a weight of the base to go to.

    Raises VerificationError where one has none, or where there is none at all: such an adapter
    loads without a word and changes nothing.
    """
    weights = {NAME_PREFIX + each.name.removesuffix(".weight") for each in source.tensors}
    path = folder / ADAPTER_WEIGHTS
    loaded = load_file(path)
    matched = [
        name
        for name in loaded
        if name.endswith((A_ENDS, B_ENDS)) and name[: -len(A_ENDS)] in weights
    ]
    lost = sorted(loaded.keys() - set(matched))
    if not matched or lost or loaded.keys() != expected.keys():
        raise VerificationError(
            f"{path}: {len(matched)} of {len(expected)} tensors match a weight of"
            f" the base{f', {lost[0]} does not' if lost else ''}: nothing was published"
        )
    assert len(matched) == len(expected)
    different = [n for n, tensor in expected.items() if not torch.equal(loaded[n], tensor)]
    if different:
        raise VerificationError(f"{path}: {different[0]} was not written as it is")
