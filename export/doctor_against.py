"""A package against the store that it should be of: logits first, then which tensors differ.

Owns the choice of what loads the package, and the reason that is given where the models differ: a
consistently wrong rotary layout has right names, shapes and values, in another order. Knows nothing
of commands. Where transformers or llama.cpp is not installed, or not enough memory is free, this
project's own stages compute from the package's tensors, and the answer says so.

Shapes: T positions, V vocabulary.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from export.doctor_findings import Finding, Place, few
from export.doctor_gguf_header import GgufHeader
from export.families import FAMILIES
from export.gguf_layout import architecture_of, gguf_tensors, halved, interleaved
from export.import_files import read_json
from export.package_reading import PackageShards
from export.package_tensors import (
    TORCH_DTYPES,
    TORCH_NAMES,
    ZEROS,
    PackageTensor,
    native_tensors,
    source_tensors,
)
from export.package_weights import Weights
from export.reference_logits import check_ids, stage_logits
from export.verify import (
    BOUNDS,
    BY_STAGES,
    BY_TRANSFORMERS,
    Load,
    Loaded,
    Verdict,
    VerificationError,
    choose_loader,
    compare,
    load_afresh,
)
from export.verify_against import compare_folder, compare_gguf, told_dtype
from shardb.extras import install
from trainer.errors import InputError

_BOUNDS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "Q8_0": "bfloat16"}
_REMEDY = "export the store again, or convert the rows of q_proj and k_proj: heads are halved"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """What was found; `outcome` is one line for people."""

    outcome: str
    findings: tuple[Finding, ...]


def folder_against(
    folder: Path, weights: Weights, package_bytes: int, load: Load = load_afresh
) -> Compared:
    """Compare a folder's logits with the store's, and find out why they differ."""
    try:
        loader, why = choose_loader(package_bytes)
        if loader == BY_TRANSFORMERS:
            verdict, loaded = compare_folder(folder, weights, load)
        else:
            verdict, loaded = _by_stages(folder, weights)
    except (VerificationError, InputError) as error:
        return _failed(error)
    place = Place(file="")
    found = [place.error("", fault, "see the other findings") for fault in loaded.faults]
    found += [place.warning("", each, "make them agree") for each in loaded.disagreements]
    reasons = [] if verdict.holds else list(_reasons(folder, weights))
    return _told(verdict, loaded, why, [*found, *reasons])


def gguf_against(
    path: Path, header: GgufHeader, weights: Weights, load: Load = load_afresh
) -> Compared:
    """Compare a GGUF file's logits with the store's."""
    forms = {entry.form for entry in header.tensors.values()}
    try:
        if not forms <= _BOUNDS.keys():
            raise InputError(
                f"its forms {', '.join(sorted(forms))} have no bound: {', '.join(_BOUNDS)} can be"
                " compared"
            )
        # The coarsest form decides what may be lost.
        bound = max((_BOUNDS[form] for form in forms), key=lambda name: BOUNDS[name])
        if importlib.util.find_spec("llama_cpp") is not None:
            verdict, loaded = compare_gguf(path, weights, bound, load)
            return _told(verdict, loaded, "", [_fault(each) for each in loaded.faults])
        verdict, loaded = _gguf_by_stages(path, header, weights, bound)
    except (VerificationError, InputError) as error:
        return _failed(error)
    return _told(verdict, loaded, "llama.cpp is not installed", [])


def _fault(what: str) -> Finding:
    return Place(file="").error(
        "tokenizer", what, "export it again with the right `export-gguf --pre`"
    )


def _failed(error: Exception) -> Compared:
    finding = Place(file="").error("logits", str(error), "mend the other findings, try again")
    return Compared(outcome="it could not be compared", findings=(finding,))


def _told(verdict: Verdict, loaded: Loaded, why: str, found: list[Finding]) -> Compared:
    versions = ", ".join(f"{name} {version}" for name, version in loaded.versions.items())
    by = f"{loaded.loader} ({versions})" + (f", because {why}" if why else "")
    over = f"over {verdict.positions} positions, by {by}"
    if verdict.holds:
        equal = "bit-equal" if verdict.bit_equal else f"within {verdict.difference_max:.3g}"
        return Compared(outcome=f"logits {equal} {over}", findings=tuple(found))
    what = (
        f"logits differ by up to {verdict.difference_max:.3g} {over}; {verdict.bound:.3g} is"
        " allowed: it is another model than the store"
    )
    finding = Place(file="").error("logits", what, "see what differs, or give another @REF")
    return Compared(outcome="it is another model", findings=(finding, *found))


def _by_stages(folder: Path, weights: Weights) -> tuple[Verdict, Loaded]:
    dtype = told_dtype(folder)
    shards = PackageShards(folder, _tensors(folder, weights))
    ids_T = check_ids(weights.model, weights.commit.id)
    theirs_TV = stage_logits(weights.model, shards.read, ids_T, TORCH_DTYPES[dtype])
    ours_TV = stage_logits(weights.model, weights.read, ids_T, TORCH_DTYPES[dtype])
    loaded = Loaded(loader=BY_STAGES, logits_TV=theirs_TV, versions={"torch": torch.__version__})
    return compare(ours_TV, theirs_TV, TORCH_NAMES[dtype]), loaded


def _tensors(folder: Path, weights: Weights) -> list[PackageTensor]:
    if weights.source is not None:
        return source_tensors(weights.source, None)
    family = (read_json(folder / "config.json") or {}).get("model_type")
    if family not in FAMILIES:
        raise InputError(f"config.json: model_type {family!r} cannot be compared with the store")
    return native_tensors(weights.model, str(family), "F32")


def _reasons(folder: Path, weights: Weights) -> Iterator[Finding]:
    """Name the tensors that differ; say so where they are the store's in another order."""
    try:
        tensors = _tensors(folder, weights)
        shards = PackageShards(folder, tensors)
        differing = dict(_differing(tensors, shards, weights))
    except (InputError, KeyError) as error:
        yield Place(file="").note("", f"tensors were not compared one by one: {error}")
        return
    orders = set(differing.values())
    if not differing:
        what = "every tensor is the store's: the configuration makes another model of them"
        yield Place(file="config.json").error("", what, "see rope_theta, rms_norm_eps, head_dim")
    elif len(orders) == 1 and orders != {""}:
        what = (
            f"rows of queries and keys are {orders.pop()} in {len(differing)} tensors: the rotary"
            f" layout is another one, such as {next(iter(differing))}"
        )
        yield Place(file="").error("rotary layout", what, _REMEDY)
    else:
        what = f"{len(differing)} of {len(tensors)} tensors differ: {few(list(differing))}"
        yield Place(file="").error("", what, "it is of another commit, or was changed")


