"""The chat template that writes conversations out: where it comes from, and what it refuses.

Owns the choice of the template and the environment it runs in, which lets it reach nothing outside.
Knows nothing of tokens or of which part is learned. Invariant: whatever a template does wrong is an
InputError that names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainer.errors import InputError

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATE_FILE: Final = "chat_template.jinja"
CONFIG_FILE: Final = "tokenizer_config.json"
Message = Mapping[str, Any]

_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
# What the code of a template may do wrong, beside what its engine calls an error.
_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """One template; `name` says where it was found."""

    name: str
    tokens: Mapping[str, str]
    compiled: Template

    def __call__(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """Write messages out; InputError says what the template refuses."""
        from jinja2 import TemplateError

        values = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        try:
            return self.compiled.render(**self.tokens, **values)
        except (TemplateError, InputError, *_FAULTS) as error:
            what = str(error) or type(error).__name__
            raise InputError(f"{self.name} refuses this conversation ({what})") from error


def read_template(tokenizer: Path, template: Path | None) -> ChatTemplate:
    """Give the template of a file, else what lies beside the tokenizer; InputError names it."""
    folder = tokenizer.parent
    config = _read_config(folder / CONFIG_FILE)
    name, source = _source(folder, template, config)
    try:
        from jinja2 import TemplateError, TemplateSyntaxError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise InputError("--format chat needs jinja2: pip install 'shardb[hf]'") from error
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    try:
        compiled = environment.from_string(source)
    except TemplateError as error:
        line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
        raise InputError(f"{name}: {line}{error.message}: mend the template") from error
    tokens = {token: _token_text(config.get(token)) for token in _TOKENS}
    return ChatTemplate(name=name, tokens=tokens, compiled=compiled)


def _source(folder: Path, template: Path | None, config: Mapping[str, Any]) -> tuple[str, str]:
    """Give the name of the template that counts, and its text."""
    path = template or folder / TEMPLATE_FILE
    if template is not None or path.is_file():
        name = f"--chat-template {path}" if template is not None else f"the template {path}"
        try:
            return name, path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{name}: cannot be read ({error})") from error
    found = config.get("chat_template")
    if isinstance(found, str):
        return f"chat_template of {folder / CONFIG_FILE}", found
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
