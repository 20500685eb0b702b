"""Does a really trained model keep its mind through import, training and export?

The larger model and the figures are those of `make import-real`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardb
from tests.support.packages import import_here, resident
from tests.support.training import train_here
from trainer.data_cli import run as data_command
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.generate import Sampling
from trainer.generate_run import generated_text
from trainer.model.stored import read_model

# The reference was computed in float64.
BOUND = 2e-4


@pytest.fixture(scope="module")
def stories(shared_data: Path) -> Path:
    """Give the package of a published model of 260,032 parameters, trained on short stories."""
    folder = shared_data / "models" / "stories260K"
    if not folder.is_dir():
        pytest.skip(f"no model at {folder}: set SHARDB_DATA to a folder that holds models/")
    return folder


@pytest.fixture(scope="module")
def store(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stories") / "store"
    import_here(stories, path)
    return path


@pytest.fixture(scope="module")
def reference(stories: Path) -> Any:
    return json.loads((stories / "reference.json").read_text())


def engine_of(view: shardb.ReadView) -> Engine:
    return Engine(read_model(view), EngineOptions(), Device.from_name("cpu"))


def test_are_the_logits_those_of_an_independent_computation(store: Path, reference: Any) -> None:
    assert reference["logits"]
    with shardb.open(store) as opened, opened.at(ref="imported") as view:
        for case in reference["logits"]:
            logits = engine_of(view).logits(view, torch.tensor([case["ids"]]), last_only=True)[0, 0]
            expected = torch.tensor(case["last_position_logits"])
            torch.testing.assert_close(logits, expected, rtol=BOUND, atol=BOUND)


def test_is_the_loss_that_of_an_independent_computation(store: Path, reference: Any) -> None:
    assert reference["loss"]
    with shardb.open(store) as opened, opened.at(ref="imported") as view:
        for case in reference["loss"]:
            found = engine_of(view).evaluate(view, [np.array([case["ids"]])]).loss
            assert found == pytest.approx(case["mean_next_token_nll"], abs=BOUND)


def test_is_the_story_the_published_one(store: Path, reference: Any) -> None:
    with shardb.open(store) as opened, opened.at(ref="imported") as view:
        for case in reference["greedy"]:
            ids = list(case["prompt_ids"])
            for expected in case["new_ids"][:24]:
                logits = engine_of(view).logits(view, torch.tensor([ids]), last_only=True)
                assert int(logits[0, -1].argmax()) == expected
                ids.append(expected)


def test_the_text_goes_on_behind_the_prompt_with_its_space(store: Path) -> None:
    with shardb.open(store) as opened, opened.at(ref="imported") as view:
        pieces = generated_text(
            view,
            "Zoo",
            sampling=Sampling(temperature=0.0),
            max_new_tokens=12,
            seed=0,
            tokenizer_file=None,
            device="cpu",
        )
        assert "".join(pieces).startswith(" was a little girl named")


def test_is_it_bit_equal_with_transformers_over_its_whole_window(
    stories: Path, store: Path
) -> None:
    ids = torch.randint(0, 512, (1, 512), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = resident(stories)(ids).logits
    with shardb.open(store) as opened, opened.at(ref="imported") as view:
        assert torch.equal(engine_of(view).logits(view, ids), expected)


def test_does_training_on_stories_make_it_better_at_them(
    stories: Path, store: Path, shared_data: Path, tmp_path: Path
) -> None:
    text = tmp_path / "stories.txt"
    text.write_bytes(decompressed(shared_data / "corpora" / "tinystories-sample.valid.txt.zst"))
    rows = tmp_path / "rows"
    prepare = ["prepare", "--text", str(text), "--out", str(rows), "--seq-len", "128"]
    prepare += ["--tokenizer", str(stories / "tokenizer.json"), "--end-of-text", "</s>"]
    assert data_command(prepare) == 0
    flags = ["--store", str(store), "--data-dir", str(rows / "train"), "--device", "cpu"]
    flags += ["--val-data-dir", str(rows / "val"), "--validate-every", "6"]
    flags += ["--learning-rate", "3e-4", "--weight-decay", "0", "--micro-batch-size", "8"]
    with shardb.open(store) as opened, opened.at(ref="imported") as view:
        held_out = np.concatenate([np.load(p) for p in sorted((rows / "val").glob("*.npy"))])
        before = engine_of(view).evaluate(view, [held_out.astype(np.int64)]).loss
    assert train_here([*flags, "--threads", "1", "--max-steps", "6"]) == 0
    with shardb.open(store) as opened:
        after = opened.branches()["main"].metrics["validation_loss"]
    # It was trained on text of this kind: what is left to learn is little, and it is learned.
    assert 1.0 < after < before < 2.0


def decompressed(path: Path) -> bytes:
    import zstandard

    return zstandard.ZstdDecompressor().decompress(path.read_bytes())
