"""The tokenizer of a data set: trained here, or taken from a tokenizer.json.

Owns the byte-level BPE (the `tokenizers` library), the id that ends a document, and the rule that
text never becomes a control token: special tokens that stand in the text are encoded as the letters
they are made of. It does not know documents' origin or where ids go.

A tokenizer that is taken is stored byte for byte; what it would add, cut off or pad is turned off
here and not in the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.errors import InputError

END_OF_TEXT: Final = "<|endoftext|>"
BYTE_COUNT: Final = 256
TRAINED_VOCAB_MIN: Final = BYTE_COUNT + 1

# What tokenizers in use call the end of a document, tried in this order.
_KNOWN_ENDS: Final = (
    END_OF_TEXT,
    "</s>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<eos>",
    "<EOT>",
    "<｜end▁of▁sentence｜>",
)
# The trainer holds some hundreds of strings at a time; they must be small for memory to be bounded.
_SEGMENT_CHARACTERS = 1 << 16


class TextTokenizer:
    """Text to ids and back. `vocab_size` is the largest id it can give, plus one."""

    def __init__(self, json_bytes: bytes, end_of_text: str | None, *, name: str) -> None:
        self.json_bytes = json_bytes
        self._tokenizer = _parsed(json_bytes, name)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1
        self.end_of_text_token, self.end_of_text_id = _end_of_text(ids, end_of_text, name)
        self.unknown_id = _unknown_id(self._tokenizer, ids)

    @property
    def digest(self) -> str:
        """The xxh3-128 of the tokenizer.json."""
        return xxhash.xxh3_128_hexdigest(self.json_bytes)

    @classmethod
    def from_file(cls, path: Path, end_of_text: str | None = None) -> TextTokenizer:
        """Read a tokenizer.json; InputError names the file and what is wrong."""
        try:
            json_bytes = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror})") from error
        return cls(json_bytes, end_of_text, name=str(path))

    @classmethod
    def trained(cls, texts: Iterable[str], vocab_size: int) -> TextTokenizer:
        """Train a byte-level BPE. It has fewer ids than asked for where the text is too short.

        Id 0 is `<|endoftext|>`, 1 to 256 are the bytes. Pairs seen once make no token.
        """
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=[AddedToken(END_OF_TEXT, special=True)],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(_segments(texts), trainer)
        body = json.loads(tokenizer.to_str())
        text = json.dumps(body, indent=1, ensure_ascii=False) + "\n"
        return cls(text.encode(), END_OF_TEXT, name="the tokenizer trained here")

    def encode(self, texts: Sequence[str]) -> list[npt.NDArray[np.uint32]]:
        """Return the ids of every text, without anything added at its ends."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, control tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def _parsed(json_bytes: bytes, name: str) -> Tokenizer:
    # The library raises plain Exception for whatever it cannot read.
    try:
        return Tokenizer.from_str(json_bytes.decode())
    except UnicodeDecodeError as error:
        hint = "it is gzip data, unpack it" if json_bytes[:2] == b"\x1f\x8b" else "it is not UTF-8"
        raise InputError(f"{name}: no tokenizer.json: {hint}") from error
    except Exception as error:
        raise InputError(
            f"{name}: no tokenizer.json of the tokenizers library ({error})"
        ) from error


def _end_of_text(ids: dict[str, int], wanted: str | None, name: str) -> tuple[str, int]:
    if wanted is not None:
        if wanted not in ids:
            raise InputError(f'{name}: has no token "{wanted}"; give another --end-of-text')
        return wanted, ids[wanted]
    for token in _KNOWN_ENDS:
        if token in ids:
            return token, ids[token]
    raise InputError(
        f"{name}: none of its tokens is known to end a document; name one with --end-of-text"
    )


def _unknown_id(tokenizer: Tokenizer, ids: dict[str, int]) -> int | None:
    token = getattr(tokenizer.model, "unk_token", None)
    return ids.get(token) if isinstance(token, str) else None


def _segments(texts: Iterable[str]) -> Iterator[str]:
    """Cut long texts before white space, where words begin anyway."""
    for text in texts:
        at = 0
        while len(text) - at > _SEGMENT_CHARACTERS:
            end = max(text.rfind("\n", at + 1, at + _SEGMENT_CHARACTERS), at)
            end = end if end > at else text.rfind(" ", at + 1, at + _SEGMENT_CHARACTERS)
            end = end if end > at else at + _SEGMENT_CHARACTERS
            yield text[at:end]
            at = end
        yield text[at:]
