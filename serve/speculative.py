"""Guessing the next tokens from what was said before.

Owns the guess alone: whoever uses it checks each guess against the model, so a bad one costs
arithmetic and never changes a token. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence

MATCHED_TOKENS_MAX = 3
SEARCHED_TOKENS_MAX = 4096


def guess_next(ids: Sequence[int], count: int) -> list[int]:
    """Give up to `count` tokens that followed the last time the text ended as it does now.

    The longest ending of up to `MATCHED_TOKENS_MAX` tokens that occurs before decides, and its
    newest occurrence.
    """
    searched = list(ids[-SEARCHED_TOKENS_MAX:])
    length = len(searched)
    for size in range(min(MATCHED_TOKENS_MAX, length - 1), 0, -1):
        ending = searched[-size:]
        for start in range(length - size - 1, -1, -1):
            if searched[start : start + size] == ending:
                return searched[start + size : start + size + count]
    return []