def _differing(
    tensors: list[PackageTensor], shards: PackageShards, weights: Weights
) -> Iterator[tuple[str, str]]:
    """Give names of tensors that differ, each with the order in which it would be equal, if any."""
    heads = {"q_proj": weights.model.num_heads, "k_proj": weights.model.num_kv_heads}
    for shard in dict.fromkeys(tensor.shard for tensor in tensors):
        theirs, ours = shards.read(shard), weights.read(shard)
        for tensor in [each for each in tensors if each.shard == shard]:
            if tensor.tensor == ZEROS:
                continue
            found = theirs[tensor.tensor]
            expected = ours[tensor.tensor].to(found.dtype)
            if torch.equal(expected, found):
                continue
            parts = tensor.name.split(".")
            yield tensor.name, _order(expected, found, heads.get(parts[-2], 0))


def _order(expected: Tensor, found: Tensor, heads: int) -> str:
    orders: Mapping[str, Callable[[Tensor, int], Tensor]] = {
        "interleaved": interleaved,
        "halved once more": halved,
    }
    if not heads:
        return ""
    same = (name for name, lay in orders.items() if torch.equal(lay(expected, heads), found))
    return next(same, "")


def _gguf_by_stages(
    path: Path, header: GgufHeader, weights: Weights, dtype: str
) -> tuple[Verdict, Loaded]:
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"the package gguf is not installed: {install('gguf')}")
    told = header.settings.get("general.architecture")
    if weights.model.hf_config or told != architecture_of(weights.model):
        raise InputError(f"the file's architecture is {told!r}, the store's model is another")
    read = _gguf_reader(path, weights)
    ids_T = check_ids(weights.model, weights.commit.id)
    theirs_TV = stage_logits(weights.model, read, ids_T, torch.float32)
    ours_TV = stage_logits(weights.model, weights.read, ids_T, torch.float32)
    loaded = Loaded(loader=BY_STAGES, logits_TV=theirs_TV, versions={"torch": torch.__version__})
    return compare(ours_TV, theirs_TV, dtype), loaded


def _gguf_reader(path: Path, weights: Weights) -> Callable[[str], Mapping[str, Tensor]]:
    """Give what reads the tensors of a shard from the file, in the store's layout."""
    import gguf

    found: dict[str, Any] = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    wanted = gguf_tensors(weights.model, "f32")
    missing = [tensor.name for tensor in wanted if tensor.name not in found]
    if missing:
        raise InputError(f"{path}: the file has no {few(missing)}")

    def read(shard: str) -> Mapping[str, Tensor]:
        values: dict[str, Tensor] = {}
        for tensor in [each for each in wanted if each.shard == shard]:
            stored = found[tensor.name]
            if tuple(int(n) for n in reversed(stored.shape)) != tensor.shape:
                raise InputError(f"{path}: {tensor.name} has another shape than the store")
            plain = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type).copy())
            values[tensor.tensor] = halved(plain.reshape(tensor.shape), tensor.heads)
        return values

    return read
