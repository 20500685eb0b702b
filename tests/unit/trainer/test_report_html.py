"""Does the report tell what the log and the step log tell, and no markup of others?"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import shardb
from shardb.errors import NotFoundError
from tests.support.training import arguments, make_data, train_here
from trainer import report_html_data
from trainer.report_cli import main
from trainer.report_html import page
from trainer.report_html_data import report_data
from trainer.step_log import FILE_NAME, log_folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train eight steps, the last two with a changed rate."""
    folder = tmp_path_factory.mktemp("report")
    data = make_data(folder / "data")
    run = folder / "run"
    more = ("--val-data-dir", str(data / "val"), "--validate-every", "3", "--snapshot-every", "4")
    assert train_here(arguments(run, data, "--max-steps", "6", *more)) == 0
    assert train_here(arguments(run, None, "--max-steps", "8", "--learning-rate", "0.001")) == 0
    return run


def test_every_step_has_its_numbers(store: Path) -> None:
    data = report_data(store, "main")
    assert data["step"] == list(range(1, 9))
    lines = (log_folder(store, "main") / FILE_NAME).read_text().splitlines()
    assert data["series"]["loss"] == [json.loads(line)["loss"] for line in lines]
    # A commit's own numbers lack the time it took: shown are those of the whole step.
    for name in ("seconds", "tokens_per_second"):
        assert data["series"][name] == [json.loads(line)[name] for line in lines]
    held_out = data["series"]["validation_loss"]
    validated = [s for s, v in zip(data["step"], held_out, strict=True) if v]
    assert validated == [3, 6, 8]
    assert all(value > 0 for column in data["norms"].values() for value in column)
    assert set(data["norms"]) == {"embeddings", "block_000", "block_001", "final_norm", "lm_head"}
    assert all(v and v > 0 for v in data["series"]["host_memory_bytes"])
    assert max(data["timings"]["forward_kernel_seconds"]) > 0
    kinds = {(event["step"], event["kind"]) for event in data["events"]}
    assert {(7, "recipe"), (4, "snapshot"), (8, "snapshot")} <= kinds


def test_a_lost_step_log_costs_times_and_memory_only(store: Path) -> None:
    log = log_folder(store, "main") / FILE_NAME
    kept = log.read_bytes()
    whole = report_data(store, "main")
    log.unlink()
    try:
        data = report_data(store, "main")
    finally:
        log.write_bytes(kept)
    assert data["timings"] == {}
    assert data["norms"] == whole["norms"]
    assert data["series"]["loss"] == whole["series"]["loss"]


def test_steps_that_are_only_in_the_step_log_are_shown(store: Path) -> None:
    log = log_folder(store, "main") / FILE_NAME
    kept = log.read_bytes()
    log.write_bytes(kept + b'{"step": 9, "loss": 1.5, "seconds": 2.0}\n{"step": 10, "lo')
    try:
        data = report_data(store, "main")
    finally:
        log.write_bytes(kept)
    assert data["step"][-1] == 9
    assert data["time"][-1] == pytest.approx(data["time"][-2] + 2)


def test_a_long_run_is_thinned_and_says_so(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_html_data, "POINTS_MAX", 2)
    data = report_data(store, "main")
    assert data["step_count"] == 8
    assert len(data["step"]) < 8
    assert {3, 4, 6, 7, 8} <= set(data["step"])


def test_the_page_asks_no_host_and_no_name_is_markup(store: Path) -> None:
    with shardb.open(store) as opened:
        opened.create_snapshot("best", ref="step-8")
    data = report_data(store, "main")
    evil = "</script><script>alert(1)</script>"
    data["events"].append({"step": 8, "kind": "snapshot", "text": evil})
    data["store"] = evil
    text = page(data)
    assert evil not in text
    assert text.count("</script>") == 2
    hosts = set(re.findall(r"https?://[^\s\"'<]+", text))
    assert hosts <= {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text


def test_no_trained_step_is_not_found(tmp_path: Path, store: Path) -> None:
    shardb.open(tmp_path / "empty", create=True).close()
    for place, branch in ((tmp_path / "empty", "main"), (store, "other")):
        with pytest.raises(NotFoundError, match="no step"):
            report_data(place, branch)


def test_the_command_writes_whole_files_and_exits_4_on_an_empty_store(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    shardb.open(tmp_path / "empty", create=True).close()
    for place, more, code in (
        (store, ["--out", str(out)], 0),
        (store, ["--json"], 0),
        (tmp_path / "empty", ["--out", str(tmp_path / "other.html")], 4),
        (store, ["--out", str(tmp_path)], 2),
        (store, ["--out", str(tmp_path / "none" / "page.html")], 2),
    ):
        monkeypatch.setattr(sys, "argv", ["train-report", str(place), *more])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
    assert out.read_text().startswith("<!doctype html>")
    said = capsys.readouterr()
    assert json.loads(said.out)["step_count"] == 8
    assert f"{tmp_path / 'none'} is no folder" in said.err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "page.html"]
