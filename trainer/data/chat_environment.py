"""What a chat template runs in: whatever a package's author took for granted, and nothing else.

Owns the environment that training rows and prompts are written in, so that a model is asked in the
words it learned: filters, functions, tags and values are those that transformers gives templates
in `apply_chat_template`. Knows nothing of where a template was found, of tokens, or of what is
learned. Invariant: a template reaches nothing but what it is given, and changes none of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trainer.errors import InputError

Message = Mapping[str, Any]
# What a template raises, on purpose or because the messages are not what it takes for granted.
FAULTS: Final = (
    *(TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError),
    *(TypeError, ValueError),
)


class ChatText:
    """A template, ready to write messages out; `now` is the time that it may tell."""

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str],
        *,
        name: str,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Parse a template; InputError where it is none, by its `name` and line."""
        try:
            self._template = _environment(now).from_string(source)
        except TemplateError as error:
            line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise InputError(f"{name}: {line}{error.message}: mend the template") from error
        self._tokens = dict(tokens)

    def write(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Give the text of messages; one of FAULTS where the template refuses them."""
        return self._template.render(
            messages=list(messages),
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._tokens,
        )


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Give the special tokens of a `tokenizer_config.json` by name, such as bos_token."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def template_in(config: Mapping[str, Any]) -> str | None:
    """Give the template of a `tokenizer_config.json`: a text, or the default one of a list."""
    source: Any = config.get("chat_template")
    if isinstance(source, list):
        entries = [entry for entry in source if isinstance(entry, dict)]
        source = {entry.get("name"): entry.get("template") for entry in entries}.get("default")
    return source if isinstance(source, str) else None


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` around what an assistant says: it is written as if the tag were not there.

    What is learned is told by writing a conversation turn by turn, which any template can do.
    """

    tags = {"generation"}  # noqa: RUF012 - its base says what it is

    def parse(self, parser: Parser) -> nodes.Node:
        """Give what the tag encloses, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as it is: the environment's own filter writes `<` and `&` as for a web page."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
