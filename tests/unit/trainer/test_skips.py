"""What is remembered of skipped batches, and how the stop explains itself."""

from __future__ import annotations

import pytest

from trainer.errors import (
    GradientOverflowError,
    NonFiniteError,
    SkipLimitError,
    UpdateRejectedError,
)
from trainer.skips import Skips, explained

OVERFLOW = GradientOverflowError("overflowed", shard="params/x", tensor="w")
REJECTED = UpdateRejectedError("rejected", details={"attempts": 3})
TRUE_NAN = NonFiniteError("the gradient of params/x/w has 1 values", shard="params/x", tensor="w")


def finite() -> NonFiniteError | None:
    return None


def test_a_commit_tells_what_was_skipped_before_it_and_only_then() -> None:
    skips = Skips(limit=5)
    skips.add(8, OVERFLOW, finite)
    skips.add(12, REJECTED, finite)
    told = skips.metrics(step=6, skipped_steps=2)
    assert (told["skipped_steps"], told["skip_rate"]) == (2, 0.25)
    assert [each["position"] for each in told["skipped"]] == [8, 12]
    assert [each["reason"] for each in told["skipped"]] == ["gradient_overflow", "update_rejected"]
    assert told["skipped"][1]["guarded_step_replay"] == {"attempts": 3}
    skips.clear()
    assert "skipped" not in skips.metrics(step=7, skipped_steps=2)


def test_only_skips_in_a_row_count_for_the_limit() -> None:
    skips = Skips(limit=2)
    for _ in range(5):
        skips.add(0, OVERFLOW, finite)
        skips.clear()
    skips.add(0, REJECTED, finite)
    with pytest.raises(SkipLimitError, match=r"1 gradient_overflow, 1 update_rejected"):
        skips.add(0, OVERFLOW, finite)


def test_the_stop_tells_an_overflow_from_a_true_nan() -> None:
    with pytest.raises(SkipLimitError, match="--dtype bf16"):
        Skips(limit=1).add(0, OVERFLOW, finite)
    with pytest.raises(SkipLimitError, match="too: the gradient of params/x/w has 1 values"):
        Skips(limit=1).add(0, OVERFLOW, lambda: TRUE_NAN)


def test_an_error_of_fp16_is_explained_and_any_other_is_left_alone() -> None:
    said = explained(TRUE_NAN, "fp16", finite)
    assert "In fp32 the same batch has finite gradients" in said.message
    assert (said.shard, said.tensor) == ("params/x", "w")
    assert explained(TRUE_NAN, "bf16", finite) is TRUE_NAN
