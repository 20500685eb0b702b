"""Does training from an import begin with exactly its weights, and leave the import alone?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardb
from export.import_config import read_model_config
from shardb import torch_adaptor
from shardb.errors import NotFoundError
from tests.support.commands import shardb_command
from tests.support.packages import (
    Tensors,
    config_of,
    import_here,
    random_tensors,
    stored_tensors,
    write_package,
)
from tests.support.resident import ResidentTrainer
from tests.support.tiny_model import random_rows
from tests.support.training import make_data, step_lines, train_here
from trainer.adoption import AdoptingTransaction, is_import
from trainer.device import Device
from trainer.engine import Engine
from trainer.errors import InputError
from trainer.found import find_run
from trainer.model.config import ModelConfig
from trainer.model.stored import read_model
from trainer.options import EngineOptions
from trainer.plan import make_plan
from trainer.run_shards import read_stored_run
from trainer.vram import WORKSPACE_BYTES, StepShape, predicted_bytes

STEPS = 3
OPTIONS = EngineOptions(grad_clip_mode="global", max_grad_norm=0.5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def imported(root: Path, model_type: str = "llama", **how: Any) -> Path:
    import_here(write_package(root / "package", config_of(model_type)), root / "store", **how)
    return root / "store"


def flags(store: Path, data: Path, *more: str) -> list[str]:
    return [
        *("--store", str(store), "--data-dir", str(data / "train")),
        *("--device", "cpu", "--threads", "1", "--seed", "7", "--micro-batch-size", "4"),
        *("--learning-rate", "0.003", *more),
    ]


def batches(step: int) -> list[np.ndarray]:
    """Rows that leave the padding token out: transformers' embedding has no gradient for it."""
    return [3 + random_rows(10 * step + index, vocab_size=61) for index in range(2)]


def resident_from(store: Path, model: ModelConfig, options: EngineOptions) -> ResidentTrainer:
    """Give a resident trainer that begins with the imported weights in fp32."""
    trainer = ResidentTrainer(model, options, seed=0)
    with shardb.open(store) as opened, opened.at(ref="imported") as view, torch.no_grad():
        for stage, shard in trainer.params.items():
            for name, tensor in torch_adaptor.tensors(view.read(f"params/{stage}")).items():
                shard[name].copy_(tensor)
    return trainer


def stream(store: Path, model: ModelConfig, options: EngineOptions, steps: Sequence[int]) -> None:
    engine = Engine(model, options, Device.from_name("cpu"))
    with shardb.open(store) as opened:
        for step in steps:
            with opened.begin() as txn:
                assert txn.base is not None
                shards = engine.adopting(txn) if is_import(txn.base) else txn
                if is_import(txn.base):
                    txn.write("meta/recipe", {"json": np.zeros(1, np.uint8)}, trainable=False)
                engine.train_step(shards, batches(step), step=step, learning_rate=1e-2)
                txn.commit(step=step)


def stored_arrays(store: Path) -> dict[str, np.ndarray]:
    with shardb.open(store) as opened, opened.at() as view:
        return {
            f"{shard}:{name}": array.copy()
            for shard in view.names()
            if not shard.startswith("meta/")
            for name, array in view.read(shard).arrays().items()
        }


