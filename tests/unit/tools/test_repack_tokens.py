"""Does repacking keep every row, in order, whatever the sizes of files are?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tools.repack_tokens import main
from trainer.data.rows import TokenRows

WIDTH = 9


def small_files(folder: Path, counts: list[int]) -> np.ndarray:
    folder.mkdir()
    rng = np.random.default_rng(5)
    parts = [rng.integers(0, 500, size=(count, WIDTH)).astype("<i4") for count in counts]
    for index, part in enumerate(parts):
        np.save(folder / f"part-{index:04d}.npy", part)
    return np.concatenate(parts)


def rows_of(folder: Path) -> np.ndarray:
    with TokenRows.open(folder) as rows:
        return np.stack([rows.row(index) for index in range(rows.row_count)])


@pytest.mark.parametrize("rows_per_file", [1, 7, 16, 1000])
def test_are_rows_the_same_in_the_same_order(tmp_path: Path, rows_per_file: int) -> None:
    expected = small_files(tmp_path / "many", [1, 3, 1, 12, 5, 1])
    command = [str(tmp_path / "many"), str(tmp_path / "few")]
    assert main([*command, "--rows-per-file", str(rows_per_file)]) == 0
    assert np.array_equal(rows_of(tmp_path / "few"), expected)
    with TokenRows.open(tmp_path / "few") as rows:
        assert max(rows.row_counts) <= rows_per_file
        assert len(rows.files) == -(-len(expected) // rows_per_file)
        assert rows.files[0].dtype == np.dtype("<u2")


def test_are_raw_ids_cut_so_that_no_target_is_lost(tmp_path: Path) -> None:
    ids = np.arange(25, dtype="<u2")
    ids.tofile(tmp_path / "ids.bin")
    command = [str(tmp_path / "ids.bin"), str(tmp_path / "out")]
    assert main([*command, "--raw-dtype", "uint16", "--seq-len", "8"]) == 0
    expected = np.stack([ids[start : start + 9] for start in (0, 8, 16)])
    assert np.array_equal(rows_of(tmp_path / "out"), expected)


def test_is_an_existing_folder_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small_files(tmp_path / "many", [2])
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "thesis.txt").write_text("years of work")
    assert main([str(tmp_path / "many"), str(tmp_path / "few")]) == 5
    assert "few: there already" in capsys.readouterr().err
    assert (tmp_path / "few" / "thesis.txt").read_text() == "years of work"
