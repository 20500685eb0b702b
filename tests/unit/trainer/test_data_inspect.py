"""Does an inspection tell what is there, and is every kind of damage found?"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.stories import STORIES, options, write_text
from trainer.data.inspect import inspect
from trainer.data.prepare import prepare
from trainer.errors import InputError


@pytest.fixture
def data(tmp_path: Path) -> Path:
    text = write_text(tmp_path / "stories.txt", STORIES)
    prepare(options(text, tmp_path / "data", rows_per_file=100, val_fraction=0.2))
    return tmp_path / "data"


def test_is_a_prepared_directory_reported(data: Path) -> None:
    report = inspect(data, sample_rows=3)
    assert [split.name for split in report.splits] == ["train", "val"]
    assert (report.vocab_size, report.end_of_text_id) == (320, 0)
    train = report.splits[0]
    assert (train.seq_len, train.dtype, train.files) == (
        16,
        "uint16",
        len(os.listdir(data / "train")),
    )
    assert train.largest_id < 320
    assert train.documents is not None
    assert len(train.samples) == 3
    assert train.samples[0].text is not None
    assert any(story.startswith(train.samples[0].text) for story in STORIES)
    assert report.findings == ()


def test_is_one_split_reported_alone(data: Path) -> None:
    report = inspect(data / "val", sample_rows=0)
    assert [split.name for split in report.splits] == ["val"]
    assert report.vocab_size == 320
    assert report.splits[0].samples == ()


def test_is_a_folder_without_manifest_reported_as_far_as_it_goes(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(20, dtype=np.uint16).reshape(4, 5))
    report = inspect(tmp_path, verify=True)
    [split] = report.splits
    assert (split.rows, split.seq_len, split.largest_id, split.tokens) == (4, 4, 19, 17)
    assert split.samples[0].text is None
    assert split.samples[0].ids == (0, 1, 2, 3, 4)
    assert report.findings == ()


def test_is_another_tokenizer_used_to_decode(data: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[40, 41, 42]], dtype=np.uint16))
    report = inspect(tmp_path, tokenizer=data / "tokenizer.json")
    assert report.splits[0].samples[0].text is not None


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "file_missing": (lambda d: (d / "train/rows-00000.npy").unlink(), {"rows-00000.npy"}),
    "file_changed": (lambda d: flip(d / "val/rows-00000.npy", 200), {"rows-00000.npy"}),
    "file_refused": (lambda d: os.truncate(d / "train/rows-00001.npy", 1000), {"rows-00001.npy"}),
    "file_unlisted": (
        lambda d: (d / "train/more.npy").write_bytes((d / "train/rows-00000.npy").read_bytes()),
        {"more.npy"},
    ),
    "tokenizer_changed": (lambda d: flip(d / "tokenizer.json", 1), {"tokenizer.json"}),
    "tokenizer_missing": (lambda d: (d / "tokenizer.json").unlink(), {"tokenizer.json"}),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_is_every_damage_a_finding(kind: str, data: Path) -> None:
    damage, names = DAMAGE[kind]
    assert inspect(data, verify=True).findings == ()
    damage(data)
    findings = inspect(data, verify=True).findings
    assert {finding.kind for finding in findings} == {kind}
    assert {Path(finding.path).name for finding in findings} == names


def test_is_an_id_beyond_the_vocabulary_a_finding(data: Path) -> None:
    path = data / "val" / "rows-00000.npy"
    rows = np.load(path)
    rows[-1, -1] = 320
    np.save(path, rows)
    [finding] = inspect(data, verify=True).findings
    assert finding.kind == "file_refused"
    assert "token id 320, but the vocabulary has 320 ids" in finding.message


def test_is_a_missing_split_a_finding(data: Path) -> None:
    for path in (data / "val").iterdir():
        path.unlink()
    (data / "val").rmdir()
    [finding] = inspect(data, verify=True).findings
    assert finding.kind == "folder_missing"
    with pytest.raises(InputError, match="no such directory"):
        inspect(data)


def test_is_a_directory_that_is_none_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name, reason in (("missing", "no such directory"), ("file", "not a directory")):
        with pytest.raises(InputError, match=reason):
            inspect(tmp_path / name)
    with pytest.raises(InputError, match=r"holds no \.npy files"):
        inspect(tmp_path)
