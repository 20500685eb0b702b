"""The configuration of a package: do its doubled forms agree, and is what readers derive written?

Owns the rotary forms of version 4 and 5, the two names of the dtype, and fields that are left out.
Knows nothing of tensors or tokenizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from export.doctor_findings import Finding, Place
from export.families import FAMILIES
from export.import_config import CONFIG, DEFAULT_THETA

_PLACE = Place(file=CONFIG)


def config_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Look at what the configuration alone can tell."""
    yield from _family(config)
    yield from _rotary(config)
    yield from _dtype(config)
    yield from _derived(config)


def _family(config: Mapping[str, Any]) -> Iterator[Finding]:
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        remedy = "name the family, such as llama"
        yield _PLACE.error("model_type", f"it is {model_type!r}: nobody can load this", remedy)
    elif model_type not in FAMILIES:
        what = f"{model_type} is none of {', '.join(FAMILIES)}: names and shapes were not compared"
        yield _PLACE.note("model_type", what)
    if not config.get("architectures"):
        remedy = "name the class, such as LlamaForCausalLM: vLLM chooses by it"
        yield _PLACE.warning("architectures", "it is missing", remedy)
    quantised = config.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        what = f"the weights are quantised ({method}): names and shapes were not compared"
        yield _PLACE.note("quantization_config", what)


def _rotary(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Compare `rope_theta` and `rope_scaling` of version 4 with `rope_parameters` of version 5."""
    theta, new = config.get("rope_theta"), config.get("rope_parameters")
    scaling = _typed(config.get("rope_scaling"))
    if not isinstance(new, dict):
        if theta is None and config.get("model_type") in FAMILIES:
            what = f"it is left out: readers take their default, {DEFAULT_THETA:g} in most"
            yield _PLACE.note("rope_theta", what, "write it")
        return
    if any(isinstance(value, dict) for value in new.values()):
        return  # a set for each kind of layer, which the old form cannot say
    inner = new.get("rope_theta")
    if theta is None and inner is not None:
        what = f"only rope_parameters has the base, {inner:g}: version 4 computes with its default"
        yield _PLACE.warning("rope_theta", what, f"write rope_theta: {inner:g} too")
    if theta is not None and inner is not None and theta != inner:
        what = f"it is {theta:g}, and rope_parameters has {inner:g}: two readers, two models"
        yield _PLACE.error("rope_theta", what, "make them equal: --against tells which is right")
    stretched = _typed({k: v for k, v in new.items() if k != "rope_theta"})
    if stretched is not None and scaling is None:
        what = f"only rope_parameters stretches positions ({stretched['rope_type']})"
        yield _PLACE.warning("rope_scaling", what, "write rope_scaling too: version 4 reads it")
    elif scaling is not None and stretched != scaling:
        differing = sorted(
            name
            for name in {**scaling, **(stretched or {})}
            if scaling.get(name) != (stretched or {}).get(name)
        )
        what = f"it differs from rope_parameters in {', '.join(differing)}: two readers, two models"
        yield _PLACE.error("rope_scaling", what, "make them equal: --against tells which is right")


def _typed(scaling: Any) -> dict[str, Any] | None:
    """Give a set of scaling parameters under one name of its type; None where nothing is scaled."""
    if not isinstance(scaling, dict):
        return None
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    found = {k: v for k, v in scaling.items() if k not in ("type", "rope_type", "rope_theta")}
    return {**found, "rope_type": kind}


def _dtype(config: Mapping[str, Any]) -> Iterator[Finding]:
    new, old = config.get("dtype"), config.get("torch_dtype")
    if new is not None and old is not None and new != old:
        what = f"it is {new}, and torch_dtype is {old}: versions load different forms"
        yield _PLACE.error("dtype", what, "make them equal")
    elif new is None and old is None:
        what = "neither dtype nor torch_dtype is there: some readers take float32, some bfloat16"
        yield _PLACE.warning("dtype", what, "write both")
    elif old is None:
        what = "torch_dtype is missing: older versions of transformers and vLLM read only that"
        yield _PLACE.warning("torch_dtype", what, f"write torch_dtype: {new} too")


def _derived(config: Mapping[str, Any]) -> Iterator[Finding]:
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if config.get("model_type") not in FAMILIES or not _is_size(heads) or not _is_size(hidden):
        return
    if config.get("head_dim") is None:
        what = f"it is left out: readers derive it, most as {hidden // heads}"
        yield _PLACE.note("head_dim", what, "write it")
        if hidden % heads:
            what = f"it is left out, and hidden_size {hidden} is no multiple of {heads} heads"
            yield _PLACE.error("head_dim", what, "write it")
    groups = config.get("num_key_value_heads")
    if groups is None:
        what = f"it is left out: readers derive it, most as {heads}"
        yield _PLACE.note("num_key_value_heads", what, "write it")
    elif not _is_size(groups) or heads % groups:
        what = f"it is {groups!r}, which does not divide {heads} heads evenly"
        yield _PLACE.error("num_key_value_heads", what, "see the rows of k_proj: rows / head_dim")
    if config.get("tie_word_embeddings") is None:
        default = FAMILIES[config["model_type"]].tied_by_default
        what = f"it is left out: readers take {str(default).lower()} for this family"
        yield _PLACE.note("tie_word_embeddings", what, "write it")


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0
