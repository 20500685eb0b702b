"""Does every request end once, with what it asked for or the reason why not?"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardb
from serve.decoder import Decoder
from serve.pinned import ModelStore, PinnedModel
from serve.requests import Event, Finished, SamplingParameters, TokenEvent
from serve.sampling import NonFiniteLogitsError
from serve.scheduler import Scheduler, SchedulerOptions
from shardb.errors import ObjectCorruptError, UsageError
from tests.support.scripted_store import followers_of, write_scripted_store
from tests.support.served import Answer, ask, prompts, scheduler, write_model
from tests.support.small_stores import flip_bit, object_of
from tests.support.tiny_model import TINY
from trainer.errors import InputError

CHAIN = list(range(5, 25))
CYCLE = [5, 6, 7, 8, 5]


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[PinnedModel]:
    """A model that counts from 5 to 24 and then ends."""
    write_scripted_store(tmp_path / "run", followers_of(CHAIN), vocab_size=32, step=3)
    pinned = PinnedModel.open(tmp_path / "run")
    yield pinned
    pinned.release()


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[PinnedModel]:
    write_model(tmp_path / "tiny", TINY, seed=1)
    pinned = PinnedModel.open(tmp_path / "tiny")
    yield pinned
    pinned.release()


def test_spells_the_script_and_stops_at_the_end_token(scripted: PinnedModel) -> None:
    with scheduler() as to:
        whole = ask(to, scripted, [5], 50, ignore_eos=False, top_logprobs=2).wait()
        assert whole.tokens == CHAIN[1:]
        assert whole.finished == Finished(reason="stop", stop_token_id=2)
        assert all(e.top[0] == (e.token_id, e.logprob) for e in whole.events[:-1])  # type: ignore[union-attr]
        some = ask(to, scripted, [5], 3).wait()
        assert (some.tokens, some.finished.reason) == ([6, 7, 8], "length")
        stopped = ask(to, scripted, [5], 50, stop_token_ids=frozenset({9, 11})).wait()
        assert (stopped.tokens, stopped.finished.stop_token_id) == ([6, 7, 8], 9)
        endless = ask(to, scripted, [23], 4, ignore_eos=True).wait()
        assert endless.tokens == [24, 2, 2, 2]


def test_scores_the_prompt_when_asked_and_generates_nothing_for_zero_tokens(
    scripted: PinnedModel,
) -> None:
    with scheduler(prefill_chunk=4) as to:
        told = ask(to, scripted, CHAIN[:18], 0, prompt_logprobs=True, top_logprobs=1).wait()
        assert told.prompt.token_ids == tuple(CHAIN[:18])
        assert told.prompt.logprobs[0] is None
        assert all(math.isclose(p or 0.0, 0.0, abs_tol=1e-6) for p in told.prompt.logprobs)
        assert [top[0][0] for top in told.prompt.top[1:]] == CHAIN[1:18]
        assert (told.tokens, told.finished.reason) == ([], "length")
        wrong = ask(to, scripted, [5, 9, 10], 2, prompt_logprobs=True).wait()
        assert (wrong.prompt.logprobs[1] or 0) < -10
        assert wrong.tokens == [11, 12]
        assert ask(to, scripted, [7], 0).wait().events == [Finished(reason="length")]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [
        ([], 1, "prompt is empty"),
        ([32], 1, "outside the vocabulary of 32"),
        ([-1], 1, "outside the vocabulary"),
        ([5] * 250, 10, "250 prompt tokens and 10 to be generated are 260.*256"),
        ([5] * 200, 40, "kv_cache_bytes"),
    ],
)
def test_refuses_what_cannot_be_served_and_serves_on(
    scripted: PinnedModel, prompt: list[int], max_tokens: int, words: str
) -> None:
    with scheduler(kv_cache_bytes=2048 * 9) as to:
        with pytest.raises(UsageError, match=words):
            ask(to, scripted, prompt, max_tokens)
        assert ask(to, scripted, [5], 2).wait().tokens == [6, 7]


def test_cancelling_stops_within_a_sweep_wherever_the_request_is(tiny: PinnedModel) -> None:
    with scheduler(max_requests_per_sweep=1, prefill_chunk=4) as to:
        answers: list[Answer] = []
        first = Answer()

        def cancel_all(event: Event) -> None:
            first(event)
            if len(first.tokens) == 3:
                for each in answers:
                    assert each.job is not None
                    each.job.cancel()

        parameters = SamplingParameters(max_tokens=40, temperature=0.0, ignore_eos=True)
        answers += [Answer(job=to.submit(tiny, [1, 2, 3], parameters, cancel_all))]
        answers += [ask(to, tiny, [4] * 20, 40)]
        assert first.wait().finished.reason == "cancelled"
        assert len(first.tokens) == 3
        assert answers[1].wait().events == [Finished(reason="cancelled")]
        # In the middle of its prompt: it takes five sweeps.
        third = ask(to, tiny, [5] * 20, 5)
        assert third.job is not None
        while not third.job.computed and not third.job.is_finished:
            pass
        third.job.cancel()
        assert third.wait().finished.reason == "cancelled"
        assert ask(to, tiny, [5], 2).wait().finished.reason == "length"
        to.forget_prefixes()  # the worker has gone on
        found = to.statistics()
        assert (found.requests_cancelled, found.kv_bytes_used) == (3, 0)


def test_a_receiver_that_fails_ends_its_own_request_alone(scripted: PinnedModel) -> None:
    def failing(event: Event) -> None:
        raise RuntimeError("the client is gone")

    with scheduler() as to:
        parameters = SamplingParameters(max_tokens=20, temperature=0.0)
        job = to.submit(scripted, [5], parameters, failing)
        assert ask(to, scripted, [6], 15).wait().tokens == CHAIN[2:17]
        assert job.is_finished
        assert job.reason == "cancelled"


def test_many_requests_share_a_small_cache_and_lose_nothing(tiny: PinnedModel) -> None:
    asked = prompts(12, TINY.vocab_size)
    with scheduler(prefill_chunk=64) as roomy, scheduler(kv_cache_bytes=12288 * 7) as tight:
        expected = [ask(roomy, tiny, each, 20).wait().scored for each in asked]
        answers = [ask(tight, tiny, each, 20) for each in asked]
        assert [each.wait().scored for each in answers] == expected
        tight.forget_prefixes()  # the worker has gone on
        found = tight.statistics()
        assert found.preemptions > 0, "the cache was meant to be too small"
        assert found.requests_at_length == 12


def test_a_corrupt_shard_ends_the_requests_of_its_commit_alone(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step in (1, 2):
        write_scripted_store(root, followers_of(CHAIN[step:]), vocab_size=32, step=step)
        with shardb.open(root) as store:
            store.create_snapshot(f"step-{step}")
    with ModelStore(root) as models, scheduler(max_resident_bytes=0) as to:
        bad, good = models.pin("step-1"), models.pin("step-2")
        assert ask(to, bad, [6], 3).wait().tokens == [7, 8, 9]
        damaged = object_of(root, 1, "params/lm_head")
        flip_bit(damaged, 5000)
        answers = [ask(to, each, [7], 6) for each in (bad, good, bad, good)]
        errors = [answers[index].wait().finished.error for index in (0, 2)]
        assert all(isinstance(error, ObjectCorruptError) for error in errors)
        assert all(str(damaged) in str(error) for error in errors)
        assert all(answers[index].wait().tokens == CHAIN[3:9] for index in (1, 3))
        to.forget_prefixes()  # the worker has gone on
        assert to.statistics().requests_failed == 2


def test_shards_that_two_commits_have_in_common_are_read_once(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step, script in ((1, CHAIN), (2, [*CHAIN[:3], 30])):
        write_scripted_store(root, followers_of(script), vocab_size=32, step=step)
        with shardb.open(root) as store:
            store.create_snapshot(f"step-{step}")
    with ModelStore(root) as models:
        one, two = models.pin("step-1"), models.pin("step-2")
        size = sum(one.size_bytes(name) for name in one.commit.shards if "params" in name)
        with scheduler(max_resident_bytes=0, max_requests_per_sweep=2) as to:
            barrier = threading.Barrier(2)
            ended = [Answer(), Answer()]

            def together(answer: Answer, event: Event) -> None:
                answer(event)
                if isinstance(event, TokenEvent) and len(answer.tokens) == 1:
                    barrier.abort()

            given = SamplingParameters(max_tokens=1, temperature=0.0)
            with to._changed:  # both arrive before the worker looks
                for answer, pinned in zip(ended, (one, two), strict=True):
                    to.submit(pinned, [7], given, lambda e, a=answer: together(a, e))  # type: ignore[misc]
            assert [each.wait().tokens for each in ended] == [[8], [30]]
            to.forget_prefixes()
            found = to.statistics()
            assert found.sweeps == 1
            assert size < found.bytes_read < 2 * size, "only the head differs"


@pytest.mark.parametrize(("share", "stages"), [(0.0, 0), (0.5, None), (2.0, 6)])
def test_stages_stay_up_to_the_budget_and_the_rest_is_streamed(
    tiny: PinnedModel, share: float, stages: int | None
) -> None:
    size = sum(tiny.size_bytes(f"params/block_{index:03d}") for index in range(3))
    budget = int(share * size)
    with scheduler(max_resident_bytes=budget) as to:
        ask(to, tiny, [1, 2], 2).wait()
        to.forget_prefixes()  # the worker has gone on
        before = to.statistics()
        ask(to, tiny, [1, 2], 4).wait()
        to.forget_prefixes()
        found = to.statistics()
        assert found.resident_bytes <= budget
        if stages is None:
            assert 0 < found.resident_stages < 6
        else:
            assert found.resident_stages == stages
        assert (found.bytes_read > before.bytes_read) is (share < 2)


def test_preloading_brings_everything_in_before_the_first_request(tiny: PinnedModel) -> None:
    with scheduler() as to:
        to.preload(tiny)
        before = to.statistics()
        assert before.resident_stages == 6
        ask(to, tiny, [1], 2).wait()
        assert to.statistics().bytes_read == before.bytes_read


def test_a_newer_commit_takes_the_memory_of_one_that_was_released(tmp_path: Path) -> None:
    with scheduler() as to:
        sizes = []
        for step in range(3):
            write_model(tmp_path / "run", TINY, seed=step, step=step)
            pinned = PinnedModel.open(tmp_path / "run")
            ask(to, pinned, [1], 2).wait()
            to.forget_prefixes()
            pinned.release()
            sizes.append(to.statistics().resident_bytes)
        assert sizes[2] == sizes[0]


def test_a_lease_ends_with_the_last_request_on_it(tmp_path: Path) -> None:
    write_model(tmp_path / "run", TINY)
    leases = tmp_path / "run" / "leases"
    with scheduler() as to:
        pinned = PinnedModel.open(tmp_path / "run")
        answer = ask(to, pinned, [1], 30)
        pinned.release()
        assert answer.wait().finished.reason == "length"
        to.forget_prefixes()  # the worker has gone on
        assert os.listdir(leases) == []


def test_guesses_save_sweeps_and_change_no_token(tmp_path: Path) -> None:
    write_scripted_store(tmp_path / "run", followers_of(CYCLE), vocab_size=32)
    pinned = PinnedModel.open(tmp_path / "run")
    sweeps = {}
    for count in (0, 4):
        with scheduler(ngram_speculation=count) as to:
            answer = ask(to, pinned, CYCLE, 41).wait()
            assert answer.tokens == [CYCLE[1 + index % 4] for index in range(41)]
            to.forget_prefixes()  # the worker has gone on
            sweeps[count] = to.statistics().sweeps
            assert to.statistics().accepted_tokens <= to.statistics().drafted_tokens
    assert sweeps[0] == 41
    assert sweeps[4] <= 15
    pinned.release()


@pytest.mark.parametrize("drain", [True, False])
def test_closing_ends_every_request_and_takes_no_new_one(
    scripted: PinnedModel, drain: bool
) -> None:
    to = Scheduler(SchedulerOptions(kv_cache_bytes=1 << 20))
    answers = [ask(to, scripted, [5], 200) for _ in range(5)]
    to.close(drain=drain)
    reasons = {answer.wait().finished.reason for answer in answers}
    assert reasons == ({"length"} if drain else {"cancelled"}) or not drain
    with pytest.raises(UsageError, match="closed"):
        ask(to, scripted, [5], 2)
    assert scripted._references == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"dtype": "int3"},
        {"kv_page_tokens": 20},
        {"prefill_chunk": 0},
        {"max_requests_per_sweep": 0},
        {"max_resident_bytes": -1},
        {"ngram_speculation": -1},
    ],
)
def test_refuses_options_and_names_them(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        SchedulerOptions(**wrong)


def test_a_failure_of_any_kind_ends_its_own_model_alone(
    scripted: PinnedModel, tiny: PinnedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Decoder.run

    def run(self: Decoder, role: Any, layer: int, *rest: Any) -> Any:
        if rest[3] is tiny.config and role == "block":
            raise ValueError("no such kernel")
        return whole(self, role, layer, *rest)

    monkeypatch.setattr(Decoder, "run", run)
    with scheduler() as to:
        with to._changed:
            answers = [ask(to, scripted, [5], 6), ask(to, tiny, [5], 6)]
        assert answers[0].wait().tokens == CHAIN[1:7]
        error = answers[1].wait().finished.error
        assert "params/block_000 of step 0 failed: ValueError: no such kernel" in str(error)


def test_a_diverged_model_ends_its_requests_with_the_reason(tmp_path: Path) -> None:
    write_scripted_store(tmp_path / "run", {}, vocab_size=32)
    with shardb.open(tmp_path / "run") as store, store.begin() as txn:
        for name in txn.base.shards if txn.base else ():
            if name.startswith("params/"):
                values = {key: each.copy() for key, each in txn.read(name).arrays().items()}
                values["weight" if "weight" in values else next(iter(values))][:] = math.nan
                txn.write(name, values)
        txn.commit(step=1)
    pinned = PinnedModel.open(tmp_path / "run")
    with scheduler() as to:
        error = ask(to, pinned, [5], 3).wait().finished.error
        assert isinstance(error, NonFiniteLogitsError)
    pinned.release()


def test_refuses_layers_that_nobody_computes_before_the_request_is_taken(
    scripted: PinnedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = scripted.config
    with scheduler() as to:
        scripted.config = replace(config, hf_config='{"model_type": "gpt2"}')
        with pytest.raises(InputError, match="layers of gpt2 models are not known"):
            ask(to, scripted, [5], 3)
        monkeypatch.setitem(sys.modules, "transformers", None)
        scripted.config = replace(config, hf_config='{"model_type": "gemma", "vocab_size": 32}')
        with pytest.raises(InputError, match=r"pip install .*\.\[hf\]'"):
            ask(to, scripted, [5], 3)
    scripted.config = config
