"""Does a run on raw token files take the same course as on the same rows in `.npy` files?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.training import SEQ_LEN, arguments, step_records, train_here


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the same rows twice: `raw/train/a.bin`, and `npy/train/a.npy`."""
    folder = tmp_path_factory.mktemp("both")
    ids = np.random.default_rng(0).integers(0, 64, 40 * SEQ_LEN + 2)
    for kind in ("raw", "npy"):
        (folder / kind / "train").mkdir(parents=True)
    ids.astype("<u2").tofile(folder / "raw" / "train" / "a.bin")
    rows = np.lib.stride_tricks.sliding_window_view(ids, SEQ_LEN + 1)[::SEQ_LEN]
    np.save(folder / "npy" / "train" / "a.npy", rows.astype("<u2"))
    return folder


@pytest.mark.parametrize("order", ["shuffled", "sequential"])
def test_raw_files_give_the_same_steps(both: Path, tmp_path: Path, order: str) -> None:
    raw = ("--data-dtype", "uint16", "--seq-len", str(SEQ_LEN))
    for kind, more in (("raw", raw), ("npy", ())):
        flags = arguments(tmp_path / kind, both / kind, "--row-order", order, *more)
        assert train_here([*flags, "--max-steps", "2"]) == 0
    # A resume knows how its data is read.
    for kind in ("raw", "npy"):
        assert train_here(arguments(tmp_path / kind, None, "--max-steps", "4")) == 0
    raw_steps, npy_steps = step_records(tmp_path / "raw"), step_records(tmp_path / "npy")
    assert {s: r.batch_digest for s, r in raw_steps.items() if s} == {
        s: r.batch_digest for s, r in npy_steps.items() if s
    }
    assert raw_steps[4].loss == npy_steps[4].loss


def test_raw_files_without_a_length_or_of_another_width_are_refused(
    both: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = arguments(tmp_path / "run", both / "raw")
    assert train_here([*flags, "--data-dtype", "uint16"]) == 2
    assert "--seq-len" in capsys.readouterr().err
    assert train_here([*flags, "--data-dtype", "uint8", "--seq-len", "16"]) == 2
    assert "--data-dtype" in capsys.readouterr().err
    # Read as 32-bit ids, two ids become one beyond the vocabulary.
    assert train_here([*flags, "--data-dtype", "uint32", "--seq-len", "16"]) == 2
    assert "vocabulary" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
