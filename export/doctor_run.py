"""A package, looked at from all sides: the order in which a doctor looks.

Owns what is looked at and in which order. Knows nothing of how findings are shown. Nothing is
changed, loaded code is never run, and memory is one header and one chunk; a comparison with a store
needs what the export's own check needs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from export.doctor_adapter import examine_adapter, is_adapter
from export.doctor_against import Compared, folder_against, gguf_against
from export.doctor_config import config_findings
from export.doctor_files import (
    MANIFEST,
    folder_hygiene,
    folder_weights,
    manifest_digests,
    read_or_tell,
)
from export.doctor_findings import (
    ERROR,
    Examined,
    Finding,
    Place,
    UnreadablePackageError,
    worst_first,
)
from export.doctor_gguf import gguf_findings
from export.doctor_gguf_header import MAGIC
from export.doctor_names import name_findings
from export.doctor_tokenizer import tokenizer_findings
from export.doctor_values import extents_of, not_finite
from export.import_config import CONFIG
from export.import_files import INDEX, read_json
from export.package_weights import IMPORTED, PACKED, open_weights
from export.peft_export import ADAPTER_CONFIG
from export.verify import Load, load_afresh
from trainer.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Against:
    """The commit that a package should be."""

    store: str
    ref: str | None
    allow_network: bool = False


def examine(path: Path, against: Against | None = None, load: Load = load_afresh) -> Examined:
    """Look at a folder or a GGUF file.

    UnreadablePackageError where it is neither; errors of the store of `against` are the store's.
    """
    if path.is_dir():
        return _examine_folder(path, against, load)
    if not path.exists():
        raise InputError(f"{path}: there is no such folder or file")
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise UnreadablePackageError(
                f"{path}: no GGUF file: give the folder that holds config.json and weights, or a"
                " GGUF file"
            )
    return _examine_gguf(path, against, load)


def _examine_folder(folder: Path, against: Against | None, load: Load) -> Examined:
    if not any((folder / name).exists() for name in (CONFIG, INDEX)) and not any(
        folder.glob("*.safetensors")
    ):
        if (folder / ADAPTER_CONFIG).exists():
            remedy = "merge it into its model, and look at that"
            raise UnreadablePackageError(f"{folder}: an adapter, no whole model: {remedy}")
        what = f"{folder}: no package: it holds neither {CONFIG} nor safetensors weights"
        raise UnreadablePackageError(what + _hint(folder))
    if is_adapter(folder):
        if against is not None:
            raise InputError(
                f"{folder}: an adapter, and --against compares whole models: export it with"
                f" `export-hf {against.store} --merge --out DIR`, and give that folder"
            )
        return examine_adapter(folder)
    findings: list[Finding] = []
    weights = folder_weights(folder)
    findings += weights.findings
    config = _config(folder, findings)
    if config is not None:
        findings += config_findings(config)
        findings += name_findings(config, weights.tensors)
        findings += tokenizer_findings(folder, config)
    findings += folder_hygiene(folder)
    if (folder / MANIFEST).is_file():
        findings += manifest_digests(folder)
    values, looked = not_finite(extents_of(weights.tensors).values())
    size = sum(tensor.spec.bytes for tensor in weights.tensors.values())
    compared = None
    if against is not None:
        compared = _compared(folder, against, size, load)
    return Examined(
        path=str(folder),
        kind="folder",
        tensors=len(weights.tensors),
        weight_bytes=size,
        values_read=looked,
        against=compared.outcome if compared is not None else None,
        findings=worst_first([*_of(compared), *findings, *values]),
    )


def _compared(folder: Path, against: Against, size: int, load: Load) -> Compared:
    """Compare with the commit, its adapters merged into the base that the manifest names.

    Where it names none and there are two, with the packed one first.
    """
    told = (read_json(folder / MANIFEST) or {}).get("merged_into")
    merged_into = str(told) if told == IMPORTED else None
    found, base = _compared_with(folder, against, size, load, merged_into)
    if base == PACKED and told is None and _differs(found):
        other, _ = _compared_with(folder, against, size, load, IMPORTED)
        if not _differs(other):
            return other
    return found


def _differs(compared: Compared) -> bool:
    return any(each.severity == ERROR for each in compared.findings)


def _compared_with(
    folder: Path, against: Against, size: int, load: Load, merge_into: str | None
) -> tuple[Compared, str | None]:
    network = against.allow_network
    with open_weights(
        against.store, ref=against.ref, allow_network=network, merge_into=merge_into
    ) as ours:
        found, base = folder_against(folder, ours, size, load), ours.merged_into
    if base is not None:
        found = replace(found, outcome=f"{found.outcome}; adapters merged into the {base} base")
    return found, base


def _hint(folder: Path) -> str:
    """Say what somebody may have meant."""
    inside = sorted(path.name for path in folder.glob("*.gguf"))
    if inside:
        return f"; give the file {folder / inside[0]} itself"
    if (folder / "FORMAT").is_file() and (folder / "objects").is_dir():
        return f"; it is a store: `export-hf {folder} --out DIR` makes a package of it"
    return ""


def _config(folder: Path, findings: list[Finding]) -> dict[str, object] | None:
    told = len(findings)
    config = read_or_tell(read_json, folder / CONFIG, "fetch the file again", findings)
    if config is None and len(findings) == told:
        remedy = "fetch it: weights alone are no model"
        findings.append(Place(file=CONFIG).error("", "it is not there", remedy))
    return config


def _examine_gguf(path: Path, against: Against | None, load: Load) -> Examined:
    header, findings, looked = gguf_findings(path)
    compared = None
    if against is not None:
        with open_weights(
            against.store, ref=against.ref, allow_network=against.allow_network
        ) as ours:
            if header is not None:
                compared = gguf_against(path, header, ours, load)
    entries = header.tensors.values() if header is not None else ()
    return Examined(
        path=str(path),
        kind="gguf",
        tensors=len(entries),
        weight_bytes=sum(entry.bytes or 0 for entry in entries),
        values_read=looked,
        against=compared.outcome if compared is not None else None,
        findings=worst_first([*_of(compared), *findings]),
    )


def _of(compared: Compared | None) -> tuple[Finding, ...]:
    return compared.findings if compared is not None else ()
