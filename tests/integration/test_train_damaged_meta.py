"""Is a shard that steps do not read refused before them when it is damaged, and mended?"""

from __future__ import annotations

from pathlib import Path

import pytest

from shardb.cli import run as shardb_command
from tests.support.active_runs import head, train_until_killed
from tests.support.exports import byte_tokenizer
from tests.support.small_stores import flip_bit
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
    assert "a run begun anew with the same flags has the same meta/ shards: --from RUN" in said
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
