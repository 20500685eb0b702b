"""Spans of time as people read them: `30 ms`, `3 min 05 s`, `110 days`.

Knows nothing of what took so long.
"""

from __future__ import annotations

MINUTE, HOUR, DAY = 60, 3600, 86400
YEAR_SECONDS = 365.25 * DAY


def duration(seconds: float) -> str:
    """Give two units at most, the smaller one only where it tells something."""
    if 0 < seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    if 0 < seconds < 0.995:
        return f"{seconds:.2g} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < MINUTE:
        return f"{whole} s"
    if whole < HOUR:
        return f"{whole // MINUTE} min {whole % MINUTE:02d} s"
    if whole < 2 * DAY:
        minutes = round(whole / MINUTE)
        return f"{minutes // 60} h {minutes % 60:02d} min"
    if whole < 10 * DAY:
        hours = round(whole / HOUR)
        return f"{hours // 24} days {hours % 24} h"
    if whole < 2 * YEAR_SECONDS:
        return f"{whole / DAY:.0f} days"
    years = whole / YEAR_SECONDS
    return f"{years:.1f} years" if years < 100 else f"{years:,.0f} years"