@pytest.mark.parametrize(("clip", "activations"), [("global", "recompute"), ("none", "keep")])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma2", "gemma3_text", "phi", "phi3"])
def test_is_streamed_training_from_an_import_resident_training(
    model_type: str, clip: str, activations: str, tmp_path: Path
) -> None:
    store = imported(tmp_path, model_type)
    options = replace(OPTIONS, grad_clip_mode=clip, activations=activations)
    with shardb.open(store) as opened, opened.at() as view:
        model = read_model(view)
    stream(store, model, options, range(1, STEPS + 1))
    trainer = resident_from(store, model, options)
    for step in range(1, STEPS + 1):
        assert trainer.step(batches(step), 1e-2) is not None
    expected, found = trainer.arrays(), stored_arrays(store)
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_would_weights_that_were_rounded_be_noticed(tmp_path: Path) -> None:
    store = imported(tmp_path / "a")
    with shardb.open(store) as opened, opened.at() as view:
        model = read_model(view)
    rounded = random_tensors(config_of("llama"))
    rounded["model.norm.weight"] = rounded["model.norm.weight"].to(torch.float8_e4m3fn).bfloat16()
    import_here(write_package(tmp_path / "p", config_of("llama"), rounded), tmp_path / "b")
    for each in (store, tmp_path / "b"):
        stream(each, model, OPTIONS, [1])
    one, other = stored_arrays(store), stored_arrays(tmp_path / "b")
    assert any(not np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_train_begins_at_the_import_and_goes_on(
    model_type: str, data: Path, tmp_path: Path
) -> None:
    store = imported(tmp_path, model_type)
    before = stored_tensors(store)
    more = ("--val-data-dir", str(data / "val"), "--validate-every", "1")
    assert train_here(flags(store, data, *more, "--max-steps", "2")) == 0
    assert train_here(["--store", str(store), "--max-steps", "4"]) == 0
    lines = step_lines(store)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["validation_loss"] < lines[0]["validation_loss"]
    with shardb.open(store) as opened:
        run = read_stored_run(opened)
        assert run is not None
        assert run.recipe.model.vocab_size == 64
        with opened.at() as view:
            entries = view.commit.shards
            assert {e.trainable for n, e in entries.items() if n.startswith("meta/")} == {False}
            trained = [e.trainable for n, e in entries.items() if not n.startswith("meta/")]
            assert all(trained)
    check_untouched(store, before)
    assert shardb_command("fsck", store).code == 0


def check_untouched(store: Path, before: Tensors) -> None:
    after = stored_tensors(store, "imported")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    now = stored_tensors(store)
    assert {tensor.dtype for tensor in now.values()} == {torch.float32}
    assert not any(torch.equal(now[name].bfloat16(), tensor) for name, tensor in before.items())


def test_two_branches_begin_at_one_import(data: Path, tmp_path: Path) -> None:
    store = imported(tmp_path)
    begin = ("--branch", "second", "--from", "imported", "--max-steps", "1")
    assert train_here(flags(store, data, "--max-steps", "1")) == 0
    assert train_here(flags(store, data, *begin)) == 0
    one, two = stored_tensors(store, "main"), stored_tensors(store, "second")
    assert all(torch.equal(one[name], tensor) for name, tensor in two.items())


def test_training_in_an_active_store_begins_at_the_import_too(data: Path, tmp_path: Path) -> None:
    plain, tiered = imported(tmp_path / "a"), imported(tmp_path / "b")
    assert train_here(flags(plain, data, "--max-steps", "2")) == 0
    active = ("--active", str(tmp_path / "active"))
    assert train_here(flags(tiered, data, *active, "--max-steps", "2")) == 0
    one, two = stored_tensors(plain), stored_tensors(tiered)
    assert all(torch.equal(one[name], tensor) for name, tensor in two.items())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"preset": "demo"}, "--preset"),
        ({"hidden_size": 64}, "--hidden-size 64 was given, but the imported model has 32"),
        ({"seq_len": 5}, "--seq-len"),
    ],
)
def test_flags_of_another_model_are_refused(
    given: dict[str, Any], words: str, data: Path, tmp_path: Path
) -> None:
    store = imported(tmp_path)
    asked = {"store": str(store), "data_dir": str(data / "train"), "device": "cpu", **given}
    with pytest.raises(InputError, match=words):
        make_plan(find_run(asked), asked, [])
    same = {**asked, "hidden_size": 32}
    for name in given:
        same.pop(name)
    assert make_plan(find_run(same), same, []).recipe.model.hidden_size == 32


def test_a_warning_of_words_that_are_never_learned_is_for_new_models_only(
    tmp_path: Path,
) -> None:
    rows = make_data(tmp_path / "data", vocab_size=8)
    store = imported(tmp_path)
    asked = {"store": str(store), "data_dir": str(rows / "train"), "device": "cpu"}
    assert not [note for note in make_plan(find_run(asked), asked, []).notes if "learned" in note]
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_layers": 1, "num_heads": 2}
    new = {**asked, "store": str(tmp_path / "new"), "intermediate_size": 32, **sizes}
    assert [note for note in make_plan(find_run(new), new, []).notes if "learned" in note]


def test_a_store_with_another_branch_only_is_not_taken_for_an_import(
    data: Path, tmp_path: Path
) -> None:
    package = write_package(tmp_path / "package", config_of("llama"))
    import_here(package, tmp_path / "store", branch="base")
    with pytest.raises(NotFoundError, match="base"):
        find_run({"store": str(tmp_path / "store"), "data_dir": str(data / "train")})


def test_an_adopting_transaction_gives_masters_and_zeros(tmp_path: Path) -> None:
    store = imported(tmp_path)
    with shardb.open(store) as opened, opened.begin() as txn:
        model = ModelConfig.from_json(read_model_here(opened).to_json())
        engine = Engine(model, OPTIONS, Device.from_name("cpu"))
        adopting = engine.adopting(txn)
        assert isinstance(adopting, AdoptingTransaction)
        exact = torch_adaptor.tensors(txn.read("params/block_001"))
        masters = torch_adaptor.tensors(adopting.read("params/block_001"))
        assert exact.keys() == masters.keys()
        for name, tensor in masters.items():
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor.bfloat16(), exact[name])
        state = adopting.read("optim/block_001")
        assert all(not array.any() for array in state.arrays().values())
        staged = adopting.stage("params/block_001", like=adopting.read("params/block_001"))
        staged.image[len(staged.layout.header) :] = 1
        staged.seal()
        assert (adopting.read("params/block_001").raw("mlp.up_proj.weight") == 1).all()
        adopting.discard("params/block_001")
        again = torch_adaptor.tensors(adopting.read("params/block_001"))
        assert torch.equal(again["mlp.up_proj.weight"], masters["mlp.up_proj.weight"])


def read_model_here(opened: shardb.Store) -> ModelConfig:
    with opened.at() as view:
        return read_model(view)


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "phi3"])
def test_is_memory_foretold_of_layers_of_transformers_too(model_type: str) -> None:
    """A walk on tensors without content, a plausible number, and more of it for longer rows."""
    model = read_model_config(config_of(model_type, sliding_window=8)).model

    def foretold(seq_len: int) -> int:
        shape = StepShape(
            model=model, options=OPTIONS, micro_batch_size=2, accumulation=1, seq_len=seq_len
        )
        return predicted_bytes(shape)

    assert WORKSPACE_BYTES < foretold(32) < foretold(128) < WORKSPACE_BYTES + (64 << 20)
