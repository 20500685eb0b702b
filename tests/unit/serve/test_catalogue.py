"""Does a model id mean one commit, keep it while it is used, and name no path?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import shardb
from serve.catalogue import Catalogue, StoreSource
from serve.chat_template import adapter
from serve.errors import ApiError
from shardb.errors import NotFoundError
from tests.support.byte_model import BEGIN_ID, byte_tokenizer, commit_step, ids_of, small_store
from trainer.model.config import ModelConfig


@contextmanager
def catalogue(*places: Path, follow: bool = False, ref: str | None = None) -> Iterator[Catalogue]:
    roles = ("primary", "backup")
    sources = [
        StoreSource(role=role, path=str(path), ref=ref)
        for role, path in zip(roles, places, strict=False)
    ]
    opened = Catalogue(sources, follow=follow, chat=adapter("plain"))
    try:
        yield opened
    finally:
        opened.close()


def step_of(opened: Catalogue, model: str) -> int:
    found = opened.acquire(model)
    found.release()
    return found.pinned.commit.step


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return small_store(tmp_path / "run", [1, 2])


def test_what_ids_mean(run: Path, tmp_path: Path) -> None:
    other = small_store(tmp_path / "old", [2, 7])
    with catalogue(run, other) as opened:
        commit = opened.stores[0].models.resolve("step-1").id
        steps = {
            "primary": 2,
            "backup": 7,
            "run": 2,
            "old": 7,
            "main": 2,
            "step-1": 1,
            "run@step-1": 1,
            "primary@step-2": 2,
            "backup@step-7": 7,
            "step-7": 7,
            commit: 1,
            commit[:16]: 1,
            f"run@{commit}": 1,
        }
        assert {model: step_of(opened, model) for model in steps} == steps
        assert opened.acquire("step-2").store == "run"


@pytest.mark.parametrize(
    "model",
    [
        *("", "nope", "step-9", "run@", "run@nope", "nope@step-1", "@step-1", "a@b@c"),
        *("/etc/passwd", "../run", "run@../../x", "run@/etc", "a b", "a\nb", "é", "x" * 300),
        *("run/../run", "\x00", "run@step-1\n", "."),
    ],
)
def test_does_nothing_else_mean_anything(run: Path, model: str) -> None:
    with catalogue(run) as opened:
        with pytest.raises(ApiError) as caught:
            opened.acquire(model)
        assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def leased(opened: Catalogue) -> set[str]:
    return opened.stores[0].models.store.leases.leased_commits()


def test_are_leases_given_back(run: Path) -> None:
    with catalogue(run) as opened:
        store = opened.stores[0].models
        first, second = (store.resolve(f"step-{step}").id for step in (1, 2))
        assert leased(opened) == {second}
        found = opened.acquire("step-1")
        assert leased(opened) == {first, second}
        found.release()
        opened.forget_idle()
        assert leased(opened) == {second}
    with shardb.open(run) as again:
        assert again.leases.leased_commits() == set()


@pytest.mark.parametrize("follow", [False, True])
def test_do_roles_follow_only_when_told(run: Path, follow: bool) -> None:
    with catalogue(run, follow=follow) as opened:
        early = opened.acquire("primary")
        with shardb.open(run) as writer:
            commit_step(writer, 3)
        assert step_of(opened, "primary") == (3 if follow else 2)
        assert step_of(opened, "main") == 3
        assert early.pinned.commit.step == 2
        assert early.pinned.is_live
        early.release()
        assert early.pinned.is_live != follow  # the last holder of a head that was left


def test_is_a_missing_tokenizer_told(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with shardb.open(run, create=True) as store, store.begin() as transaction:
        config = ModelConfig(
            vocab_size=300,
            hidden_size=8,
            num_layers=1,
            num_heads=1,
            intermediate_size=8,
            max_position_embeddings=8,
        )
        model = np.frombuffer(json.dumps(config.to_json()).encode(), dtype=np.uint8)
        transaction.write("meta/model", {"json": model}, trainable=False)
        transaction.commit(step=1)
    with catalogue(run) as opened, pytest.raises(ApiError) as caught:
        opened.acquire("primary")
    assert caught.value.code == "tokenizer_missing"
    files = {"tokenizer.json": byte_tokenizer(), "generation_config.json": b'{"eos_token_id":[2]}'}
    given = Catalogue(
        [StoreSource(role="primary", path=str(run))],
        follow=False,
        chat=adapter("plain"),
        tokenizer_files=files,
    )
    words = given.acquire("primary").words
    assert words.stop_ids == {2}
    assert words.vocabulary.encode_text("a", begin=True) == [BEGIN_ID, *ids_of("a")]
    given.close()


def test_does_a_store_without_the_ref_not_open(run: Path) -> None:
    with pytest.raises(NotFoundError):
        Catalogue(
            [StoreSource(role="primary", path=str(run), ref="step-9")],
            follow=False,
            chat=adapter("plain"),
        )
    with shardb.open(run) as again:
        assert again.leases.leased_commits() == set()
