"""The tokenizer of a package against its configuration: vocabulary, special ids, class, template.

Owns what loaders of versions 4 and 5 of transformers make of the settings. Knows nothing of
weights. Two places that name different ids for the same role make a model that never stops, or
stops at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer

from export.doctor_files import read_or_tell
from export.doctor_findings import Finding, Place
from export.import_config import CONFIG
from export.import_files import read_json
from export.package_tokenizer import (
    CLASS_OF_ALL_VERSIONS,
    SETTINGS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    cuts_as_qwen2,
)

GENERATION = "generation_config.json"
ROLES = ("bos", "eos", "pad")
OLD_FORMS = ("tokenizer.model", "vocab.json", "spiece.model")
ONLY_VERSION_5 = ("TokenizersBackend", "SentencePieceBackend", "PythonBackend")
KNOWN_TO_BOTH = frozenset(
    f"{name}{fast}"
    for name in (
        *("Llama", "GPT2", "Qwen2", "Gemma", "CodeGen", "GPTNeoX", "Bert", "Roberta", "T5"),
        *("PreTrained", "Cohere", "Bloom", "XLMRoberta", "Albert", "CamemBERT"),
    )
    for fast in ("Tokenizer", "TokenizerFast")
)
# Ids that transformers fills in where a configuration says nothing, by family.
_FILLED_IN: Mapping[str, tuple[int | None, int | None, int | None]] = MappingProxyType(
    {
        "llama": (1, 2, None),
        "mistral": (1, 2, None),
        "gemma": (2, 1, 0),
        "gemma2": (2, 1, 0),
        "gemma3_text": (2, 1, 0),
        "phi": (1, 2, None),
        "phi3": (1, 32000, 32000),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """What could be read of the tokenizer's files."""

    tokenizer: Tokenizer | None
    settings: Mapping[str, Any]


