"""A timeline of lanes in the Chrome trace format, which Perfetto and browsers show.

Owns the file's form. Knows nothing of how spans are measured.
Source: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.device_lanes import Span

MICROSECONDS = 1e6


def trace_events(spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Give a complete event a span, and a name a lane, lanes in the order in which they appear."""
    lanes = {lane: index for index, lane in enumerate(dict.fromkeys(s.lane for s in spans))}
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": index, "args": {"name": lane}}
        for lane, index in lanes.items()
    ]
    return names + [
        {
            "ph": "X",
            "name": span.name,
            "pid": 0,
            "tid": lanes[span.lane],
            "ts": span.began * MICROSECONDS,
            "dur": (span.ended - span.began) * MICROSECONDS,
        }
        for span in spans
    ]


def write_trace(path: Path, spans: Sequence[Span]) -> None:
    """Write a trace file."""
    path.write_text(json.dumps({"traceEvents": trace_events(spans)}), encoding="utf-8")
