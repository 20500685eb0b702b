"""The tokenizer of a package: its files, and the ids that configuration and tokenizer agree on.

Owns where the tokenizer comes from (a folder, the store), which class loads it in every version of
transformers, and the comparison with the model's vocabulary. `tokenizer.json` is passed on byte for
byte. Knows nothing of weights.

An id of the model counts as special only where the tokenizer has a special token for it: a run
without a tokenizer has the defaults 0, 1 and 2, and a text must not end at the letter that is id 2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from export.hf_config import SpecialIds
from export.source_package import read_tokenizer_files
from shardb import ReadView
from trainer.errors import InputError
from trainer.model.config import ModelConfig
from trainer.model.stored import TOKENIZER_SHARD, read_bytes

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
MAP_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.jinja"
# Version 5 calls it TokenizersBackend, which version 4 does not know; both know this name.
CLASS_OF_ALL_VERSIONS = "PreTrainedTokenizerFast"
# How Qwen2 cuts texts, as it stands in a JSON file.
QWEN2_PATTERN = json.dumps(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ROLES = ("bos", "eos", "pad", "unk")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageTokenizer:
    """Files by name, the special ids, and the largest id plus one; `notes` are for people."""

    files: Mapping[str, bytes]
    special: SpecialIds
    size: int
    notes: tuple[str, ...] = field(default=())

    @property
    def json_bytes(self) -> bytes:
        """Give the content of tokenizer.json."""
        return self.files[TOKENIZER_FILE]

    @property
    def bos_token(self) -> str | None:
        """Give the token that begins a text, as text."""
        if self.special.bos is None:
            return None
        token: str | None = Tokenizer.from_str(self.json_bytes.decode()).id_to_token(
            self.special.bos
        )
        return token


def tokenizer_of_store(view: ReadView, model: ModelConfig) -> PackageTokenizer | None:
    """Give the tokenizer that the store holds; None where it holds none."""
    if TOKENIZER_SHARD not in view.names():
        return None
    data = read_bytes(view, TOKENIZER_SHARD)
    kept = read_tokenizer_files(view)
    name = f"the store's {TOKENIZER_SHARD}"
    return _assembled({**kept, TOKENIZER_FILE: data}, model, name, keep=SETTINGS_FILE in kept)


def tokenizer_of_folder(folder: Path, model: ModelConfig) -> PackageTokenizer:
    """Read a folder with a tokenizer.json; InputError names what is wrong with it."""
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise InputError(
            f"--tokenizer {folder}: it has no {TOKENIZER_FILE}: give the folder of one"
        )
    named = (TOKENIZER_FILE, SETTINGS_FILE, TEMPLATE_FILE)
    files = {n: (folder / n).read_bytes() for n in named if (folder / n).is_file()}
    return _assembled(files, model, str(path), keep=False)


def check_vocabulary(
    tokenizer: PackageTokenizer, model: ModelConfig, *, allow_padded: bool
) -> None:
    """Refuse a tokenizer of another vocabulary than the model's."""
    if tokenizer.size > model.vocab_size:
        raise InputError(
            f"the tokenizer has {tokenizer.size:,} ids and the model {model.vocab_size:,}: the last"
            f" {tokenizer.size - model.vocab_size:,} have no embedding, so it is not the tokenizer"
            " of this model: give another --tokenizer"
        )
    if tokenizer.size < model.vocab_size and not allow_padded:
        raise InputError(
            f"the tokenizer has {tokenizer.size:,} ids and the model {model.vocab_size:,}: the last"
            f" {model.vocab_size - tokenizer.size:,} stand for no text. Where the vocabulary was"
            " padded on purpose, --allow-padded-vocabulary exports it as it is; else give another"
            " --tokenizer"
        )


def is_of_qwen2(tokenizer: PackageTokenizer) -> bool:
    """Say whether it cuts texts as Qwen2's does: version 5 of transformers loads no other there."""
    return cuts_as_qwen2(json.loads(tokenizer.json_bytes))


def cuts_as_qwen2(document: Mapping[str, Any]) -> bool:
    """Say so of the content of a tokenizer.json."""
    return QWEN2_PATTERN in json.dumps(document.get("pre_tokenizer"), ensure_ascii=False) and (
        document.get("normalizer") == {"type": "NFC"}
    )


