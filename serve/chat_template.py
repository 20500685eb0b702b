"""Messages to a prompt: a model's own chat template, or an adapter for models without one.

Owns the way from messages to ids, and the two adapters. Knows nothing of HTTP, or of what a
template runs in (`trainer.data.chat_environment`). Invariants: what a user typed stays text, also
where it looks like a control token; a template writes its own beginning of text, so no second one
is added.

The plain adapter, for base models: every message on lines of its own as `System: …`, `User: …`,
`Assistant: …`, a blank line between two, and `Assistant:` at the end; the answer ends where the
model begins a line with `User:`. The story adapter, for models of stories: a request such as "Tell
me a story about a dog" becomes the beginning of one, anything else is gone on from as it stands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from serve.errors import ApiError
from serve.package_files import json_of, text_of
from serve.vocabulary import Vocabulary
from trainer.data.chat_environment import FAULTS, ChatText, Message, special_tokens_of, template_in
from trainer.errors import InputError

PLAIN_NAMES = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}
_STORY_REQUEST = re.compile(
    r"^\W*(?:please |can you |could you |would you )*(?:write|tell|give|make|continue|create)"
    r"(?: me| us)?(?: an?| the)?(?: (?:short|long|little|new|nice|funny|happy|sad|bedtime))*"
    r" (?:story|tale)(?: (?:about|of|on|with) (?P<subject>.+?))?(?:,? please)?[\s.!?]*\Z",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPrompt:
    """A prompt made of messages, and stop strings that come with its form."""

    ids: list[int]
    stops: tuple[str, ...] = ()


class ChatFormat(Protocol):
    """A way from messages to a prompt."""

    name: str

    def prompt(
        self, messages: Sequence[Message], vocabulary: Vocabulary, *, add_generation_prompt: bool
    ) -> ChatPrompt:
        """Give the prompt; ApiError where the messages do not suit the format."""


class TemplateFormat:
    """The model's own template, in the form of `tokenizer_config.json`."""

    name = "template"

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self._text = ChatText(source, tokens, name="the chat template")

    def prompt(
        self, messages: Sequence[Message], vocabulary: Vocabulary, *, add_generation_prompt: bool
    ) -> ChatPrompt:
        """Render and encode; the template's refusal of messages is the client's to mend."""
        safe = [_broken(message, vocabulary) for message in messages]
        try:
            text = self._text.write(safe, add_generation_prompt=add_generation_prompt)
        except FAULTS as error:
            raise ApiError(
                400,
                f"the model's chat template refuses these messages: {error}",
                code="invalid_messages",
                param="messages",
            ) from error
        return ChatPrompt(ids=vocabulary.encode_marked(text))


class PlainFormat:
    """Names and colons, for base models; a guess, since no template says what the model knows."""

    name = "plain"

    def prompt(
        self, messages: Sequence[Message], vocabulary: Vocabulary, *, add_generation_prompt: bool
    ) -> ChatPrompt:
        """Write the messages one after the other."""
        blocks = [f"{PLAIN_NAMES[m['role']]}: {m['content'] or ''}" for m in messages]
        text = "\n\n".join([*blocks, *(["Assistant:"] if add_generation_prompt else [])])
        return ChatPrompt(ids=vocabulary.encode_text(text, begin=True), stops=("\nUser:",))


class StoryFormat:
    """The beginning of a story, for models that know nothing else."""

    name = "story"

    def prompt(
        self, messages: Sequence[Message], vocabulary: Vocabulary, *, add_generation_prompt: bool
    ) -> ChatPrompt:
        """Turn the last user message into the beginning of a story."""
        asked = next((m["content"] for m in reversed(messages) if m["role"] == "user"), None)
        if not asked:
            raise ApiError(
                400,
                "'messages': the story adapter needs a user message with text",
                code="invalid_messages",
                param="messages",
            )
        return ChatPrompt(ids=vocabulary.encode_text(story_beginning(asked), begin=True))


class NoFormat:
    """No way from messages to a prompt."""

    name = "none"

    def prompt(
        self, messages: Sequence[Message], vocabulary: Vocabulary, *, add_generation_prompt: bool
    ) -> ChatPrompt:
        """Refuse, and say what to do instead."""
        raise ApiError(
            400,
            "this model has no chat template: use /v1/completions, or start the server with"
            " --chat-adapter plain or story, or with --chat-template FILE",
            code="chat_template_missing",
            param="messages",
        )


def adapter(name: str) -> ChatFormat:
    """Give an adapter by the name of its flag."""
    formats: dict[str, ChatFormat] = {
        "plain": PlainFormat(),
        "story": StoryFormat(),
        "none": NoFormat(),
    }
    if name not in formats:
        raise InputError(f"--chat-adapter {name!r} is unknown: choose {', '.join(formats)}")
    return formats[name]


def template_of(files: Mapping[str, bytes]) -> TemplateFormat | None:
    """Find the chat template among a tokenizer's files; None where there is none.

    Newer packages keep it in chat_template.jinja, older ones inside tokenizer_config.json, as a
    text or as a list of named ones of which "default" counts.
    """
    config = json_of(files, "tokenizer_config.json")
    source = template_in(config)
    if "chat_template.jinja" in files:
        source = text_of(files["chat_template.jinja"], "chat_template.jinja")
    if source is None:
        return None
    return TemplateFormat(source, special_tokens_of(config))


def story_beginning(asked: str) -> str:
    """Give the beginning of a story for a request; a text that is no request stays as it is."""
    match = _STORY_REQUEST.match(asked)
    if match is None:
        return asked
    subject = match["subject"]
    return f"Once upon a time, there was {subject}." if subject else "Once upon a time"


def _broken(message: Message, vocabulary: Vocabulary) -> dict[str, Any]:
    return {key: _broken_value(value, vocabulary) for key, value in message.items()}


def _broken_value(value: Any, vocabulary: Vocabulary) -> Any:
    if isinstance(value, str):
        return vocabulary.break_control(value)
    if isinstance(value, list):
        return [_broken_value(item, vocabulary) for item in value]
    if isinstance(value, dict):
        return {key: _broken_value(item, vocabulary) for key, item in value.items()}
    return value
