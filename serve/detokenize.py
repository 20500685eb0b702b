"""Tokens to text, one token at a time.

Owns the bytes of a character that is not whole yet. Knows nothing of stop strings. Invariants: the
pieces together are the decoding of all tokens; a character comes whole or, where its bytes are no
UTF-8, as U+FFFD; nothing is said twice.
"""

from __future__ import annotations

import codecs

from serve.vocabulary import Vocabulary

# A character has at most four bytes, and a token at least one.
HELD_TOKENS_MAX = 4


class Detokenizer:
    """The text of one generation."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._said = 0

    def push(self, token: int) -> str:
        """Take in a token, give the text that is certain now."""
        if self._vocabulary.is_special(token) or self._vocabulary.is_bytewise:
            is_hidden = self._skip_special and self._vocabulary.is_special(token)
            data = b"" if is_hidden else self._vocabulary.token_bytes(token)
            return self._flush_window() + self._utf8.decode(data)
        self._window.append(token)
        text = self._new_text()
        held = len(self._window) - self._said
        if not text or (text.endswith("\ufffd") and held < HELD_TOKENS_MAX):
            return ""
        # The tokens just said are decoded again as context of the next ones: a decoder may treat
        # the first token of a text in its own way.
        self._window = self._window[self._said :]
        self._said = len(self._window)
        return text

    def lead(self, token: int, text: str) -> int:
        """Give how many characters of what `push` gave belong to the tokens before this one.

        Bytes that never became a character are said with the next token, and are not its own.
        """
        data = self._vocabulary.token_bytes(token)
        own = data.decode("utf-8", "ignore")
        is_whole = bool(own) and own.encode() == data
        return len(text) - len(own) if is_whole and text.endswith(own) else 0

    def finish(self) -> str:
        """Give what is left: bytes that never became a character, as U+FFFD."""
        return self._flush_window() + self._utf8.decode(b"", final=True)

    def _new_text(self) -> str:
        context = self._vocabulary.decode(self._window[: self._said])
        return self._vocabulary.decode(self._window)[len(context) :]

    def _flush_window(self) -> str:
        text = self._new_text() if self._window else ""
        self._window, self._said = [], 0
        return text
