"""The chat template that writes conversations out: where it comes from, and what it refuses.

Owns the choice of the template. Knows nothing of what it runs in (`trainer.data.chat_environment`),
of tokens, or of which part is learned. Invariants: whatever a template does wrong is an InputError
that names it; a template that writes the date writes one date, however long it is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shardb.extras import install
from trainer.errors import InputError

if TYPE_CHECKING:
    from trainer.data.chat_environment import ChatText

TEMPLATE_FILE: Final = "chat_template.jinja"
CONFIG_FILE: Final = "tokenizer_config.json"
Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTemplate:
    """One template; `name` says where it was found, and it refuses with one of `faults`."""

    name: str
    text: ChatText
    faults: tuple[type[Exception], ...]

    def __call__(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """Write messages out; InputError says what the template refuses."""
        try:
            return self.text.write(messages, add_generation_prompt=add_generation_prompt)
        except self.faults as error:
            what = str(error) or type(error).__name__
            raise InputError(f"{self.name} refuses this conversation ({what})") from error


def read_template(tokenizer: Path, template: Path | None) -> ChatTemplate:
    """Give the template of a file, else what lies beside the tokenizer; InputError names it."""
    try:
        from trainer.data.chat_environment import FAULTS, ChatText, special_tokens_of, template_in
    except ImportError as error:
        raise InputError(f"--format chat needs jinja2: {install('hf')}") from error
    folder, moment = tokenizer.parent, datetime.now()
    config = _read_config(folder / CONFIG_FILE)
    name, source = _source(folder, template, template_in(config))
    text = ChatText(source, special_tokens_of(config), name=name, now=lambda: moment)
    return ChatTemplate(name=name, text=text, faults=FAULTS)


def _source(folder: Path, template: Path | None, configured: str | None) -> tuple[str, str]:
    """Give the name of the template that counts, and its text."""
    path = template or folder / TEMPLATE_FILE
    if template is not None or path.is_file():
        name = f"--chat-template {path}" if template is not None else f"the template {path}"
        try:
            return name, path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{name}: cannot be read ({error})") from error
    if configured is not None:
        return f"chat_template of {folder / CONFIG_FILE}", configured
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
