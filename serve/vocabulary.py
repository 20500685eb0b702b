"""A model's tokenizer as serving needs it: text to ids, ids to bytes.

Owns which ids are control tokens and which bytes a token stands for. Knows nothing of requests.
Invariants: text that a user typed never becomes a control token; a rendered chat template
keeps the control tokens that the template wrote, and only those.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken, Tokenizer

from serve.errors import ApiError

# Put into control tokens that a user typed, until the template's own have been found. A private
# use character, so that no text means anything by it.
BREAKER = "\U0010f8ff"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
# Printable bytes stand for themselves in byte-level vocabularies, the others for code points
# from 256 on. Source: https://github.com/openai/gpt-2/blob/master/src/encoder.py
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


class Vocabulary:
    """One tokenizer; the same object may be used by several threads."""

    def __init__(self, tokenizer_json: bytes, *, begin_id: int | None = None) -> None:
        """Read a tokenizer; `begin_id` is put first where the tokenizer has no rule of its own."""
        text = tokenizer_json.decode()
        self._plain = _whole(Tokenizer.from_str(text))
        self._plain.encode_special_tokens = True  # what a user typed is text
        self._json = text
        self._added: dict[int, AddedToken] = self._plain.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in self._added.items() if token.special}
        by_length = sorted(self._special.values(), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, by_length)) or r"(?!)")
        self._kind = _decoder_kind(json.loads(text).get("decoder"))
        self._alphabet = _byte_alphabet() if self._kind == "byte-level" else {}
        self.size = self._plain.get_vocab_size()
        has_rule = self._plain.num_special_tokens_to_add(False) > 0
        self._begin = [begin_id] if begin_id in self._added and not has_rule else []

    @cached_property
    def _marked(self) -> Tokenizer:
        """The same tokenizer, for texts whose control tokens are meant; few requests need it."""
        return _whole(Tokenizer.from_str(self._json))

    def is_special(self, token: int) -> bool:
        """Say whether an id is a control token."""
        return token in self._special

    def special_id(self, text: str) -> int | None:
        """Give the id of a control token by its text."""
        return next((i for i, content in self._special.items() if content == text), None)

    def special_text(self, token: int) -> str:
        """Give the text of a control token, or nothing where the id is none."""
        return self._special.get(token, "")

    def encode_text(self, text: str, *, begin: bool = False) -> list[int]:
        """Encode what a user typed; `begin` adds what the tokenizer puts around a text."""
        ids = list(self._plain.encode(text, add_special_tokens=begin).ids)
        return [*self._begin, *ids] if begin else ids

    def encode_marked(self, text: str) -> list[int]:
        """Encode a text whose control tokens are meant, except those broken by `break_control`."""
        if BREAKER not in text:
            return list(self._marked.encode(text, add_special_tokens=False).ids)
        ids: list[int] = []
        at = 0
        for match in self._control.finditer(text):
            ids += self._encode_span(text[at : match.start()])
            ids += self._marked.encode(match.group(), add_special_tokens=False).ids
            at = match.end()
        return ids + self._encode_span(text[at:])

    def break_control(self, text: str) -> str:
        """Break the control tokens in what a user typed, so that they stay text in a template."""
        text = text.replace(BREAKER, "")
        return self._control.sub(lambda m: m.group()[:1] + BREAKER + m.group()[1:], text)

    def token_bytes(self, token: int) -> bytes:
        """Give the bytes that a token stands for; nothing for an id without a word."""
        added = self._added.get(token)
        if added is not None:
            return str(added.content).encode()
        piece = self._plain.id_to_token(token)
        if piece is None:
            return b""
        if self._kind == "byte-level":
            return b"".join(self._alphabet.get(c) or c.encode() for c in piece)
        if self._kind == "byte-fallback":
            match = _BYTE_TOKEN.match(piece)
            return bytes.fromhex(match.group(1)) if match else piece.replace("▁", " ").encode()
        return self.decode([token]).encode()

    @property
    def is_bytewise(self) -> bool:
        """Say whether a text is its tokens' bytes one after the other."""
        return self._kind != "other"

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode all tokens together, without control tokens."""
        return str(self._plain.decode(list(tokens)))

    def _encode_span(self, text: str) -> list[int]:
        return self.encode_text(text.replace(BREAKER, "")) if text else []


def check_text(text: str, param: str) -> str:
    """Refuse a text that is not Unicode: JSON can write halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ApiError(
            400,
            f"'{param}': not valid Unicode at character {error.start}: an unpaired surrogate",
            code="invalid_value",
            param=param,
        ) from error
    return text


def _whole(tokenizer: Tokenizer) -> Tokenizer:
    """Undo the settings of somebody's training, which a tokenizer file may hold."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _decoder_kind(decoder: dict[str, Any] | None) -> str:
    types = {part["type"] for part in _parts(decoder)}
    if "ByteLevel" in types and types <= {"ByteLevel"}:
        return "byte-level"
    if "ByteFallback" in types and types <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        return "byte-fallback"
    return "other"


def _parts(decoder: dict[str, Any] | None) -> Iterable[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [part for inner in decoder["decoders"] for part in _parts(inner)]
    return [decoder]


def _byte_alphabet() -> dict[str, bytes]:
    others = [byte for byte in range(256) if byte not in _PRINTABLE]
    alphabet = {chr(byte): bytes([byte]) for byte in _PRINTABLE}
    return alphabet | {chr(256 + n): bytes([byte]) for n, byte in enumerate(others)}
