"""Has a request the same bits whatever is served beside it, and however it is cut up?

Compared are all log-probabilities of every token: equal numbers in all of them need equal bits in
the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from serve import decoder, sweep_batch
from serve.pinned import PinnedModel
from serve.requests import TokenEvent
from serve.row_products import RowProducts
from serve.scheduler import Scheduler
from tests.support.served import Answer, ask, prompts, scheduler, write_model
from tests.support.tiny_model import TINY, TINY_QWEN, TINY_TIED

# 300 values a row are no whole number of vectors, and no head has a key head of its own.
ODD = replace(TINY, intermediate_size=100, num_kv_heads=1, hidden_size=60, num_heads=3)
WIDE = replace(TINY, num_kv_heads=4, intermediate_size=300)
MODELS = {"gqa": TINY, "tied": TINY_TIED, "qwen": TINY_QWEN, "odd": ODD, "mha": WIDE}
ASKED = prompts(16, TINY.vocab_size)
NEW_TOKENS = 10


@pytest.fixture(params=MODELS)
def pinned(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PinnedModel]:
    write_model(tmp_path / "run", MODELS[request.param], seed=3)
    found = PinnedModel.open(tmp_path / "run")
    yield found
    found.release()


@pytest.fixture
def gqa(tmp_path: Path) -> Iterator[PinnedModel]:
    write_model(tmp_path / "run", TINY, seed=3)
    found = PinnedModel.open(tmp_path / "run")
    yield found
    found.release()


def bits(answer: Answer) -> list[tuple[Any, ...]]:
    """Every token with the log-probabilities of the whole vocabulary."""
    events = [event for event in answer.wait().events if isinstance(event, TokenEvent)]
    return [(event.token_id, event.logprob, event.top) for event in events]


def serve(to: Scheduler, pinned: PinnedModel, asked: list[list[int]], **more: Any) -> list[Any]:
    """Submit everything at once, so that it is served together."""
    given = {"top_logprobs": TINY.vocab_size, **more}
    with to._changed:
        answers = [ask(to, pinned, prompt, NEW_TOKENS, **given) for prompt in asked]
    return [bits(answer) for answer in answers]


def alone(pinned: PinnedModel, asked: list[list[int]], **more: Any) -> list[Any]:
    with scheduler(**{k: more.pop(k) for k in ("dtype",) if k in more}) as to:
        return [serve(to, pinned, [prompt], **more)[0] for prompt in asked]


def test_batch_mates_change_no_bit(pinned: PinnedModel) -> None:
    expected = alone(pinned, ASKED)
    with scheduler() as to:
        for size in range(1, 17):
            to.forget_prefixes()
            assert serve(to, pinned, ASKED[:size]) == expected[:size], size


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_batch_mates_change_no_bit_in_half_precision(gqa: PinnedModel, dtype: str) -> None:
    expected = alone(gqa, ASKED, dtype=dtype)
    with scheduler(dtype=dtype) as to:
        for size in (2, 7, 16):
            to.forget_prefixes()
            assert serve(to, gqa, ASKED[:size]) == expected[:size], size


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk": 1},
        {"prefill_chunk": 5},
        {"kv_page_tokens": 32},
        {"max_resident_bytes": 0},
        {"max_resident_bytes": 150_000},
        {"kv_cache_bytes": 12288 * 8},
        {"ngram_speculation": 3},
        {"max_requests_per_sweep": 3},
    ],
)
def test_how_the_work_is_cut_up_changes_no_bit(gqa: PinnedModel, options: dict[str, Any]) -> None:
    expected = alone(gqa, ASKED)
    with scheduler(**options) as to:
        found = serve(to, gqa, ASKED)
    if "kv_page_tokens" in options:
        # Sums of values are taken page by page: only the tokens are the same then.
        found, expected = [[[e[0] for e in a] for a in some] for some in (found, expected)]
    assert found == expected


def test_a_cached_prefix_changes_no_bit_and_is_used(gqa: PinnedModel) -> None:
    common = prompts(1, TINY.vocab_size, longest=1)[0] * 33
    asked = [[*common, *prompt[:8]] for prompt in ASKED]
    expected = []
    for prompt in asked:
        with scheduler() as to:
            expected += serve(to, gqa, [prompt])
    with scheduler() as to:
        assert serve(to, gqa, asked[:1]) == expected[:1]
        assert serve(to, gqa, asked) == expected
        assert to.statistics().prompt_tokens_reused >= 16 * 32
        last = ask(to, gqa, asked[3], 1).wait()
        assert last.finished.cached_tokens == 32


def test_a_seeded_draw_does_not_mind_its_batch_mates(gqa: PinnedModel) -> None:
    sampled = {"temperature": 1.3, "top_p": 0.95, "presence_penalty": 0.4}
    expected = [alone(gqa, [p], seed=i, **sampled)[0] for i, p in enumerate(ASKED)]
    for options in ({}, {"kv_cache_bytes": 12288 * 8}, {"ngram_speculation": 3}):
        with scheduler(**options) as to:
            answers = [
                ask(to, gqa, p, NEW_TOKENS, seed=i, top_logprobs=TINY.vocab_size, **sampled)
                for i, p in enumerate(ASKED)
            ]
            assert [bits(answer) for answer in answers] == expected
    assert alone(gqa, ASKED[:1], seed=99, **sampled) != expected[:1]


def test_control_without_a_seed_answers_differ(gqa: PinnedModel) -> None:
    with scheduler() as to:
        answers = [ask(to, gqa, [1, 2], 20, temperature=2.0).wait().tokens for _ in range(4)]
    assert len({tuple(tokens) for tokens in answers}) == 4


def test_control_products_that_mind_their_rows_are_found(
    gqa: PinnedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def linear(self: RowProducts, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight.to_dense() if weight.is_mkldnn else weight, bias)

    monkeypatch.setattr(RowProducts, "linear", linear)
    monkeypatch.setattr(RowProducts, "pack", lambda _self, weight: weight.clone())
    monkeypatch.setattr(sweep_batch, "row_multiple", lambda _width: 1)
    monkeypatch.setattr(decoder, "silu_", lambda x, **_: F.silu(x))
    expected = alone(gqa, ASKED)
    with scheduler() as to:
        found = serve(to, gqa, ASKED)
    assert found != expected, "the comparison must see rows that depend on each other"
    assert [[e[0] for e in a][:1] for a in found] == [[e[0] for e in a][:1] for a in expected]
