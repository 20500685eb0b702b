"""Records of conversations and of prompts with completions: their text, and which part is learned.

Owns both record forms, what is wrong with a record, and the rule which tokens count: what an
assistant says, with the token that ends its turn, or a completion with the end of the document;
everything else is read and not learned. Knows nothing of files, rows or splits.

A record is a line of JSON: {"messages": [{"role": …, "content": …}, …]}, or {"prompt": …,
"completion": …}. Text of a record never becomes a control token: a conversation whose content
holds one is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from trainer.data.chat_template import ChatTemplate, Message
from trainer.errors import InputError

FORMATS: Final = ("text", "chat", "prompt-completion")


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """The ids of one record, and which of them are learned, [N] each."""

    ids: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.bool_]


class Fault(NamedTuple):
    """What is wrong with a record, and what may be mended."""

    what: str
    mend: str = "the line"


# A conversation's text, and where in it an assistant speaks.
_Written = tuple[str, list[tuple[int, int]]]


def record_fault(body: Mapping[str, Any], form: str) -> str | None:
    """Say what is wrong with a record by itself; None where nothing is."""
    if form == "prompt-completion":
        for field in ("prompt", "completion"):
            if not isinstance(body.get(field), str):
                return f'field "{field}" is {type(body.get(field)).__name__}, not text'
        return None if body["completion"] else 'field "completion" is empty: nothing to learn'
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return 'field "messages" is no list of messages'
    for number, message in enumerate(messages, 1):
        is_message = isinstance(message, dict) and all(
            isinstance(message.get(field), str) for field in ("role", "content")
        )
        if not is_message:
            return f"message {number} has no role and content that are text"
    if not any(message["role"] == "assistant" for message in messages):
        return "no message is an assistant's: nothing to learn"
    for number, message in enumerate(messages, 1):
        if message["role"] == "assistant" and not message["content"]:
            return f"message {number}, an assistant's, is empty: it would teach to say nothing"
    return None


class ConversationEncoder:
    """Records to ids and marks, by one tokenizer and, for chats, one template."""

    def __init__(
        self, json_bytes: bytes, form: str, end_id: int, template: ChatTemplate | None
    ) -> None:
        self._form = form
        self._end_id = end_id
        self._template = template
        # The last conversation, written out: one is encoded right after it was looked at.
        self._written: tuple[Sequence[Message], _Written] | None = None
        self._tokenizer = Tokenizer.from_str(json_bytes.decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A template's control tokens are meant as such; a prompt's letters are letters.
        self._tokenizer.encode_special_tokens = form != "chat"
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._controls = sorted({token.content for token in added if token.special})

    def encode(self, text: str) -> Encoded:
        """Encode a record, given as its JSON; InputError tells which cannot be."""
        body = json.loads(text)
        if self._form == "prompt-completion":
            whole = body["prompt"] + body["completion"]
            found = self._encoded(whole, [(len(body["prompt"]), len(whole))])
            end = np.array([self._end_id], dtype=np.uint32)
            return Encoded(
                ids=np.concatenate([found.ids, end]), counts=np.append(found.counts, True)
            )
        messages = body["messages"]
        if self._written is None or self._written[0] != messages:
            self._refuse_controls(messages)
            self._written = messages, self._rendered(messages)
        return self._encoded(*self._written[1])

    def fault(self, body: Mapping[str, Any]) -> Fault | None:
        """Say why a record of the right form cannot be encoded; None where it can."""
        if self._form != "chat":
            return None
        messages = body["messages"]
        try:
            self._refuse_controls(messages)
        except InputError as error:
            return Fault(error.message)
        try:
            self._written = messages, self._rendered(messages)
        except InputError as error:
            return Fault(error.message, "the line or the template")
        return None

    def _refuse_controls(self, messages: Sequence[Message]) -> None:
        for number, message in enumerate(messages, 1):
            for control in self._controls:
                if control in message["content"]:
                    raise InputError(f"message {number} holds {control}, which is a control token")

    def _rendered(self, messages: Sequence[Message]) -> _Written:
        template = self._template
        assert template is not None, "a chat has a template"
        whole = template(messages, False)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = template(messages[:index], True)
            after = template(messages[: index + 1], False)
            if not (after.startswith(before) and whole.startswith(after)):
                raise InputError(
                    f"{template.name} gives another text for the beginning of a conversation than"
                    f" for the whole, so that what is learned of message {index + 1} cannot be"
                    " told"
                )
            if not _says(whole[len(before) : len(after)], message["content"]):
                raise InputError(
                    f"{template.name} writes nothing of what message {index + 1}, an assistant's,"
                    " says"
                )
            spans.append((len(before), len(after)))
        return whole, spans

    def _encoded(self, text: str, spans: Sequence[tuple[int, int]]) -> Encoded:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
        counts = np.zeros(len(starts), dtype=np.bool_)
        for begin, end in spans:
            counts |= (starts >= begin) & (starts < end)
        return Encoded(ids=np.array(encoding.ids, dtype=np.uint32), counts=counts)


def _says(written: str, content: str) -> bool:
    """Whether some word of a message was written: a template may trim it or leave thoughts out."""
    words = content.split()
    return not words or any(word in written for word in words)
