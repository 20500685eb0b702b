"""A tokenizer's files as texts and JSON, or an error that names the file.

Owns what is said of a file that is neither. Knows nothing of what the files mean. Invariants: a
damaged file is found when it is first read, never as a mistake of whoever reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainer.errors import InputError


def text_of(data: bytes, name: str) -> str:
    """Give a file as text.

    Raises:
        InputError: it is no UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{name} cannot be read: it is no UTF-8: {error}") from error


def json_of(files: Mapping[str, bytes], name: str) -> Mapping[str, Any]:
    """Give a file's JSON object; an empty one where the file is not there.

    Raises:
        InputError: it holds something else.
    """
    text = text_of(files.get(name, b"{}"), name)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} cannot be read: it is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{name} cannot be read: it holds no JSON object")
    return found