def tokenizer_findings(folder: Path, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Look at the tokenizer's files, and at the ids that they and the configurations name."""
    findings: list[Finding] = []
    read = Read(
        tokenizer=_tokenizer(folder, findings),
        settings=_object(folder / SETTINGS_FILE, findings),
    )
    generation = _object(folder / GENERATION, findings)
    yield from findings
    if read.tokenizer is not None:
        yield from _vocabulary(read.tokenizer, config)
        yield from _class(folder, read, config)
    yield from _template(folder, read)
    yield from _ids(read, config, generation, has_generation=(folder / GENERATION).is_file())


def _tokenizer(folder: Path, findings: list[Finding]) -> Tokenizer | None:
    path, place = folder / TOKENIZER_FILE, Place(file=TOKENIZER_FILE)
    if not path.is_file():
        old = [name for name in OLD_FORMS if (folder / name).is_file()]
        if old:
            findings.append(place.note("", f"it is not there, only {', '.join(old)}"))
        else:
            remedy = "put the model's tokenizer.json into the folder"
            findings.append(place.warning("", "there is no tokenizer", remedy))
        return None
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for all
        what = f"the tokenizers library cannot read it ({error})"
        findings.append(place.error("", what, "fetch the file again"))
        return None


def _object(path: Path, findings: list[Finding]) -> Mapping[str, Any]:
    return read_or_tell(read_json, path, "fetch the file again", findings) or {}


def _vocabulary(tokenizer: Tokenizer, config: Mapping[str, Any]) -> Iterator[Finding]:
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    size, rows = max(vocabulary.values(), default=-1) + 1, config.get("vocab_size")
    place = Place(file=TOKENIZER_FILE)
    if type(rows) is int and size > rows:
        what = f"it has {size:,} ids and the model {rows:,}: the last have no embedding"
        yield place.error("model.vocab", what, "it belongs to another model: fetch the right one")
    if type(rows) is int and size < rows:
        what = f"it has {size:,} ids and the model {rows:,}: the last stand for no text"
        yield place.note("model.vocab", what, "fine where the vocabulary was padded on purpose")


def _class(folder: Path, read: Read, config: Mapping[str, Any]) -> Iterator[Finding]:
    place = Place(file=SETTINGS_FILE)
    if not (folder / SETTINGS_FILE).is_file():
        remedy = f"write one with tokenizer_class {CLASS_OF_ALL_VERSIONS} and the special tokens"
        yield place.warning("", "it is missing: loaders guess class and special tokens", remedy)
        return
    name = read.settings.get("tokenizer_class")
    if name in ONLY_VERSION_5:
        what = f"version 4 of transformers knows no {name}"
        yield place.warning("tokenizer_class", what, f"write {CLASS_OF_ALL_VERSIONS}")
    elif name is None:
        what = "it is left out: loaders take that of the family"
        yield place.warning("tokenizer_class", what, f"write {CLASS_OF_ALL_VERSIONS}")
    elif name not in KNOWN_TO_BOTH:
        what = f"whether versions 4 and 5 of transformers both know {name} is not known here"
        yield place.note("tokenizer_class", what)
    text = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
    is_qwen2 = config.get("model_type") == "qwen2"
    if is_qwen2 and read.tokenizer is not None and not cuts_as_qwen2(json.loads(text)):
        what = "version 5 of transformers loads Qwen2's way of cutting for a qwen2, this is another"
        yield Place(file=CONFIG).error(
            "model_type", what, "export it as llama: ids differ silently"
        )


def _template(folder: Path, read: Read) -> Iterator[Finding]:
    beside, inside = (folder / TEMPLATE_FILE).is_file(), read.settings.get("chat_template")
    if beside and inside is None and read.settings:
        what = f"the chat template is in {TEMPLATE_FILE} alone: older readers do not find it"
        yield Place(file=SETTINGS_FILE).warning("chat_template", what, "write it here too")
    if beside and isinstance(inside, str):
        text = (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
        if text.strip() != inside.strip():
            what = f"it differs from {TEMPLATE_FILE}: readers disagree on which counts"
            yield Place(file=SETTINGS_FILE).error("chat_template", what, "make them equal")


def _ids(
    read: Read,
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    *,
    has_generation: bool,
) -> Iterator[Finding]:
    for position, role in enumerate(ROLES):
        field = f"{role}_token_id"
        filled = _FILLED_IN.get(str(config.get("model_type")), (None, None, None))[position]
        of_config = _as_set(config.get(field, filled))
        of_generation = _as_set(generation.get(field)) if has_generation else of_config
        yield from _in_range(field, config, generation)
        if field not in config and filled is not None:
            what = f"it is left out: transformers fills in {filled} for this family"
            yield Place(file=CONFIG).note(field, what, "write it, null where there is none")
        if of_config and of_generation and not of_config & of_generation:
            what = f"it is {generation[field]}, and {CONFIG} has {config.get(field, filled)}"
            remedy = "make them agree: texts end by this one, and some readers take the other"
            yield Place(file=GENERATION).error(field, what, remedy)
        yield from _of_tokenizer(read, role, of_config, of_generation)


def _in_range(
    field: str, config: Mapping[str, Any], generation: Mapping[str, Any]
) -> Iterator[Finding]:
    size = config.get("vocab_size")
    for name, values in ((CONFIG, config), (GENERATION, generation)):
        beyond = [i for i in _as_set(values.get(field)) if type(size) is int and not 0 <= i < size]
        if beyond:
            what = f"it is {beyond[0]}, and the model has {size:,} ids"
            yield Place(file=name).error(field, what, "write an id of the vocabulary, or null")


def _of_tokenizer(
    read: Read, role: str, of_config: set[int], of_generation: set[int]
) -> Iterator[Finding]:
    named = read.settings.get(f"{role}_token")
    token = named.get("content") if isinstance(named, dict) else named
    if not isinstance(token, str) or read.tokenizer is None:
        return
    place, field = Place(file=SETTINGS_FILE), f"{role}_token"
    number = read.tokenizer.token_to_id(token)
    if number is None:
        what = f"{token!r} is no token of {TOKENIZER_FILE}"
        yield place.error(field, what, "name a token that is there")
    elif role == "eos" and number not in of_generation:
        told = sorted(of_generation) or "none"
        what = f"{token!r} has id {number}, and texts end with {told}: the model may never stop"
        yield place.error(field, what, f"add {number} to eos_token_id in {CONFIG} and {GENERATION}")
    elif number not in of_config | of_generation:
        told = sorted(of_config) or "none"
        what = f"{token!r} has id {number}, and {CONFIG} has {told} for {role}_token_id"
        yield place.warning(field, what, f"make {role}_token_id {number}")


def _as_set(value: Any) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {each for each in values if type(each) is int}
