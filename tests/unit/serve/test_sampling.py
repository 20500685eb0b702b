"""Is a token chosen as its request asks, and by nothing else?"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from serve.requests import SamplingParameters
from serve.sampling import Choice, NonFiniteLogitsError, choose, uniform
from shardb.errors import UsageError

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.0])
DRAWS = 4000


def pick(logits: Tensor = LOGITS, *, place: int = 0, seed: int = 0, **more: Any) -> Choice:
    given = {"max_tokens": 1, "temperature": 0.0, **more}
    prompt, answer = given.pop("prompt", []), given.pop("answer", [3] * place)
    return choose(logits, SamplingParameters(**given), prompt=prompt, answer=answer, seed=seed)


def shares(**more: Any) -> dict[int, float]:
    counts = Counter(pick(seed=seed, temperature=1.0, **more).token_id for seed in range(DRAWS))
    return {token: count / DRAWS for token, count in counts.items()}


@pytest.mark.parametrize(
    "greedy", [{"temperature": 0.0}, {"temperature": 1e-9}, {"temperature": 1.0, "top_p": 0.0}]
)
def test_takes_the_most_likely_token_without_dividing_by_zero(greedy: dict[str, float]) -> None:
    assert {pick(seed=seed, **greedy).token_id for seed in range(50)} == {1}


def test_draws_tokens_as_often_as_the_model_says() -> None:
    expected = torch.softmax(LOGITS, 0).tolist()
    found = shares()
    assert all(abs(found.get(token, 0) - share) < 0.03 for token, share in enumerate(expected))


@pytest.mark.parametrize(
    ("filters", "left"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 2}),
        ({"top_p": 0.5}, {1}),
        ({"top_p": 0.7}, {1, 2}),
        ({"min_p": 0.3}, {1, 2}),
        ({"min_p": 1.0}, {1}),
        ({"logit_bias": {4: 100}}, {4}),
        ({"logit_bias": {1: -math.inf, 2: -math.inf}, "top_k": 1}, {0}),
        ({"vocab_size": 1}, {0}),
    ],
)
def test_draws_only_what_the_filters_leave(filters: dict[str, Any], left: set[int]) -> None:
    assert set(shares(**filters)) == left


def test_penalties_count_prompt_and_answer_as_documented() -> None:
    assert pick(prompt=[1], repetition_penalty=2.0).token_id == 2
    assert pick(prompt=[1], presence_penalty=5.0).token_id == 1
    assert pick(answer=[1], presence_penalty=1.5).token_id == 2
    assert pick(answer=[1, 1], frequency_penalty=0.6).token_id == 2
    # A negative logit is made smaller, not larger.
    only_negative = torch.tensor([-1.0, -1.5])
    assert pick(only_negative, prompt=[0], repetition_penalty=2.0).token_id == 1


def test_log_probabilities_are_those_of_the_model_itself() -> None:
    expected = torch.log_softmax(LOGITS, 0)
    chosen = pick(temperature=2.0, top_k=1, logit_bias={3: 50}, answer=[1], presence_penalty=1)
    assert (chosen.token_id, chosen.logprob) == (3, float(expected[3]))
    assert pick(top_logprobs=3).top == tuple((t, float(expected[t])) for t in (1, 2, 0))
    assert pick(top_logprobs=99).top[-1][0] == 3
    # What does not exist takes no probability away.
    assert math.isclose(pick(vocab_size=1).logprob, 0.0)


def test_a_draw_depends_on_seed_and_place_alone() -> None:
    first = [pick(seed=1, place=place, temperature=3.0).token_id for place in range(40)]
    again = [pick(seed=1, place=place, temperature=3.0).token_id for place in range(40)]
    other = [pick(seed=2, place=place, temperature=3.0).token_id for place in range(40)]
    assert first == again != other
    numbers = [uniform(seed, place) for seed in range(50) for place in range(50)]
    assert len(set(numbers)) == len(numbers)
    assert 0 <= min(numbers) < max(numbers) < 1
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_refuses_logits_that_are_not_numbers(bad: float) -> None:
    logits = LOGITS.clone()
    logits[4] = bad
    with pytest.raises(NonFiniteLogitsError, match="earlier commit"):
        pick(logits)
    assert pick(logits, vocab_size=4).token_id == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": -1},
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 2},
        {"presence_penalty": math.inf},
        {"repetition_penalty": 0},
        {"logit_bias": {-1: 0.0}},
        {"logit_bias": {1: math.nan}},
        {"top_logprobs": -1},
        {"vocab_size": 0},
    ],
)
def test_refuses_parameters_and_names_the_field(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SamplingParameters(**{"max_tokens": 1, **wrong})
