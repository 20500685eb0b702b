"""Computing on tensors without content, without torch's compiler being loaded for it.

Torch has many kernels of its `meta` device in Python. Each is marked as not to be compiled when it
is first called, and for that mark torch loads its whole compiler: a second and more of every start,
where memory is only counted. Here a stand-in takes the marks. Owns the stand-in, and that nothing
is left of it: marks are taken off, and whoever asks it for anything else gets the compiler itself.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

COMPILER = "torch._dynamo"
MARK = "__dynamo_disable"


class _StandIn(ModuleType):
    """Takes marks; all else is the compiler's own."""

    def __init__(self) -> None:
        super().__init__(COMPILER)
        self.marked: list[Callable[..., Any]] = []

    def disable(self, function: Callable[..., Any], *_how: Any, **_more: Any) -> Any:
        """Give the function as it is: nothing is compiled here."""
        self.marked.append(function)
        return function

    def __getattr__(self, name: str) -> Any:
        if name == "__spec__":
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(COMPILER), name)

    def leave(self) -> None:
        """Be nowhere any more."""
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
        if vars(torch).get("_dynamo") is self:
            del torch._dynamo
        while self.marked:
            vars(self.marked.pop()).pop(MARK, None)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Keep the compiler from being loaded, where it is not there already."""
    if COMPILER in sys.modules:
        yield
        return
    stand_in = _StandIn()
    sys.modules[COMPILER] = stand_in
    try:
        yield
    finally:
        stand_in.leave()
