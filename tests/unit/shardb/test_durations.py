"""Is a span of time told in the units that people would use for it?"""

from __future__ import annotations

import pytest

from shardb.durations import DAY, YEAR_SECONDS, duration


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.0, "0.0 s"),
        (0.00012, "0.12 ms"),
        (0.0123, "12 ms"),
        (0.2, "0.2 s"),
        (0.26, "0.26 s"),
        (0.996, "1.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7620, "2 h 07 min"),
        (47 * 3600, "47 h 00 min"),
        (2 * DAY, "2 days 0 h"),
        (5.13 * DAY, "5 days 3 h"),
        (110 * DAY, "110 days"),
        (1.5 * YEAR_SECONDS, "548 days"),
        (3.44 * YEAR_SECONDS, "3.4 years"),
        (12_345 * YEAR_SECONDS, "12,345 years"),
    ],
)
def test_is_a_span_told_as_people_would(seconds: float, told: str) -> None:
    assert duration(seconds) == told


def test_is_no_longer_span_told_as_a_shorter_one() -> None:
    # Every unit is worth its seconds: what is read back is near what was told.
    units = {"ms": 0.001, "s": 1, "min": 60, "h": 3600, "days": DAY, "years": YEAR_SECONDS}
    span = 0.001
    while span < 200 * YEAR_SECONDS:
        words = duration(span).replace(",", "").split()
        told = sum(float(n) * units[u] for n, u in zip(words[::2], words[1::2], strict=True))
        assert told == pytest.approx(span, rel=0.06)
        span *= 1.37
