"""Is a command line that asks for adapters wrongly refused, with what to do instead?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardb
from tests.support.exports import byte_tokenizer
from tests.support.packages import config_of, import_here, write_package
from tests.support.training import make_data, train_here
from trainer import ceiling
from trainer.data.options import PrepareOptions
from trainer.data.prepare import prepare
from trainer.errors import InputError
from trainer.found import find_run
from trainer.inputs import check_beside_import, open_inputs
from trainer.model.stored import read_model
from trainer.plan import Plan, make_plan
from trainer.recipe_build import resumed_run

SIZE = 300


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An import that has a tokenizer."""
    folder = tmp_path_factory.mktemp("imported")
    package = write_package(folder / "package", config_of("llama", vocab_size=SIZE))
    (package / "tokenizer.json").write_bytes(byte_tokenizer(SIZE))
    import_here(package, folder / "store")
    return folder / "store"


def plan(store: Path, rows: Path, **more: object) -> Plan:
    asked = {"store": str(store), "data_dir": str(rows / "train"), "device": "cpu", **more}
    return make_plan(find_run(asked), asked, [])


@pytest.mark.parametrize(
    "flags",
    [
        ("--lora-targets", "all-linear"),
        ("--lora-alpha", "8"),
        ("--lora-dropout", "0.1"),
        ("--lora-rank", "0", "--lora-targets", "q_proj"),
    ],
)
def test_who_forgets_the_rank_trains_no_weight(
    flags: tuple[str, ...], store: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--store", str(store), "--data-dir", str(data / "train"), "--device", "cpu")
    assert train_here([*common, *flags, "--max-steps", "1"]) == InputError.exit_code
    said = capsys.readouterr().err
    assert "give --lora-rank too" in said
    assert flags[-2] in said
    with shardb.open(store) as opened:
        assert opened.resolve().id == opened.resolve("imported").id


def test_a_run_of_whole_weights_names_the_way_to_adapters(data: Path, tmp_path: Path) -> None:
    package = write_package(tmp_path / "package", config_of("llama"))
    import_here(package, tmp_path / "store")
    common = ["--store", str(tmp_path / "store")]
    begin = ("--data-dir", str(data / "train"), "--device", "cpu", "--threads", "1")
    assert train_here([*common, *begin, "--max-steps", "1"]) == 0
    way = "--branch NAME --from imported"
    for given in ({"lora_rank": 4}, {"lora_rank": 4, "lora_alpha": 8.0}, {"lora_targets": "x"}):
        with pytest.raises(InputError, match=way) as refused:
            make_plan(find_run({"store": common[1]}), {"store": common[1], **given}, [])
        assert "--lora-rank" in refused.value.message
    # And that way is one.
    asked = ("--branch", "beside", "--from", "imported", "--lora-rank", "2", "--max-steps", "1")
    assert train_here([*common, *begin, *asked]) == 0
    given = {"store": common[1], "branch": "beside", "lora_targets": "k_proj,o_proj"}
    with pytest.raises(InputError, match=r"k_proj,o_proj was given.* began with q_proj,v_proj:"):
        make_plan(find_run(given), given, [])


def test_an_infinite_alpha_is_refused_in_right_words(store: Path, data: Path) -> None:
    with pytest.raises(InputError, match="--lora-alpha is inf: give a finite number"):
        plan(store, data, lora_rank=2, lora_alpha=float("inf"))


def test_rows_longer_than_an_imports_positions_name_the_folder(store: Path, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    positions = plan_positions(store)
    np.save(tmp_path / "train" / "rows.npy", np.ones((4, positions + 2), "<u2"))
    with pytest.raises(InputError, match="prepare shorter rows with --seq-len") as refused:
        plan(store, tmp_path, lora_rank=2)
    assert str(tmp_path / "train") in refused.value.message
    assert "--max-position-embeddings" not in refused.value.message


def plan_positions(store: Path) -> int:
    with shardb.open(store) as opened, opened.at() as view:
        return read_model(view).max_position_embeddings


def other_words(tokenizer: bytes) -> bytes:
    """Give a tokenizer of as many ids, two of which mean one another's words."""
    body: dict[str, Any] = json.loads(tokenizer)
    words = body["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    return json.dumps(body).encode()


def test_rows_of_another_tokenizer_of_the_same_size_are_refused(
    store: Path, tmp_path: Path
) -> None:
    rows, own = make_data(tmp_path / "data"), byte_tokenizer(SIZE)
    beside = rows / "tokenizer.json"
    for same in (own, json.dumps(json.loads(own), indent=2).encode()):
        beside.write_bytes(same)
        assert not told(plan(store, rows, lora_rank=2))
    for other in (other_words(own), byte_tokenizer(SIZE - 20)):
        beside.write_bytes(other)
        for asked in ({"lora_rank": 2}, {}):
            with pytest.raises(InputError, match="--accept-other-tokenizer") as refused:
                plan(store, rows, **asked)
            assert str(rows / "train") in refused.value.message
            assert "tokenizer.json of the package" in refused.value.message
        assert len(told(plan(store, rows, lora_rank=2, accept_other_tokenizer=True))) == 1


def told(made: Plan) -> list[str]:
    return [note for note in made.notes if "tokenizer" in note]


def test_a_tokenizer_that_is_gone_is_a_warning(store: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("once upon a time there was a story. " * 200)
    (tmp_path / "own.json").write_bytes(byte_tokenizer(SIZE - 20))
    options = PrepareOptions(
        text=(tmp_path / "text.txt",),
        out=tmp_path / "rows",
        seq_len=16,
        tokenizer=tmp_path / "own.json",
    )
    prepare(options)
    (tmp_path / "rows" / "tokenizer.json").unlink()
    with shardb.open(store) as opened, opened.at() as view:
        model = read_model(view)
    inputs = open_inputs(str(tmp_path / "rows" / "train"), None, vocab_size=SIZE, seq_len=None)

    def notes(imported: bytes | None) -> list[str]:
        return check_beside_import(inputs, model, imported, accepts_other=False)

    assert notes(None) == notes((tmp_path / "own.json").read_bytes()) == []
    [warning] = notes(byte_tokenizer(SIZE))
    assert "is not known" in warning


@pytest.mark.parametrize(
    ("asked", "stored"),
    [
        ("q_proj,q_proj", "q_proj"),
        ("q_proj,self_attn.q_proj,v_proj", "q_proj,v_proj"),
        ("k_proj,all-linear", "all-linear"),
    ],
)
def test_a_module_is_named_once(asked: str, stored: str, store: Path, data: Path) -> None:
    found = plan(store, data, lora_rank=2, lora_targets=asked).recipe
    assert found == plan(store, data, lora_rank=2, lora_targets=stored).recipe
    assert found.lora_targets == tuple(stored.split(","))


def test_a_run_goes_on_whichever_way_its_targets_are_named(store: Path, data: Path) -> None:
    one = plan(store, data, lora_rank=2, lora_targets="q_proj,v_proj")
    for stored in (("q_proj", "v_proj"), ("v_proj", "q_proj", "q_proj")):
        recipe = replace(one.recipe, lora_targets=stored)
        for given in ("q_proj,v_proj", "v_proj,self_attn.q_proj,v_proj"):
            again, _ = resumed_run(recipe, one.settings, {"lora_targets": given}, device=None)
            assert again == recipe  # what is stored stays as it is
        for other in ("q_proj", "q_proj,v_proj,k_proj", "q_proj,v_proj,nothing"):
            with pytest.raises(InputError, match="this run began with"):
                resumed_run(recipe, one.settings, {"lora_targets": other}, device=None)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"activations": "keep"}, "--activations keep: .*compiled blocks keep what attention gave"),
        ({"lora_dropout": 0.5}, "--compile-blocks: compiled blocks know no --lora-dropout"),
    ],
)
def test_compiled_blocks_refuse_what_they_do_not_know(
    more: dict[str, Any], words: str, store: Path, data: Path
) -> None:
    with pytest.raises(InputError, match=words):
        plan(store, data, lora_rank=2, compile_blocks=True, **more)
    assert plan(store, data, lora_rank=2, compile_blocks=True).recipe.compile_blocks


