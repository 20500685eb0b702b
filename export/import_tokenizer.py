"""The tokenizer of a package: its tokenizer.json, and the files that an export gives back.

Owns which files are kept, and the conversion of older forms through transformers. Knows nothing of
stores. Invariant: what is kept is the package's own bytes; only a tokenizer that was converted is
not, and a note says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shardb.extras import install
from trainer.errors import InputError

TOKENIZER = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"
BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    SENTENCEPIECE,
)
FILE_LIMIT_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFiles:
    """What is kept: `tokenizer` is a tokenizer.json, None where the package has no tokenizer."""

    tokenizer: bytes | None
    beside: Mapping[str, bytes] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_tokenizer(directory: Path, vocab_size: int) -> TokenizerFiles:
    """Read the files; InputError for one that is damaged or cannot be converted."""
    beside = {
        name: data for name in BESIDE if (data := _read(directory / name)) is not None and data
    }
    tokenizer, notes = _read(directory / TOKENIZER), []
    if tokenizer is None and {SENTENCEPIECE, "vocab.json"} & beside.keys():
        old = SENTENCEPIECE if SENTENCEPIECE in beside else "vocab.json"
        tokenizer = _converted(directory, old)
        notes.append(f"{TOKENIZER} was made from {old} by transformers")
    if tokenizer is None:
        notes.append(
            "the package holds no tokenizer: text cannot be made without `serve --tokenizer`"
        )
        return TokenizerFiles(tokenizer=None, beside=beside, notes=tuple(notes))
    largest = _largest_id(directory / TOKENIZER, tokenizer)
    if largest >= vocab_size:
        notes.append(
            f"the tokenizer has ids up to {largest}, the model {vocab_size}: text with the ids"
            " beyond is refused"
        )
    return TokenizerFiles(tokenizer=tokenizer, beside=beside, notes=tuple(notes))


def _read(path: Path) -> bytes | None:
    if not path.is_file():
        return None
    if path.stat().st_size > FILE_LIMIT_BYTES:
        raise InputError(f"{path}: {path.stat().st_size} bytes are too many for a tokenizer's file")
    return path.read_bytes()


def _largest_id(path: Path, data: bytes) -> int:
    """Read the tokenizer; give its largest id."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(data.decode())
    except Exception as error:
        raise InputError(f"{path}: no tokenizer ({error}): fetch the file again") from error
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)


def _converted(directory: Path, old: str) -> bytes:
    """Let transformers make a tokenizer.json of an older form."""
    remedy = (
        f"{directory}: there is no {TOKENIZER}, only {old}: {install('hf')} and pip install"
        " sentencepiece protobuf, or make one with AutoTokenizer.from_pretrained(DIR)"
        ".save_pretrained(DIR)"
    )
    try:
        from transformers import AutoTokenizer

        made = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        text = made.backend_tokenizer.to_str()
    except Exception as error:
        raise InputError(f"{remedy} ({type(error).__name__}: {error})") from error
    assert isinstance(json.loads(text), dict)
    return bytes(text.encode())
