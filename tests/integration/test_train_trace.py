"""Does `train --trace` write what Perfetto shows, and refuse what has no lanes?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.training import arguments, make_data, train_here
from trainer.device_lanes import Lane
from trainer.tracing import STORE_LANE, TRACED_STEPS


def test_the_first_steps_lanes_are_written(tmp_path: Path) -> None:
    target, stop = tmp_path / "trace.json", TRACED_STEPS + 1
    flags = arguments(tmp_path / "run", make_data(tmp_path / "data"), "--max-steps", str(stop))
    assert train_here([*flags, "--device-pipeline", "on", "--trace", str(target)]) == 0
    events = json.loads(target.read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    wanted = {Lane.COMPUTE, Lane.UPDATE, Lane.PARAMS_IN, Lane.STATE_IN, Lane.OUT, STORE_LANE}
    assert wanted <= set(lanes.values())
    spans = [e for e in events if e["ph"] == "X"]
    commits = [e["name"] for e in spans if lanes[e["tid"]] == STORE_LANE]
    assert commits == [f"commit {step}" for step in range(1, TRACED_STEPS + 1)]
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    first = min(e["ts"] for e in spans if e["name"] == "commit 1")
    assert any(e["name"].startswith("backward") and e["ts"] < first for e in spans)
    lines = (tmp_path / "run/logs/steps.jsonl").read_text().splitlines()
    timings = json.loads(lines[-1])["timings"]
    for bucket in ("param_load", "forward_kernel", "head_kernel", "backward_kernel"):
        assert timings[f"{bucket}_seconds"] > 0


def test_steps_without_lanes_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = arguments(tmp_path / "run", make_data(tmp_path / "data"), "--max-steps", "2")
    assert train_here([*flags, "--trace", str(tmp_path / "trace.json")]) == 2
    assert "--device-pipeline on" in capsys.readouterr().err
    on = ["--device-pipeline", "on", "--trace", str(tmp_path / "none" / "trace.json")]
    for more in ([], ["--dry-run"]):
        assert train_here([*flags, *on, *more]) == 2
        assert "no such folder" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
