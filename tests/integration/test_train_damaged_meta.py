"""Is a shard that steps do not read refused before them when it is damaged, and mended?"""

from __future__ import annotations

from pathlib import Path

import pytest

import shardb
from shardb.cli import run as shardb_command
from tests.support.active_runs import head, train_until_killed
from tests.support.exports import byte_tokenizer
from tests.support.packages import config_of, import_here, write_package
from tests.support.small_stores import flip_bit, tree
from tests.support.training import arguments, make_data, train_here

FLAGS = ("--vocab-size", "300", "--max-steps", "2")


def object_of_head(store: Path, shard: str) -> Path:
    return store / "objects" / f"{head(store).shards[shard].digest}.safetensors"


def test_a_damaged_tokenizer_is_named_and_comes_back_from_a_run_of_the_same_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make_data(tmp_path / "data", vocab_size=300)
    (data / "tokenizer.json").write_bytes(byte_tokenizer(300))
    store, again = tmp_path / "run", tmp_path / "again"
    assert train_here(arguments(store, data, *FLAGS)) == 0
    damaged = object_of_head(store, "meta/tokenizer")
    flip_bit(damaged, -2)
    capsys.readouterr()
    assert train_here(arguments(store, None, "--max-steps", "3")) == 3
    said = capsys.readouterr().err
    assert f"{damaged}: this object, the shard meta/tokenizer of step 2, is damaged" in said
    assert f"`shardb repair {store} --from COPY`" in said
    assert shardb_command(["repair", str(store), "--yes"]) == 1
    said = capsys.readouterr().out
    assert "meta/tokenizer of steps 1, 2 cannot be read" in said
    assert "a run begun anew with the same flags has the same meta/ shards, and so has" in said
    assert train_here(arguments(again, data, *FLAGS)) == 0
    assert shardb_command(["repair", str(store), "--from", str(again), "--yes"]) == 0
    assert train_here(arguments(store, None, "--max-steps", "3")) == 0


def test_a_missing_shard_of_an_active_store_comes_back_from_the_durable_one(
    data: Path, store: Path, active: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--max-steps", "4", "--active", str(active), "--durable-every", "2")
    train_until_killed(arguments(store, data, *flags), after=3)
    missing = object_of_head(active, "meta/model")
    missing.unlink()
    capsys.readouterr()
    assert train_here(arguments(store, None)) == 3
    said = capsys.readouterr().err
    assert f"{missing}: this object, the shard meta/model of step 3, is damaged" in said
    assert f"`shardb repair {active} --from COPY`" in said
    assert shardb_command(["repair", str(active), "--from", str(store), "--yes"]) == 0
    assert train_here(arguments(store, None)) == 0
    assert head(store).step == 4


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write_package(tmp_path / "package", config_of("llama"))


def test_a_damaged_recipe_comes_back_from_a_run_and_no_import_takes_steps(
    package: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An import has no recipe: to take it for a source of one lost every step of a run."""
    store, again = tmp_path / "run", tmp_path / "again"
    for each, steps in ((store, "3"), (again, "1")):
        import_here(package, each)
        assert train_here(begin(each, data, "--max-steps", steps)) == 0
    damaged = object_of_head(store, "meta/recipe")
    flip_bit(damaged, -2)
    capsys.readouterr()
    assert train_here(arguments(store, None, "--max-steps", "4")) == 3
    assert (
        f"{damaged}: this object, the shard meta/recipe of step 3, is damaged or missing."
        f" `shardb repair {store} --from COPY` puts it back; a run begun anew with the same flags"
        " has the same meta/recipe; the import that it began with has none"
    ) in capsys.readouterr().err
    import_here(package, tmp_path / "import")
    steps_before, before = steps_of(store), tree(store)
    assert shardb_command(["repair", str(store), "--from", str(tmp_path / "import"), "--yes"]) == 4
    said = capsys.readouterr()
    assert "lost for good: step 3 of main: meta/recipe cannot be read" in said.out
    assert "An import has no meta/recipe: --from it would lose these steps" in said.out
    assert "has nothing of what is damaged here, so nothing was changed" in said.err
    assert tree(store) == before
    assert shardb_command(["repair", str(store), "--from", str(again), "--yes"]) == 0
    assert steps_of(store) == steps_before == {0, 2, 3}
    assert train_here(arguments(store, None, "--max-steps", "4")) == 0


def test_a_shard_of_an_import_comes_back_from_the_import(
    package: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run"
    import_here(package, store)
    assert train_here(begin(store, data, "--max-steps", "2")) == 0
    flip_bit(object_of_head(store, "meta/model"), -2)
    capsys.readouterr()
    assert train_here(arguments(store, None, "--max-steps", "3")) == 3
    assert "has the same meta/model, and so has the same import" in capsys.readouterr().err
    import_here(package, tmp_path / "import")
    assert shardb_command(["repair", str(store), "--from", str(tmp_path / "import"), "--yes"]) == 0
    assert train_here(arguments(store, None, "--max-steps", "3")) == 0


def begin(store: Path, data: Path, *more: str) -> list[str]:
    """Give the arguments of a run on what was imported."""
    rows = ("--data-dir", str(data / "train"), "--micro-batch-size", "4")
    return ["--store", str(store), "--device", "cpu", "--threads", "1", "--seed", "7", *rows, *more]


def steps_of(store: Path) -> set[int]:
    with shardb.open(store) as opened:
        return {commit.step for commit in opened.commits()}
