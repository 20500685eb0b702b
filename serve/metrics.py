"""What /metrics tells, in the text format of Prometheus.

Owns the counters of the HTTP side and the names of all metrics. Knows nothing of requests. Used
from the event loop alone. Source of the format:
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import fields

from serve.statistics import SchedulerStatistics

PREFIX = "shardb_serve"
SECONDS_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
# What the scheduler has now; everything else it counts only grows.
GAUGES = {
    "requests_running", "requests_waiting", "resident_bytes", "resident_stages", "kv_bytes_used",
    "kv_bytes_total",
}  # fmt: skip
RATIOS = {
    "requests_per_sweep": "Mean number of requests that a sweep served.",
    "bytes_read_per_token": "Bytes of shards brought in for one token of an answer.",
    "hidden_share": "Share of reading that went on behind computing.",
}
Labels = Mapping[str, str]


class Histogram:
    """Counts of seconds by upper bound."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS_BOUNDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one measurement."""
        self._counts[bisect_left(SECONDS_BOUNDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, labels: str = "") -> list[str]:
        """Give its samples."""
        found, total = [], 0
        inner = f"{labels}," if labels else ""
        for bound, count in zip((*SECONDS_BOUNDS, "+Inf"), self._counts, strict=True):
            total += count
            found.append(f'{name}_bucket{{{inner}le="{bound}"}} {total}')
        outer = f"{{{labels}}}" if labels else ""
        return [*found, f"{name}_sum{outer} {self._sum:.6f}", f"{name}_count{outer} {total}"]


class Metrics:
    """The counts of the HTTP side."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self.seconds: dict[str, Histogram] = {}
        self.first_token = Histogram()
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.clients_left = 0

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count one request by its route, never by what a client wrote."""
        self.answers[route, status] += 1
        self.seconds.setdefault(route, Histogram()).observe(seconds)

    def text(
        self,
        statistics: SchedulerStatistics,
        *,
        active: int,
        refused: int,
        steps: Iterable[tuple[Labels, int]],
    ) -> str:
        """Give everything."""
        lines = self._own_lines()
        lines += _metric("answers_active", "gauge", "Answers being made or waiting.", active)
        lines += _metric("refused_total", "counter", "Requests refused for want of room.", refused)
        lines += _head("model_step", "gauge", "The step of the commit that a role means now.")
        lines += [f"{PREFIX}_model_step{{{_labels(labels)}}} {step}" for labels, step in steps]
        for entry in fields(statistics):
            kind = "gauge" if entry.name in GAUGES else "counter"
            suffix = "" if kind == "gauge" else "_total"
            help_text = f"The scheduler's {entry.name.replace('_', ' ')}."
            value = getattr(statistics, entry.name)
            lines += _metric(f"scheduler_{entry.name}{suffix}", kind, help_text, value)
        for name, help_text in RATIOS.items():
            lines += _metric(f"scheduler_{name}", "gauge", help_text, getattr(statistics, name))
        return "\n".join(lines) + "\n"

    def _own_lines(self) -> list[str]:
        lines = _head("requests_total", "counter", "Requests answered, by route and status.")
        for (route, status), count in sorted(self.answers.items()):
            labels = _labels({"route": route, "status": str(status)})
            lines.append(f"{PREFIX}_requests_total{{{labels}}} {count}")
        lines += _head("request_seconds", "histogram", "Seconds from a request to its answer.")
        for route, histogram in sorted(self.seconds.items()):
            lines += histogram.lines(f"{PREFIX}_request_seconds", _labels({"route": route}))
        lines += _head("first_token_seconds", "histogram", "Seconds until the first token.")
        lines += self.first_token.lines(f"{PREFIX}_first_token_seconds")
        tokens = {"prompt": self.prompt_tokens, "completion": self.completion_tokens}
        lines += _head("tokens_total", "counter", "Tokens of prompts and of answers.")
        lines += [f'{PREFIX}_tokens_total{{kind="{k}"}} {count}' for k, count in tokens.items()]
        left = "Clients that left before their answer was whole."
        return lines + _metric("clients_left_total", "counter", left, self.clients_left)


def _metric(name: str, kind: str, help_text: str, value: float) -> list[str]:
    return [*_head(name, kind, help_text), f"{PREFIX}_{name} {value}"]


def _head(name: str, kind: str, help_text: str) -> list[str]:
    return [f"# HELP {PREFIX}_{name} {help_text}", f"# TYPE {PREFIX}_{name} {kind}"]


def _labels(labels: Labels) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
