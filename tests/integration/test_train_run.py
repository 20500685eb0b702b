"""Does a run record what it was asked, measure what it commits, and keep what it was told to?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import shardb
from tests.support.training import MODEL, arguments, make_data, step_lines, train_here
from trainer.command_cli import answer, new_app
from trainer.data.batches import validation_batches
from trainer.data.rows import TokenRows
from trainer.generate_cli import HELP, command
from trainer.model.stored import TOKENIZER_SHARD, read_bytes
from trainer.run import Run
from trainer.run_shards import read_stored_run
from trainer.start import engine_for

STEP_LINE_KEYS = {
    *("step", "loss", "learning_rate", "tokens_seen", "grad_norm", "tokens_per_second"),
    *("seconds", "updated_shards", "max_active_param_shards", "durable_step"),
    *("clip_scale", "tokens", "batch_digest", "timings", "pending_writes", "bytes_read"),
    *("bytes_written", "skipped_steps", "ceiling_percent", "publish_pending", "publish_seconds"),
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_data(tmp_path / "data", rows=40)


def test_a_dry_run_tells_exact_sizes_and_makes_nothing(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run"
    args = arguments(store, data, "--max-steps", "3")
    assert train_here([*args, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert train_here([*args, "--dry-run", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert not store.exists()
    assert f"{report['parameter_count']:,}" in text
    assert all(f"{size:,} bytes" in text for size in report["shards"].values())

    assert train_here(args) == 0
    with shardb.open(store) as opened, opened.at() as view:
        made = {name: entry.bytes for name, entry in view.commit.shards.items() if entry.trainable}
        numbers = sum(
            array.size
            for name in view.names()
            if name.startswith("params/")
            for array in view.read(name).arrays().values()
        )
    assert report["shards"] == made
    assert report["parameter_count"] == numbers
    assert report["budget"]["bytes_written_per_step"] == sum(made.values())
    held = sum(f.stat().st_size for part in ("objects", "spare") for f in (store / part).iterdir())
    assert held <= report["budget"]["store_bytes"]
    log = sum(f.stat().st_size for part in ("wal", "index") for f in (store / part).iterdir())
    shards = 3 * report["budget"]["bytes_written_per_step"]
    assert log + (store / "reserve").stat().st_size <= report["budget"]["store_bytes"] - shards


def test_each_line_has_what_scripts_read(data: Path, tmp_path: Path) -> None:
    store = tmp_path / "run"
    assert train_here(arguments(store, data, "--max-steps", "2")) == 0
    for line in step_lines(store):
        assert set(line) >= STEP_LINE_KEYS
        assert line["updated_shards"] == 5
        assert line["max_active_param_shards"] == line["max_active_optimizer_shards"] == 1
        assert line["tokens_seen"] == line["step"] * 4 * 16


@pytest.mark.parametrize(("prefetch", "activations"), [("off", "keep"), ("cpu", "recompute")])
def test_settings_change_no_bit(
    data: Path, tmp_path: Path, prefetch: str, activations: str
) -> None:
    plain, other = tmp_path / "plain", tmp_path / "other"
    plainly = ["--max-steps", "3", "--activations", "recompute"]
    assert train_here(arguments(plain, data, *plainly)) == 0
    settings = [
        "--prefetch-shards",
        prefetch,
        "--activations",
        activations,
        "--no-async-shard-writes",
        "--snapshot-every",
        "2",
    ]
    settings += ["--val-data-dir", str(data / "val"), "--validate-every", "1"]
    assert train_here([*arguments(other, data, "--max-steps", "3"), *settings]) == 0
    with shardb.open(plain) as one, shardb.open(other) as two:
        assert one.resolve().shards == two.resolve().shards
        assert one.resolve().recipe == two.resolve().recipe
        assert [*two.snapshots()] == ["step-2"]


def test_a_validation_belongs_to_the_commit_that_holds_it(data: Path, tmp_path: Path) -> None:
    store = tmp_path / "run"
    flags = ("--val-data-dir", str(data / "val"), "--validate-every", "2", "--max-steps", "5")
    assert train_here(arguments(store, data, *flags)) == 0
    measured = [line["step"] for line in step_lines(store) if "validation_loss" in line]
    assert measured == [2, 4, 5]
    rows = TokenRows.open(data / "val")
    with shardb.open(store) as opened, opened.at(step=4) as view, opened.at(step=5) as after:
        stored = read_stored_run(opened)
        assert stored is not None
        engine = engine_for(stored.recipe, stored.settings)
        again = engine.evaluate(view, validation_batches(rows, 4)).loss
        assert view.commit.metrics["validation_loss"] == again
        # Control: the state of another step gives another loss.
        assert engine.evaluate(after, validation_batches(rows, 4)).loss != again


def test_a_change_is_applied_printed_and_recorded(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run"
    assert train_here(arguments(store, data, "--max-steps", "2")) == 0
    capsys.readouterr()
    change = ["--learning-rate", "1e-4", "--decay-tokens", "4096", "--lr-schedule", "linear"]
    assert train_here([*arguments(store, None, "--max-steps", "4"), *change]) == 0
    assert "changed: learning_rate from 0.003 to 0.0001" in capsys.readouterr().err
    changed = {"learning_rate", "decay_tokens", "lr_schedule"}
    lines = step_lines(store)
    assert set(lines[2]["recipe_changes"]) == changed
    assert lines[2]["recipe_changes"]["learning_rate"] == [0.003, 0.0001]
    assert "recipe_changes" not in lines[3]
    with shardb.open(store) as opened, opened.at(step=4) as view:
        stored = read_stored_run(opened)
        assert stored is not None
        assert stored.recipe.learning_rate == 1e-4
        assert view.commit.shards["meta/recipe"].step == 3
        assert view.commit.recipe == stored.recipe.digest


@pytest.mark.parametrize(
    "change", [("--hidden-size", "64"), ("--seed", "8"), ("--preset", "demo"), ("--qk-norm",)]
)
def test_what_the_run_began_with_may_not_change(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, ...]
) -> None:
    store = tmp_path / "run"
    assert train_here(arguments(store, data, "--max-steps", "1")) == 0
    capsys.readouterr()
    assert train_here([*arguments(store, None, "--max-steps", "2"), *change]) == 2
    assert change[0] in capsys.readouterr().err


def test_a_resume_leaves_the_dtype_of_every_tensor(data: Path, tmp_path: Path) -> None:
    store = tmp_path / "run"
    assert train_here(arguments(store, data, "--max-steps", "1", "--dtype", "bf16")) == 0
    assert train_here(arguments(store, None, "--max-steps", "2")) == 0
    with shardb.open(store) as opened, opened.at(step=1) as one, opened.at(step=2) as two:
        for name in one.names():
            assert one.read(name).specs == two.read(name).specs
            kinds = {spec.dtype for spec in two.read(name).specs.values()}
            assert kinds == ({"U8"} if name.startswith("meta/") else {"F32"})


def test_snapshots_are_pinned_and_one_that_a_kill_prevented_is_made_up_for(
    data: Path, tmp_path: Path
) -> None:
    store = tmp_path / "run"
    assert train_here(arguments(store, data, "--max-steps", "4")) == 0
    flags = ("--max-steps", "7", "--save-every", "2")
    assert train_here(arguments(store, None, *flags)) == 0
    with shardb.open(store) as opened:
        assert sorted(opened.snapshots()) == ["step-4", "step-6"]


@pytest.fixture
def tokenizer(data: Path) -> Tokenizer:
    """Train a tokenizer and lay it beside the data, as preparing does."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["a king and a queen"] * 20, trainer)
    made.save(str(data / "tokenizer.json"))
    return made


