"""Tensors against configuration: names, shapes, forms, and the head that is tied or not.

Owns what a model of a known family must hold, and what differs. Knows nothing of files' layout or
tokenizers. A shape that is wrong is told with what the tensor would ask of the configuration.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from export.doctor_findings import NAMED_MAX, Finding, Place, few
from export.families import FAMILIES, places
from export.families import Place as Wanted
from export.import_config import CONFIG, read_model_config
from export.import_files import StoredTensor
from export.import_names import DERIVED, EMBEDDINGS, HEAD, PREFIXES, equal_bytes
from export.package_tensors import TORCH_NAMES
from trainer.errors import InputError
from trainer.model.config import ModelConfig

_PLACE = Place(file=CONFIG)
_ROWS = re.compile(r".*\.self_attn\.(q|k|v)_proj\.weight")


def name_findings(
    config: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> Iterator[Finding]:
    """Compare with what the configuration asks for, where it is of a known family."""
    yield from _forms(config, stored)
    if config.get("quantization_config") is not None or config.get("model_type") not in FAMILIES:
        return
    try:
        read = read_model_config(_with_new_forms(config))
        wanted = places(read.family, read.model)
    except InputError as error:
        what = str(error).removeprefix(f"{CONFIG}: ")
        grade = _PLACE.note if "pip install" in what else _PLACE.error
        yield grade("", what, "names and shapes were not compared")
        return
    found = {name: tensor for name, tensor in stored.items() if not DERIVED.fullmatch(name)}
    yield from _head(found, tied=read.model.tied_embeddings)
    if read.model.tied_embeddings:
        found.pop(HEAD, None)
    yield from _names(wanted, found)
    yield from _shapes(wanted, found, read.model)


def _with_new_forms(config: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out old forms that have new ones: that they disagree is a finding of its own."""
    old = {"dtype": ("torch_dtype",), "rope_parameters": ("rope_theta", "rope_scaling")}
    dropped = {each for new, names in old.items() if config.get(new) for each in names}
    return {name: value for name, value in config.items() if name not in dropped}


def _head(found: Mapping[str, StoredTensor], *, tied: bool) -> Iterator[Finding]:
    field = "tie_word_embeddings"
    head, embeddings = found.get(HEAD), found.get(EMBEDDINGS)
    if tied and head is not None and embeddings is not None:
        if not equal_bytes(head, embeddings):
            what = f"it is true, but {HEAD} differs from {EMBEDDINGS}: the trained head is dropped"
            yield _PLACE.error(field, what, "set it to false")
        else:
            yield _PLACE.note(field, f"{HEAD} is stored once more beside {EMBEDDINGS}")
    if not tied and head is None and embeddings is not None:
        what = f"it is false, but there is no {HEAD}: the head would be random"
        yield _PLACE.error(field, what, "set it to true, or fetch the missing tensor")
    if not tied and head is not None and embeddings is not None and equal_bytes(head, embeddings):
        what = f"it is false, but {HEAD} equals {EMBEDDINGS}"
        yield _PLACE.warning(field, what, "set it to true, unless they are meant to part")


def _names(wanted: Mapping[str, Wanted], found: Mapping[str, StoredTensor]) -> Iterator[Finding]:
    missing = sorted(wanted.keys() - found.keys() - {HEAD})
    extra = sorted(found.keys() - wanted.keys())
    for prefix in PREFIXES:
        stripped = {name.replace(prefix, "", 1) for name in extra if prefix in name}
        if missing and set(missing) <= stripped:
            what = f"every name begins with {prefix!r}: the model was saved from inside a wrapper"
            yield _file(found, extra[0]).error(extra[0], what, "take the prefix away, save again")
            return
    renamed: set[str] = set()
    for name in missing[:NAMED_MAX]:
        near = difflib.get_close_matches(name, [e for e in extra if e not in renamed], 1, 0.75)
        renamed.update(near)
        what = "it is missing" + (f"; {near[0]} is there instead" if near else "")
        remedy = f"rename it to {name}" if near else "fetch the package again, or mend config.json"
        place = _file(found, near[0]) if near else Place(file="")
        yield place.error(name, f"{what}: loaders fill it with random values", remedy)
    if len(missing) > NAMED_MAX:
        what = f"{len(missing) - NAMED_MAX} more tensors are missing"
        yield Place(file="").error("", what, "config.json and weights are of different models")
    strange = [name for name in extra if name not in renamed]
    if strange:
        what = f"{len(strange)} tensors are not of this model: {few(strange)}: loaders drop them"
        remedy = "config.json and weights are of different models, or tensors were renamed"
        yield _file(found, strange[0]).error(strange[0], what, remedy)


def _shapes(
    wanted: Mapping[str, Wanted], found: Mapping[str, StoredTensor], model: ModelConfig
) -> Iterator[Finding]:
    wrong = [n for n in wanted if n in found and found[n].spec.shape != wanted[n].shape]
    for name in wrong[:NAMED_MAX]:
        shape = found[name].spec.shape
        what = f"it has shape {list(shape)}, {CONFIG} asks for {list(wanted[name].shape)}"
        yield _file(found, name).error(name, what, _remedy(name, shape, model))
    if len(wrong) > NAMED_MAX:
        what = f"{len(wrong) - NAMED_MAX} more tensors have another shape"
        yield Place(file="").error("", what, "see the first ones")


def _remedy(name: str, shape: tuple[int, ...], model: ModelConfig) -> str:
    """Say which setting the tensor would fit."""
    matched = _ROWS.fullmatch(name)
    if matched is not None and shape:
        setting = "head_dim or num_attention_heads" if matched[1] == "q" else "num_key_value_heads"
        fits = f"{shape[0]} rows are {shape[0] / model.head_dim:g} heads of {model.head_dim}"
        return f"mend {setting}: {fits}, or {model.num_heads} of {shape[0] / model.num_heads:g}"
    if name in (EMBEDDINGS, HEAD) and shape:
        return f"mend vocab_size (the rows say {shape[0]}) or hidden_size"
    return f"mend the sizes in {CONFIG}, or fetch the weights that belong to it"


def _forms(config: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> Iterator[Finding]:
    sums: dict[str, int] = {}
    for tensor in stored.values():
        sums[tensor.spec.dtype] = sums.get(tensor.spec.dtype, 0) + tensor.spec.bytes
    told = config.get("dtype") or config.get("torch_dtype")
    if not sums or told is None:
        return
    most = max(sums, key=lambda form: sums[form])
    name = TORCH_NAMES.get(most, most)
    if str(told).removeprefix("torch.") != name and config.get("quantization_config") is None:
        what = f"it is {told}, and most weights are {name}: loaders convert to what it says"
        yield _PLACE.warning("dtype", what, f"write {name}, unless the conversion is meant")
    if len(sums) > 1:
        yield _PLACE.note("dtype", f"the weights have the forms {', '.join(sorted(sums))}")


def _file(found: Mapping[str, StoredTensor], name: str) -> Place:
    return Place(file=found[name].path.name if name in found else "")
