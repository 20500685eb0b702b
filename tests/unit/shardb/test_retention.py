"""Does a policy keep exactly what it says?"""

from __future__ import annotations

import math
from typing import Any

import pytest

from shardb.retention import Policy, kept

LOSSES = [5.0, 1.0, 4.0, math.nan, 1.0, 3.0, None, 2.0, 9.0]
NAMES = [f"c{step}" for step in range(len(LOSSES))]


def rows(name: str) -> dict[str, Any]:
    loss = LOSSES[int(name[1:])]
    return {"step": int(name[1:]), "metrics": {} if loss is None else {"loss": loss}}


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        ({"keep_last": 1}, [8]),
        ({"keep_last": 3}, [6, 7, 8]),
        ({"keep_last": 20}, list(range(9))),
        ({"keep_last": 2, "keep_every": 3}, [0, 3, 6, 7, 8]),
        ({"keep_last": 1, "keep_best": 1}, [1, 8]),  # of equals the earlier one
        ({"keep_last": 1, "keep_best": 3}, [1, 4, 7, 8]),
        ({"keep_last": 1, "keep_best": 2, "best_mode": "max"}, [0, 8]),
        ({"keep_last": 1, "keep_best": 3, "best_metric": "accuracy"}, [8]),
        ({"keep_last": 1, "keep_every": 4, "keep_best": 1}, [0, 1, 4, 8]),
        ({"keep_last": 1, "keep_best": 20}, [0, 1, 2, 4, 5, 7, 8]),
    ],
)
def test_is_exactly_that_kept(policy: dict[str, Any], steps: list[int]) -> None:
    chosen = Policy(**{"best_metric": "loss", **policy})
    assert kept(chosen, NAMES, rows) == [f"c{step}" for step in steps]