def generate_here(store: Path, *more: str) -> int:
    args = ["--store", str(store), "--prompt", "a king", "--max-new-tokens", "12", *more]
    return answer(new_app(command, HELP), args, "train-generate")


def test_text_is_generated_from_the_store_alone(
    data: Path, tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run"
    args = [*arguments(store, data, "--max-steps", "2"), "--vocab-size", "300"]
    assert train_here([*args, "--snapshot-every", "1"]) == 0
    with shardb.open(store) as opened, opened.at() as view:
        kept = read_bytes(view, TOKENIZER_SHARD)
    assert kept == (data / "tokenizer.json").read_bytes()
    (data / "tokenizer.json").unlink()
    texts = []
    for more in (("--seed", "1"), ("--seed", "1"), ("--seed", "2"), ("--temperature", "0")):
        capsys.readouterr()
        assert generate_here(store, *more) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("a king") and text.endswith("\n") for text in texts)
    assert generate_here(store, "--ref", "step-1") == 0
    assert generate_here(store, "--ref", "step-9") == 4
    assert generate_here(store, "--top-p", "0") == 2


def test_a_run_without_a_tokenizer_asks_for_one(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "run"
    assert train_here(arguments(store, data, "--max-steps", "1")) == 0
    assert generate_here(store) == 2
    assert "--tokenizer" in capsys.readouterr().err
    assert generate_here(tmp_path / "nowhere") == 4


def test_help_names_every_flag_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_here(["--help"]) == 0
    text = capsys.readouterr().out
    for word in (*MODEL[::2], "--dry-run", "--store", "143", "second SIGINT", "steps.jsonl"):
        assert word in text


def test_event_files_are_written_where_a_writer_is_there(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    events = tmp_path / "events"
    flags = ("--max-steps", "3", "--tensorboard", str(events))
    for module in ("torch.utils.tensorboard", "tensorboardX"):
        monkeypatch.setitem(sys.modules, module, None)
    assert train_here(arguments(tmp_path / "run", data, *flags)) == 2
    assert ".[tensorboard]" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()

    points: list[tuple[int, str, float]] = []

    class Writer:
        """Keeps the points that it is given."""

        def __init__(self, folder: str, purge_step: int) -> None:
            points.append((purge_step, folder, 0.0))

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            points.append((step, tag, value))

        def close(self) -> None:
            """Nothing is open."""

    writers = ModuleType("tensorboardX")
    writers.SummaryWriter = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboardX", writers)
    assert train_here(arguments(tmp_path / "run", data, *flags)) == 0
    lines = step_lines(tmp_path / "run")
    assert points[0] == (1, str(events), 0.0)
    losses = [(step, value) for step, tag, value in points if tag == "train/loss"]
    assert losses == [(line["step"], line["loss"]) for line in lines]
    # The folder is a setting of the run: it goes on there, and stops when it is told to.
    assert train_here(arguments(tmp_path / "run", None, "--max-steps", "4")) == 0
    assert (4, str(events), 0.0) in points
    count = len(points)
    off = ("--max-steps", "5", "--tensorboard", "off")
    assert train_here(arguments(tmp_path / "run", None, *off)) == 0
    assert len(points) == count


def test_the_rate_of_a_step_counts_its_commit(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr("trainer.run.time", clock)

    def takes(name: str, seconds: float) -> None:
        work = getattr(Run, name)

        def slow(run: Run, *given: Any) -> Any:
            clock.now += seconds
            return work(run, *given)

        monkeypatch.setattr(Run, name, slow)

    takes("_rows_now", 1.0)
    takes("_commit", 3.0)
    store = tmp_path / "run"
    assert train_here(arguments(store, data, "--max-steps", "3")) == 0
    tokens = 4 * 16
    assert [line["tokens_per_second"] for line in step_lines(store)] == [tokens / 4] * 3
    with shardb.open(store) as opened:
        told = [record["metrics"] for record in opened.history() if record["kind"] == "commit"]
    rates = [metrics["tokens_per_second"] for metrics in told if "seconds" in metrics]
    # Before the first commit of a process there is none that could stand for it.
    assert rates == [tokens / 1, tokens / 4, tokens / 4]
