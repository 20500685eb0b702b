"""The files of a folder, as a doctor looks at them: all that is wrong, not the first thing alone.

Owns index against headers, names and modes of files, leftovers, and the digests of an export's own
manifest. Knows nothing of configuration. Invariants: headers are read within bounds, nothing is
unpickled, nothing is changed; memory is one header and one chunk.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from export.doctor_findings import Finding, Place, few
from export.import_files import INDEX, WEIGHTS, StoredTensor, read_header, read_json
from shardb.layout import HEADER_LIMIT_BYTES
from trainer.errors import InputError

MANIFEST = "export_manifest.json"
READABLE_BY_ALL = 0o044
_LEFTOVERS = ("*.tmp", "*.incomplete", "*.lock", "*.part", "*.partial", "*.crdownload", "*~")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_LOADERS_FORMATS = ("pt", "tf", "flax", "mlx")

Content = TypeVar("Content")


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderWeights:
    """The tensors that a loader would read, and what is wrong with the files that hold them."""

    tensors: Mapping[str, StoredTensor]
    findings: tuple[Finding, ...]


def read_or_tell(
    read: Callable[[Path], Content], path: Path, remedy: str, findings: list[Finding]
) -> Content | None:
    """Read a file; one that cannot be trusted is a finding, and gives None."""
    try:
        return read(path)
    except (InputError, OSError) as error:
        what = str(error).removeprefix(f"{path}: ")
        findings.append(Place(file=path.name).error("", what, remedy))
        return None


def folder_weights(folder: Path) -> FolderWeights:
    """Read every header; a file that cannot be trusted is a finding, and gives no tensors."""
    findings: list[Finding] = []
    index, told = _index(folder, findings)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    read = sorted({*told.values()} | ({WEIGHTS} if index is None else set()))
    findings += _missing_and_stray(folder, index is not None, read, names)
    headers: dict[str, dict[str, StoredTensor]] = {}
    for name in [name for name in read if name in names]:
        try:
            headers[name] = read_header(folder / name)
            findings += _metadata(folder / name)
        except (InputError, OSError) as error:
            what = str(error).removeprefix(f"{folder / name}: ")
            findings.append(Place(file=name).error("", what, "fetch or export the file again"))
    found = {tensor: spec for header in headers.values() for tensor, spec in header.items()}
    if index is not None:
        findings += _index_against(told, headers)
        findings += _total(index, found, complete=len(headers) == len(read))
    return FolderWeights(tensors=found, findings=tuple(findings))


def _index(folder: Path, findings: list[Finding]) -> tuple[dict[str, Any] | None, dict[str, str]]:
    place = Place(file=INDEX)
    try:
        index = read_json(folder / INDEX)
    except (InputError, OSError) as error:
        findings.append(place.error("", str(error), "fetch or export the file again"))
        return {}, {}
    if index is None:
        return None, {}
    told = index.get("weight_map")
    if not isinstance(told, dict) or not told:
        findings.append(place.error("weight_map", "there is none", "fetch the file again"))
        return index, {}
    outside = {tensor: name for tensor, name in told.items() if not _is_name(name)}
    if outside:
        tensor, name = next(iter(outside.items()))
        what = f"{tensor} is in {name!r}, which is no file of this folder"
        findings.append(place.error("weight_map", what, "do not use it: fetch it again"))
    return index, {tensor: name for tensor, name in told.items() if tensor not in outside}


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name == os.path.basename(name) and not name.startswith(".")


def _missing_and_stray(
    folder: Path, has_index: bool, read: list[str], names: list[str]
) -> Iterator[Finding]:
    for name in [name for name in read if name not in names]:
        if has_index:
            what = f"{INDEX} names it, and it is not there"
        elif any(folder.glob("*.bin")):
            what = "there are no safetensors weights, only pickles, which run code when loaded"
        else:
            what = f"it is not there, and there is no {INDEX}"
        yield Place(file=name).error("", what, "fetch or export the package again")
    strays = [name for name in names if name not in read]
    for name in strays:
        if has_index and name == WEIGHTS:
            what = f"it lies beside {INDEX}, and loaders disagree on which counts"
            yield Place(file=name).error("", what, "remove the one that is stale")
        else:
            what = "no index names it: loaders that read every file merge it into the model"
            yield Place(file=name).warning("", what, "remove it, or fetch its index")


def _metadata(path: Path) -> list[Finding]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(min(length, HEADER_LIMIT_BYTES)))
    metadata = header.get("__metadata__")
    told = metadata.get("format") if isinstance(metadata, dict) else None
    if told in _LOADERS_FORMATS:
        return []
    what = "it is missing" if told is None else f"it is {told!r}"
    remedy = 'save it with metadata {"format": "pt"}: version 4 of transformers needs it'
    return [Place(file=path.name).error("__metadata__.format", what, remedy)]


def _index_against(
    told: Mapping[str, str], headers: Mapping[str, Mapping[str, StoredTensor]]
) -> Iterator[Finding]:
    place, remedy = Place(file=INDEX), "fetch index and files together"
    for name, header in headers.items():
        ghosts = [tensor for tensor, file in told.items() if file == name and tensor not in header]
        if ghosts:
            yield place.error("weight_map", f"{name} does not hold {few(ghosts)}", remedy)
        extra = sorted(tensor for tensor in header if told.get(tensor) != name)
        if extra:
            what = f"{name} holds {few(extra)}, which the index does not put there"
            yield place.error("weight_map", what, remedy)


def _total(
    index: Mapping[str, Any], found: Mapping[str, StoredTensor], *, complete: bool
) -> Iterator[Finding]:
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    actual = sum(tensor.spec.bytes for tensor in found.values())
    if complete and total != actual:
        what = f"it is {total}, and the tensors have {actual} bytes"
        yield Place(file=INDEX).warning("metadata.total_size", what, f"write {actual}")


def folder_hygiene(folder: Path) -> Iterator[Finding]:
    """Look at modes, leftovers, pickles and links that lead nowhere."""
    for path in sorted(folder.iterdir()):
        place = Place(file=path.name)
        if path.is_symlink() and not path.exists():
            yield place.error("", "the link leads nowhere", "fetch what it should lead to")
        elif any(path.match(pattern) for pattern in _LEFTOVERS):
            yield place.warning("", "a leftover of a download or an export", "remove it")
        elif path.name.startswith(".") and ".export-" in path.name:
            yield place.warning("", "what a killed export left", "remove it")
        elif any(path.match(pattern) for pattern in _PICKLES):
            yield place.warning("", "a pickle: it runs code when loaded", "remove it")
        elif path.is_file():
            yield from mode_finding(path)
    beside = folder.absolute().parent.glob(f".{folder.absolute().name}.export-*")
    for path in sorted(beside):
        what = "beside the package lies what an export left; one may be running"
        yield Place(file=path.name).note("", what, "the next export to this folder removes it")


def mode_finding(path: Path) -> list[Finding]:
    """Say when others than the owner cannot read a file."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & READABLE_BY_ALL == READABLE_BY_ALL:
        return []
    what = f"its mode is {mode:04o}: a server with another user cannot read it"
    return [Place(file=path.name).warning("mode", what, "chmod 644")]


def manifest_digests(folder: Path) -> Iterator[Finding]:
    """Compare every file with the digest that the export noted."""
    place = Place(file=MANIFEST)
    try:
        manifest = read_json(folder / MANIFEST)
    except (InputError, OSError) as error:
        yield place.warning("", str(error), "export the package again")
        return
    files = (manifest or {}).get("files")
    for name, told in files.items() if isinstance(files, dict) else ():
        expected = told.get("sha256") if isinstance(told, dict) else None
        path = folder / name
        if not _is_name(name) or not path.is_file():
            yield place.warning("files", f"{name} is not there", "export the package again")
        elif expected != _sha256(path):
            what = f"{name} was changed since it was exported"
            yield place.warning("files", what, "export the package again, or remove the manifest")


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
