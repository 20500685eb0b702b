"""What the host's threads do beside the lanes of a traced step.

Owns which calls are noted, and in which lane of the trace. Knows nothing of what they do. While
nothing is traced nothing is in the way of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from shardb.digesting import GrowingDigest
from shardb.transaction import Transaction
from trainer.device_lanes import Span
from trainer.pipeline.measuring import Measures
from trainer.pipeline.sealing import Sealer
from trainer.pipeline.step import PipelineStep
from trainer.run import Run

NOTED: tuple[tuple[type, str], ...] = (
    (Run, "_step"),
    (PipelineStep, "begin"),
    (PipelineStep, "go_back"),
    (PipelineStep, "write_rest"),
    (PipelineStep, "conclude"),
    (Measures, "read"),
    (Sealer, "drain"),
    (Transaction, "commit"),
    (Transaction, "_wait_and_sync"),
    (GrowingDigest, "_go_on"),
)


@contextmanager
def host_spans(spans: list[Span]) -> Iterator[None]:
    """Add the spans of these calls, by thread, in seconds from here."""
    zero = time.perf_counter()
    with ExitStack() as stack:
        for owner, name in NOTED:
            stack.enter_context(patch.object(owner, name, _timed(owner, name, zero, spans)))
        yield


def _timed(owner: type, name: str, zero: float, spans: list[Span]) -> Callable[..., Any]:
    call = getattr(owner, name)

    def timed(*given: Any, **named: Any) -> Any:
        began = time.perf_counter() - zero
        try:
            return call(*given, **named)
        finally:
            lane = f"host {threading.current_thread().name}"
            if lane == "host MainThread":
                lane += f" {owner.__name__}.{name}"
            ended = time.perf_counter() - zero
            spans.append(Span(lane=lane, name=name, began=began, ended=ended))

    return timed
