"""Is wrong input refused by name, with the right exit code, before anything is made?"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import shardb
from tests.support.training import arguments, make_data, train_here

Change = Callable[[Path], list[str]]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_data(tmp_path / "data", rows=40)


def flags(*added: str) -> Change:
    return lambda _: list(added)


def no_folder(data: Path) -> list[str]:
    return ["--data-dir", str(data / "nowhere")]


def empty_folder(data: Path) -> list[str]:
    (data / "empty").mkdir()
    return ["--data-dir", str(data / "empty")]


def id_beyond_vocabulary(data: Path) -> list[str]:
    rows = np.load(data / "train" / "rows_001.npy")
    rows[-1, -1] = 64
    np.save(data / "train" / "rows_001.npy", rows)
    return []


def id_beyond_vocabulary_in_validation(data: Path) -> list[str]:
    rows = np.load(data / "val" / "rows_001.npy")
    rows[0, 3] = 64
    np.save(data / "val" / "rows_001.npy", rows)
    return ["--val-data-dir", str(data / "val")]


def validation_of_another_length(data: Path) -> list[str]:
    shutil.rmtree(data / "val")
    (data / "val").mkdir()
    np.save(data / "val" / "rows.npy", np.zeros((4, 9), dtype="<u2"))
    return ["--val-data-dir", str(data / "val")]


def floats(data: Path) -> list[str]:
    np.save(data / "train" / "rows_000.npy", np.zeros((4, 17), dtype="<f4"))
    return []


def file_in_the_way(data: Path) -> list[str]:
    (data / "file").write_text("notes")
    return ["--store", str(data / "file")]


def folder_of_something_else(data: Path) -> list[str]:
    (data / "folder").mkdir()
    (data / "folder" / "notes.txt").write_text("notes")
    return ["--store", str(data / "folder")]


BAD_INPUT: dict[str, tuple[Change, int, tuple[str, ...]]] = {
    "no data folder": (no_folder, 2, ("nowhere", "no such directory")),
    "empty data folder": (empty_folder, 2, ("empty",)),
    "id beyond vocabulary": (id_beyond_vocabulary, 2, ("rows_001.npy", "row 19", "64", "byte")),
    "id in validation": (id_beyond_vocabulary_in_validation, 2, ("val", "rows_001.npy", "64")),
    "validation rows of another length": (validation_of_another_length, 2, ("8 tokens", "16")),
    "floats": (floats, 2, ("rows_000.npy",)),
    "no validation folder": (flags("--val-data-dir", "/nowhere/val"), 2, ("/nowhere/val",)),
    "seq-len": (flags("--seq-len", "32"), 2, ("--seq-len", "32", "16")),
    "short positions": (flags("--max-position-embeddings", "8"), 2, ("--max-position", "16")),
    "width": (flags("--hidden-size", "33"), 2, ("hidden_size", "33", "4")),
    "kv heads": (flags("--num-kv-heads", "3"), 2, ("num_kv_heads", "3")),
    "dropout": (flags("--dropout", "0.1"), 2, ("dropout", "0.1")),
    "preset": (flags("--preset", "demmo"), 2, ("demmo", "demo")),
    "device": (flags("--device", "tpu"), 2, ("tpu",)),
    "dtype": (flags("--dtype", "fp8"), 2, ("--dtype", "fp8", "bf16")),
    "optimizer": (flags("--optimizer", "sgd"), 2, ("--optimizer", "sgd", "adamw")),
    "old name": (flags("--run-dir", "elsewhere"), 2, ("--store elsewhere",)),
    "json alone": (flags("--json"), 2, ("--dry-run",)),
    "unknown flag": (flags("--learning-rte", "1"), 2, ("--learning-rte", "--learning-rate")),
    "no number": (flags("--max-steps", "many"), 2, ("--max-steps", "integer")),
    "negative": (flags("--max-steps", "-1"), 2, ("--max-steps", "at least 0")),
    "file in the way": (file_in_the_way, 2, ("file", "--store")),
    "folder of something else": (folder_of_something_else, 2, ("folder", "--store")),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_clear_error(
    name: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, code, words = BAD_INPUT[name]
    store = tmp_path / "run"
    assert train_here([*arguments(store, data, "--max-steps", "1"), *change(data)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    for word in words:
        assert word in captured.err
    assert not store.exists()


def test_the_same_flags_without_the_fault_are_fine(data: Path, tmp_path: Path) -> None:
    args = arguments(tmp_path / "run", data, "--max-steps", "1")
    assert train_here([*args, "--val-data-dir", str(data / "val")]) == 0


@pytest.mark.parametrize(
    ("args", "word"),
    [([], "--store"), (["--store", "run"], "--data-dir"), (["--store", "r", "--x"], "--x")],
)
def test_what_a_new_run_needs_is_asked_for(
    args: list[str],
    word: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train_here(args) == 2
    assert word in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_mistyped_store_is_told_as_one(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here(arguments(tmp_path / "first-run", data, "--max-steps", "0")) == 0
    assert train_here(["--store", str(tmp_path / "fist-run")]) == 2
    told = capsys.readouterr().err
    assert "fist-run: there is no store here to go on with" in told
    assert f"did you mean {tmp_path / 'first-run'}?" in told
    assert train_here(["--store", str(tmp_path / "elsewhere" / "x")]) == 2
    assert "did you mean" not in capsys.readouterr().err
    assert not (tmp_path / "fist-run").exists()


def test_a_full_disk_is_told_before_anything_is_made(
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = os.statvfs
    free_blocks = 100

    def nearly_full(path: object) -> os.statvfs_result:
        values = list(real(path))  # type: ignore[arg-type]
        values[4] = free_blocks
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", nearly_full)
    store = tmp_path / "run"
    assert train_here(arguments(store, data, "--max-steps", "1")) == 6
    error = capsys.readouterr().err
    assert "needs" in error
    assert "409.60 kB are free" in error
    assert not store.exists()


def test_a_machine_without_the_memory_is_told_which_part_needs_it(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run"
    # In memory: a disk with room would take the activations of as many micro-batches.
    many = ("--gradient-accumulation-steps", "1000000", "--activation-placement", "vram")
    assert train_here(arguments(store, data, *many)) == 2
    error = capsys.readouterr().err
    assert "most of it for" in error
    assert "this machine has" in error
    assert not store.exists()


def test_a_store_of_a_newer_format_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run"
    args = arguments(store, data, "--max-steps", "1")
    assert train_here(args) == 0
    fields = json.loads((store / "FORMAT").read_text())
    (store / "FORMAT").write_text(json.dumps({**fields, "version": 99}))
    capsys.readouterr()
    assert train_here([*args, "--max-steps", "2"]) == 3
    error = capsys.readouterr().err
    assert "99" in error
    assert "newer" in error


def test_changed_data_is_refused_unless_accepted(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run"
    assert train_here(arguments(store, data, "--max-steps", "2")) == 0
    rows = np.load(data / "train" / "rows_000.npy")
    rows[0, 0] = (rows[0, 0] + 1) % 64
    np.save(data / "train" / "rows_000.npy", rows)
    capsys.readouterr()
    assert train_here(arguments(store, None, "--max-steps", "3")) == 2
    assert "--accept-changed-data" in capsys.readouterr().err
    assert train_here([*arguments(store, None, "--max-steps", "3"), "--accept-changed-data"]) == 0
    with shardb.open(store) as opened:
        assert "data_digest" in opened.resolve().metrics["recipe_changes"]
    # The new data is now the run's own.
    assert train_here(arguments(store, None, "--max-steps", "4")) == 0


def test_moved_data_is_the_same_data(data: Path, tmp_path: Path) -> None:
    store = tmp_path / "run"
    assert train_here(arguments(store, data, "--max-steps", "1")) == 0
    moved = data.rename(tmp_path / "moved")
    assert train_here(arguments(store, None, "--max-steps", "2")) == 2
    again = [*arguments(store, None, "--max-steps", "2"), "--data-dir", str(moved / "train")]
    assert train_here(again) == 0
    assert train_here(arguments(store, None, "--max-steps", "3")) == 0


def test_a_run_never_starts_empty_where_history_exists(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run"
    args = arguments(store, data, "--max-steps", "2")
    assert train_here(args) == 0
    for entry in store.iterdir():
        if entry.name != "logs":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    capsys.readouterr()
    assert train_here(args) == 2
    assert "step log goes to step 2" in capsys.readouterr().err
    assert [entry.name for entry in store.iterdir()] == ["logs"]


def test_a_store_that_lost_its_format_file_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run"
    args = arguments(store, data, "--max-steps", "2")
    assert train_here(args) == 0
    (store / "FORMAT").unlink()
    shutil.rmtree(store / "logs")
    for again in (args, arguments(store)):
        capsys.readouterr()
        assert train_here(again) == 3
        assert "FORMAT" in capsys.readouterr().err


def test_a_store_without_commits_is_begun(data: Path, tmp_path: Path) -> None:
    store = tmp_path / "run"
    shardb.open(store, create=True).close()
    assert train_here(arguments(store, data, "--max-steps", "1")) == 0


def test_a_vocabulary_far_beyond_the_data_is_warned_of_with_numbers(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = [*arguments(tmp_path / "run", data, "--max-steps", "0"), "--vocab-size", "256"]
    assert train_here(args) == 0
    error = capsys.readouterr().err
    assert "warning: " in error
    assert "256" in error
    assert "64" in error
    assert "75 %" in error


def test_without_validation_data_nothing_is_validated_and_that_is_said(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run"
    assert train_here(arguments(store, data, "--max-steps", "1", "--validate-every", "1")) == 0
    assert "not validated" in capsys.readouterr().err
    with shardb.open(store) as opened:
        assert "validation_loss" not in opened.resolve().metrics


def test_validation_is_off_where_it_is_said_although_the_run_remembers_a_folder(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run"
    validated = ("--val-data-dir", str(data / "val"), "--validate-every", "1")
    assert train_here(arguments(store, data, *validated, "--max-steps", "1")) == 0
    off = ("--val-data-dir", "off", "--max-steps", "2")
    assert train_here(arguments(store, None, *off)) == 0
    assert "no --val-data-dir" in capsys.readouterr().err
    # It stays off until a folder is given again, and a run may begin so.
    assert train_here(arguments(store, None, "--max-steps", "3")) == 0
    assert train_here(arguments(store, None, *validated, "--max-steps", "4")) == 0
    lines = [json.loads(line) for line in (store / "logs" / "steps.jsonl").open()]
    assert [line["step"] for line in lines if "validation_loss" in line] == [1, 4]
    assert train_here(arguments(tmp_path / "new", data, *off, "--dry-run")) == 0
    best = arguments(store, None, *off, "--snapshot-best", "--max-steps", "5")
    assert train_here(best) == 2
    assert "--no-snapshot-best" in capsys.readouterr().err


def test_a_step_of_more_rows_than_there_are_is_told(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rows, is_told in (("40", False), ("41", True)):
        run = arguments(tmp_path / "run", data, "--dry-run")
        assert train_here([*run, "--micro-batch-size", rows]) == 0
        assert ("a step takes 41 rows" in capsys.readouterr().out) is is_told


def test_a_step_that_no_machine_holds_is_refused_with_the_flags(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("--micro-batch-size", "--gradient-accumulation-steps"):
        run = arguments(tmp_path / "run", data, flag, "1000000")
        assert train_here([*run, "--micro-batch-size", "1000000"]) == 2
        assert flag in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
