"""A run's forecast beside what its steps then took.

Owns which steps count: the first ones compile, record and fill caches, and are left out. Knows
nothing of how a forecast is made. What was found is written to `fit.json` beside the step log.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.autotune import Tuned

FILE_NAME = "fit.json"
# A pipeline records at its second step and fills its budget up to the sixth.
FIRST_STEPS, FIRST_STEPS_PIPELINED = 2, 7
COUNTED_STEPS = 8


class ForecastCheck:
    """Takes the lines of a run's steps; says once how they compare."""

    def __init__(self, tuned: Tuned, folder: Path) -> None:
        self._tuned = tuned
        self._path = folder / FILE_NAME
        pipelined = tuned.forecast.pipelined
        self._first = FIRST_STEPS_PIPELINED if pipelined else FIRST_STEPS
        self._seconds: list[float] = []
        self._is_said = False
        self._write(None)

    def after(self, line: Mapping[str, Any]) -> dict[str, Any]:
        """Take a step's line of the log; give what is to be added to it."""
        seconds = line["seconds"] - line.get("validation_seconds", 0.0)
        self._first -= 1
        if self._first < 0:
            self._seconds.append(seconds)
        forecast = self._tuned.forecast
        return {
            "forecast_tokens_per_second": forecast.tokens_per_second,
            "forecast_bound": forecast.bound,
            "forecast_percent": 100 * forecast.seconds / seconds,
        }

    def said(self, *, is_end: bool = False) -> str | None:
        """Give the comparison, once: when enough steps were made, or at the end."""
        enough = len(self._seconds) >= (1 if is_end else COUNTED_STEPS)
        if self._is_said or not enough:
            return None
        self._is_said = True
        forecast, middle = self._tuned.forecast, statistics.median(self._seconds)
        measured = forecast.tokens / middle
        self._write({"seconds": self._seconds, "tokens_per_second": measured})
        return (
            f"--fit forecast {forecast.tokens_per_second:,.0f} tokens/s, bound by {forecast.bound};"
            f" measured {measured:,.0f} (median of {len(self._seconds)} steps,"
            f" {min(self._seconds):.3g} to {max(self._seconds):.3g} s):"
            f" {100 * measured / forecast.tokens_per_second:.0f} % of the forecast"
        )

    def _write(self, measured: Mapping[str, Any] | None) -> None:
        told = self._tuned.to_json() | {"measured": measured}
        self._path.write_text(json.dumps(told, indent=1), encoding="utf-8")
