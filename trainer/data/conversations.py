"""Records of conversations and of prompts with completions: their text, and which part is learned.

Owns both record forms, the chat template, and the rule which tokens count: what an assistant says,
with the token that ends its turn, or a completion with the end of the document; everything else is
read and not learned. Knows nothing of rows or splits.

A record is a line of JSON: {"messages": [{"role": …, "content": …}, …]}, or {"prompt": …,
"completion": …}. Text of a record never becomes a control token: a conversation whose content
holds one is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from trainer.errors import InputError

FORMATS: Final = ("text", "chat", "prompt-completion")
TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], bool], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """The ids of one record, and which of them are learned, [N] each."""

    ids: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.bool_]


def record_fault(body: Mapping[str, Any], form: str) -> str | None:
    """Say what is wrong with a record; None where nothing is."""
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
    return None


class ConversationEncoder:
    """Records to ids and marks, by one tokenizer and, for chats, one template."""

    def __init__(self, json_bytes: bytes, form: str, end_id: int, render: Render | None) -> None:
        self._form = form
        self._end_id = end_id
        self._render = render
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
        return self._encoded(*self._rendered(body["messages"]))

    def _rendered(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Give a conversation's text, and where in it an assistant speaks."""
        assert self._render is not None, "a chat has a template"
        for message in messages:
            for control in self._controls:
                if control in message["content"]:
                    raise InputError(
                        f"a message holds {control}, which is a control token: {_begin(message)}"
                    )
        whole = self._render(messages, False)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:index], True)
            after = self._render(messages[: index + 1], False)
            if not (after.startswith(before) and whole.startswith(after)):
                raise InputError(
                    "the chat template gives another text for the beginning of a conversation than"
                    f" for the whole, so that what is learned cannot be told: {_begin(message)}"
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


def template_render(tokenizer: Path, template: Path | None) -> Render:
    """Give what renders conversations: a template file, else what lies beside the tokenizer."""
    folder = tokenizer.parent
    config = _read_config(folder / CONFIG_FILE)
    source = _template_source(folder, template, config)
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise InputError("--format chat needs jinja2: pip install 'shardb[hf]'") from error
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: _token_text(config.get(name)) for name in names}
    try:
        compiled = environment.from_string(source)
    except TemplateError as error:
        raise InputError(f"the chat template cannot be read ({error}): mend it") from error

    def render(messages: Sequence[Message], add_generation_prompt: bool) -> str:
        values = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return compiled.render(**tokens, **values)
        except (TemplateError, InputError) as error:
            first = _begin(messages[0]) if messages else ""
            raise InputError(f"the chat template refuses a conversation ({error}): {first}") from (
                error
            )

    return render


def _template_source(folder: Path, template: Path | None, config: Mapping[str, Any]) -> str:
    path = template or folder / TEMPLATE_FILE
    if template is not None or path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--chat-template {path}: cannot be read ({error})") from error
    found = config.get("chat_template")
    if isinstance(found, str):
        return found
    raise InputError(
        f"{folder}: there is no {TEMPLATE_FILE} and no chat_template in {CONFIG_FILE}: give"
        " --chat-template FILE"
    )


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    return found if isinstance(found, dict) else {}


def _token_text(value: Any) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""


def _raise_exception(message: str) -> None:
    raise InputError(message)


def _begin(message: Message) -> str:
    return f"{message['role']}: {message['content'][:60]!r}"
