"""Are guesses what followed the last time?"""

from __future__ import annotations

import pytest

from serve.speculative import guess_next


@pytest.mark.parametrize(
    ("ids", "count", "guess"),
    [
        ([], 3, []),
        ([1], 3, []),
        ([1, 2, 3], 3, []),
        ([1, 2, 3, 1], 2, [2, 3]),
        ([5, 1, 2, 9, 1, 2, 7, 1, 2], 1, [7]),
        # The longer ending decides, though a shorter one is nearer.
        ([4, 1, 2, 3, 6, 9, 3, 8, 1, 2, 3], 1, [6]),
        ([7, 7, 7], 4, [7]),
        ([1, 2, 1, 2, 1, 2], 4, [1, 2]),
    ],
)
def test_guesses_what_followed_before(ids: list[int], count: int, guess: list[int]) -> None:
    assert guess_next(ids, count) == guess