def with_chat_template(tokenizer: PackageTokenizer, template: str) -> PackageTokenizer:
    """Put a chat template at both places that readers look at."""
    settings = json.loads(tokenizer.files[SETTINGS_FILE])
    files = {
        **tokenizer.files,
        SETTINGS_FILE: _encoded({**settings, "chat_template": template}),
        TEMPLATE_FILE: template.encode(),
    }
    return PackageTokenizer(
        files=files, special=tokenizer.special, size=tokenizer.size, notes=tokenizer.notes
    )


def _assembled(
    files: Mapping[str, bytes], model: ModelConfig, name: str, *, keep: bool
) -> PackageTokenizer:
    """Make the files of a package of those at hand; `keep` passes the settings on untouched."""
    tokenizer = _parsed(files[TOKENIZER_FILE], name)
    given = _settings(files.get(SETTINGS_FILE), name)
    tokens = _named_tokens(tokenizer, given, model)
    ids = {role: tokenizer.token_to_id(token) for role, token in tokens.items()}
    special = SpecialIds(bos=ids.get("bos"), eos=ids.get("eos"), pad=ids.get("pad"))
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    made = dict(files)
    if not keep:
        named = {f"{role}_token": token for role, token in tokens.items()}
        made[SETTINGS_FILE] = _encoded(
            {
                "clean_up_tokenization_spaces": False,
                "model_max_length": model.max_position_embeddings,
                **given,
                **named,
                "tokenizer_class": CLASS_OF_ALL_VERSIONS,
            }
        )
        made[MAP_FILE] = _encoded(named)
        if TEMPLATE_FILE not in made and isinstance(given.get("chat_template"), str):
            made[TEMPLATE_FILE] = given["chat_template"].encode()
    return PackageTokenizer(
        files=made,
        special=special,
        size=max(vocabulary.values(), default=-1) + 1,
        notes=tuple(_disagreements(special, model, tokenizer)),
    )


def _parsed(data: bytes, name: str) -> Tokenizer:
    # The library raises plain Exception for whatever it cannot read.
    try:
        return Tokenizer.from_str(data.decode())
    except Exception as error:
        raise InputError(
            f"{name}: no tokenizer.json of the tokenizers library ({error})"
        ) from error


def _settings(data: bytes | None, name: str) -> dict[str, Any]:
    if data is None:
        return {}
    try:
        settings = json.loads(data)
    except ValueError as error:
        raise InputError(f"{name}: the {SETTINGS_FILE} beside it is no JSON ({error})") from error
    if not isinstance(settings, dict):
        raise InputError(f"{name}: the {SETTINGS_FILE} beside it is no JSON object")
    # What only the tokenizer's own former class understood.
    dropped = ("tokenizer_file", "name_or_path", "auto_map", "backend", "is_local")
    return {key: value for key, value in settings.items() if key not in dropped}


def _named_tokens(
    tokenizer: Tokenizer, given: Mapping[str, Any], model: ModelConfig
) -> dict[str, str]:
    """Give the special token of each role: as the settings name it, else by the model's id."""
    special = {i: t.content for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    ids = {"bos": model.bos_token_id, "eos": model.eos_token_id, "pad": model.pad_token_id}
    found: dict[str, str] = {}
    for role in _ROLES:
        value = given.get(f"{role}_token")
        token = value.get("content") if isinstance(value, dict) else value
        if token is None and role in ids and f"{role}_token" not in given:
            token = special.get(ids[role])
        if token is None and role == "unk":
            token = getattr(tokenizer.model, "unk_token", None)
        if isinstance(token, str) and tokenizer.token_to_id(token) is not None:
            found[role] = token
    return found


def _disagreements(special: SpecialIds, model: ModelConfig, tokenizer: Tokenizer) -> list[str]:
    if special.eos is None:
        return ["no special token of the tokenizer ends a text, so readers stop at their limit"]
    if special.eos != model.eos_token_id:
        token = tokenizer.id_to_token(special.eos)
        ends = f"the tokenizer ends texts with {token!r} (id {special.eos})"
        return [f"{ends}, the run with id {model.eos_token_id}: the package has the tokenizer's"]
    return []


def _encoded(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
