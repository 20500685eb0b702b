"""Is the memory that a dry run tells never less than what the run then takes?"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.training import TrainProcess, make_data, train_here

SHAPE = (
    *("--vocab-size=4000", "--hidden-size=256", "--num-layers=3", "--num-heads=4"),
    "--intermediate-size=704",
)


def high_water_bytes(pid: int) -> int:
    """Give the most memory a process held since it began its program; 0 when it has ended.

    The peak that wait4(2) tells would not do: it may be that of the process it was forked from.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(found[0]) * 1024 if found else 0


@pytest.mark.parametrize(
    "shape",
    [SHAPE, (*SHAPE, "--micro-batch-size=64", "--grad-clip-mode=shard")],
    ids=["parameters", "activations"],
)
def test_the_peak_is_within_what_was_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: tuple[str, ...]
) -> None:
    data = make_data(tmp_path / "data")
    rows = np.load(data / "train" / "rows_000.npy")
    np.save(data / "train" / "rows_000.npy", np.tile(rows, (1, 6))[:, :65])
    (data / "train" / "rows_001.npy").unlink()
    flags = ["--store", str(tmp_path / "run"), *shape, "--data-dir", str(data / "train")]
    flags += ["--device", "cpu", "--threads", "1", "--max-steps", "2"]
    assert train_here([*flags, "--dry-run", "--json"]) == 0
    told_bytes = json.loads(capsys.readouterr().out)["budget"]["memory_bytes_estimate"]
    peak_bytes = 0
    with TrainProcess(flags, is_fresh=True) as train:
        while train.process.poll() is None:
            peak_bytes = max(peak_bytes, high_water_bytes(train.pid))
            time.sleep(0.005)
    assert train.process.returncode == 0
    assert peak_bytes <= told_bytes
    # Control: it is no number that is always large enough.
    assert peak_bytes > 0.4 * told_bytes
