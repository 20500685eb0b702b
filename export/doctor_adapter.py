"""A folder of adapters for `peft`, as a doctor looks at it: it is no model, and has its own faults.

Owns the rules of such a folder. Knows nothing of the model it belongs to. Nothing is changed or
unpickled; memory is one header and one chunk.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from export.doctor_files import folder_hygiene, read_or_tell
from export.doctor_findings import Examined, Finding, Place, few, worst_first
from export.doctor_values import all_zero, extents_of, not_finite
from export.import_config import CONFIG
from export.import_files import INDEX, WEIGHTS, StoredTensor, read_header, read_json
from export.peft_export import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from trainer.model.adapters import A_ENDS, B_ENDS

EXPORT_AGAIN: Final = "export or fetch the adapter again"
_ENDS: Final = (A_ENDS, B_ENDS)
_CONFIG, _WEIGHTS = Place(file=ADAPTER_CONFIG), Place(file=ADAPTER_WEIGHTS)


def is_adapter(folder: Path) -> bool:
    """Say whether a folder holds adapters and no model."""
    has_model = any((folder / name).exists() for name in (CONFIG, INDEX, WEIGHTS))
    return (folder / ADAPTER_CONFIG).exists() and not has_model


def examine_adapter(folder: Path) -> Examined:
    """Look at configuration, names, shapes and values."""
    findings: list[Finding] = []
    config = read_or_tell(read_json, folder / ADAPTER_CONFIG, EXPORT_AGAIN, findings)
    tensors = _read_tensors(folder, findings)
    if config is not None:
        findings += _config_findings(config)
        findings += _shape_findings(config, tensors)
        findings += _target_findings(config, tensors)
    findings += _pair_findings(tensors)
    findings += folder_hygiene(folder)
    extents = extents_of(tensors)
    values, looked = not_finite(extents.values())
    ups = [extent for name, extent in extents.items() if name.endswith(B_ENDS)]
    if ups and all(map(all_zero, ups)):
        what = "every lora_B is zero: with it the model is its base"
        findings.append(_WEIGHTS.warning("", what, "train it, or leave it out"))
    return Examined(
        path=str(folder),
        kind="adapter",
        tensors=len(tensors),
        weight_bytes=sum(tensor.spec.bytes for tensor in tensors.values()),
        values_read=looked,
        against=None,
        findings=worst_first([*findings, *values]),
    )


def _read_tensors(folder: Path, findings: list[Finding]) -> dict[str, StoredTensor]:
    path = folder / ADAPTER_WEIGHTS
    if not path.exists():
        findings.append(_WEIGHTS.error("", "it is not there", EXPORT_AGAIN))
        return {}
    return read_or_tell(read_header, path, EXPORT_AGAIN, findings) or {}


def _config_findings(config: Mapping[str, Any]) -> Iterator[Finding]:
    kind, rank = config.get("peft_type"), config.get("r")
    yield _CONFIG.note(
        "peft_type",
        f"this is an adapter ({kind}, rank {rank}), no whole model",
        "peft loads it beside its base; a whole model is looked at when it is merged",
    )
    if kind != "LORA":
        yield _CONFIG.warning("peft_type", f"it is {kind!r}", "only LORA is looked at closely")
    if not isinstance(rank, int) or rank < 1:
        yield _CONFIG.error("r", f"it is {rank!r}, no rank", EXPORT_AGAIN)
    if not config.get("base_model_name_or_path"):
        yield _CONFIG.note(
            "base_model_name_or_path",
            "it names no base: peft's Auto classes cannot load it, PeftModel beside a base can",
            "write its name or folder there, or use `export-hf STORE --adapter --base-model NAME`",
        )


def _pair_findings(tensors: Mapping[str, StoredTensor]) -> Iterator[Finding]:
    halves = {module: [module + end in tensors for end in _ENDS] for module in _modules(tensors)}
    lone = [module for module, found in halves.items() if not all(found)]
    if lone:
        what = f"{few(lone)} has one half of an adapter"
        yield _WEIGHTS.error("", what, EXPORT_AGAIN)
    other = sorted(tensors.keys() - set(_of_adapters(tensors)))
    if other:
        yield _WEIGHTS.note("", f"{few(other)}: no lora_A or lora_B of a module")


def _shape_findings(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> Iterator[Finding]:
    if config.get("rank_pattern"):
        return  # a rank a module
    rank = config.get("r")
    for name in _of_adapters(tensors):
        shape = tensors[name].spec.shape
        axis = 0 if name.endswith(A_ENDS) else 1
        if len(shape) == 2 and shape[axis] != rank:
            what = f"its shape is {list(shape)}, and r is {rank}: peft refuses it"
            yield _WEIGHTS.error(name, what, EXPORT_AGAIN)


def _target_findings(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> Iterator[Finding]:
    targets = config.get("target_modules")
    if not isinstance(targets, list) or not tensors:
        return  # a pattern, which only the model's own names tell apart
    modules = _modules(tensors)
    lost = [m for m in modules if not any(f".{m}".endswith(f".{t}") for t in targets)]
    if lost:
        what = f"peft has no place for {few(lost)}, and would leave them out"
        yield _CONFIG.error("target_modules", what, EXPORT_AGAIN)
    empty = [t for t in targets if not any(f".{m}".endswith(f".{t}") for m in modules)]
    if empty:
        what = f"no tensor is of {few(empty)}: peft begins there anew"
        yield _CONFIG.warning("target_modules", what, EXPORT_AGAIN)


def _of_adapters(tensors: Mapping[str, StoredTensor]) -> list[str]:
    return [name for name in tensors if name.endswith(_ENDS)]


def _modules(tensors: Mapping[str, StoredTensor]) -> list[str]:
    names = _of_adapters(tensors)
    return sorted({name.removesuffix(A_ENDS).removesuffix(B_ENDS) for name in names})
