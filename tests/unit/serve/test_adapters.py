"""Is a commit with adapters served as base and adapters, and not as the base alone?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardb
from serve.pinned import PinnedModel
from tests.support.adapters import imported_store
from tests.support.served import ask, scheduler
from tests.support.training import make_data, train_here
from trainer.lora.reading import reading_engine

PROMPT = [5, 9, 14]
NEW_TOKENS = 12


@pytest.fixture(scope="module", params=["llama", "gemma2", "llama nf4"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served")
    data = make_data(root / "data")
    model_type, _, quant = request.param.partition(" ")
    if quant:
        pytest.importorskip("bitsandbytes", reason="the extra `nf4` is not installed")
    _, store = imported_store(root, model_type)
    flags = ["--lora-rank", "8", "--lora-targets", "all-linear", "--learning-rate", "0.05"]
    flags += ["--base-quant", quant] if quant else []
    size = ("--device", "cpu", "--threads", "1", "--micro-batch-size", "4", "--max-steps", "6")
    assert (
        train_here(["--store", str(store), "--data-dir", str(data / "train"), *flags, *size]) == 0
    )
    return store


def greedy(store: Path, ref: str) -> list[int]:
    ids = list(PROMPT)
    with shardb.open(store) as opened, opened.at(ref=ref) as view:
        engine = reading_engine(view, "cpu")
        for _ in range(NEW_TOKENS):
            logits = engine.logits(view, torch.tensor([ids]), last_only=True)
            ids.append(int(logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def served(store: Path, ref: str) -> list[int]:
    pinned = PinnedModel.open(store, ref)
    try:
        with scheduler() as to:
            return ask(to, pinned, PROMPT, NEW_TOKENS).wait().tokens
    finally:
        pinned.release()


def test_are_the_tokens_those_of_base_and_adapters(store: Path) -> None:
    assert served(store, "main") == greedy(store, "main")
    assert served(store, "imported") == greedy(store, "imported")
    assert served(store, "main") != served(store, "imported")