def test_layers_of_transformers_are_not_said_to_be_compiled(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = write_package(tmp_path / "package", config_of("phi3"))
    import_here(package, tmp_path / "store")
    asked = {"lora_rank": 2, "lora_targets": "qkv_proj"}
    begun = plan(tmp_path / "store", data, **asked)
    common = ("--store", str(tmp_path / "store"), "--data-dir", str(data / "train"))
    flags = ("--device", "cpu", "--lora-rank", "2", "--lora-targets", "qkv_proj")
    assert train_here([*common, *flags, "--compile-blocks", "--dry-run"]) == InputError.exit_code
    assert "only native blocks are compiled: leave it out" in capsys.readouterr().err
    with pytest.raises(InputError, match="--compile-blocks"):
        resumed_run(begun.recipe, begun.settings, {"compile_blocks": True}, device=None)
    # A run that was stored so, before this was refused, goes on.
    stored = replace(begun.recipe, compile_blocks=True)
    again, _ = resumed_run(stored, begun.settings, {"compile_blocks": True}, device=None)
    assert again == stored


def test_a_ceiling_that_a_step_beats_is_raised_and_said(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured while the machine was busy is not kept for ever."""
    package = write_package(tmp_path / "package", config_of("llama"))
    import_here(package, tmp_path / "store")
    common = ("--store", str(tmp_path / "store"), "--data-dir", str(data / "train"))
    flags = [*common, "--device", "cpu", "--threads", "1", "--lora-rank", "2", "--max-steps"]
    assert train_here([*flags, "1"]) == 0
    assert "measured too low" not in capsys.readouterr().err
    file = tmp_path / "store" / "logs" / ceiling.FILE_NAME
    [key] = json.loads(file.read_text())
    file.write_text(json.dumps({key: dict.fromkeys(json.loads(file.read_text())[key], 1000.0)}))
    assert train_here([*flags, "3"]) == 0
    said = capsys.readouterr()
    assert said.err.count("which was measured too low") == 1
    lines = [json.loads(line) for line in (file.parent / "steps.jsonl").read_text().splitlines()]
    assert max(line["ceiling_percent"] for line in lines) <= 100
    assert json.loads(file.read_text())[key][ceiling.BEATEN]
    assert train_here([*flags, "4"]) == 0
    assert "measured too low" not in capsys.readouterr().err
    assert ceiling.BEATEN not in json.loads(file.read_text())[key]
