"""Is what cannot be prepared refused by name, and is nothing left of a failure?"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardb.errors import StorageFailedError, StorageFullError
from tests.support.stories import END, STORIES, files_of, options, write_text
from trainer.data import prepare as prepare_module
from trainer.data.options import PrepareOptions
from trainer.data.prepare import prepare
from trainer.data.tokenizer import TextTokenizer
from trainer.errors import InputError


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "stories.txt", STORIES)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no vocabulary": ({"vocab_size": None}, "--vocab-size: give it"),
    "vocabulary of 256": ({"vocab_size": 256}, "--vocab-size 256: give 257 to"),
    "huge vocabulary": ({"vocab_size": 10**9}, "--vocab-size 1000000000"),
    "no row length": ({"seq_len": 0}, "--seq-len 0"),
    "huge row length": ({"seq_len": 10**9}, "--seq-len 1000000000"),
    "no val": ({"val_fraction": 0.0}, "--val-fraction 0.0"),
    "all val": ({"val_fraction": 0.9}, "--val-fraction 0.9"),
    "nan": ({"val_fraction": float("nan")}, "--val-fraction nan"),
    "no rows a file": ({"rows_per_file": 0}, "--rows-per-file 0"),
    "end without tokenizer": ({"end_of_text": "</s>"}, "--end-of-text: only with --tokenizer"),
    "no tokenizer": ({"tokenizer": Path("nowhere.json")}, "nowhere.json: cannot be read"),
    "row longer than val": ({"seq_len": 2000}, "the val split has .* than the 2,001 of one row"),
    "row longer than all": ({"seq_len": 200_000}, "the train split has .* less than the 200,001"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_a_wrong_option_named_and_nothing_made(name: str, text: Path, tmp_path: Path) -> None:
    more, reason = REFUSED[name]
    with pytest.raises(InputError, match=reason):
        prepare(options(text, tmp_path / "data", **more))
    assert os.listdir(tmp_path) == ["stories.txt"]


def test_is_text_that_is_none_refused(text: Path, tmp_path: Path) -> None:
    blank = tmp_path / "blank.txt"
    blank.write_text(f" \n{END}\n\n")
    short = write_text(tmp_path / "short.txt", ["too short"])
    with pytest.raises(InputError, match="--text: the files hold no text"):
        prepare(options(blank, tmp_path / "data"))
    with pytest.raises(InputError, match="--val-text: the files hold no text"):
        prepare(options(text, tmp_path / "data", val_text=(blank,)))
    with pytest.raises(InputError, match=r"the val split has .* or more --val-text"):
        prepare(options(text, tmp_path / "data", val_text=(short,)))
    with pytest.raises(InputError, match="the train split has 0 tokens of 0 documents"):
        prepare(options(short, tmp_path / "data", val_text=(copy_of(short),), seq_len=4))
    with pytest.raises(InputError, match="give at least one text file"):
        PrepareOptions(text=(), out=tmp_path / "data", seq_len=4, vocab_size=300)
    assert not (tmp_path / "data").exists()


def copy_of(path: Path) -> Path:
    copy = path.with_name("copy-" + path.name)
    copy.write_bytes(path.read_bytes())
    return copy


def test_is_a_file_given_twice_refused(text: Path, tmp_path: Path) -> None:
    (tmp_path / "link.txt").symlink_to(text)
    with pytest.raises(InputError, match="given to --text and --val-text"):
        options(text, tmp_path / "data", val_text=(tmp_path / "link.txt",))
    with pytest.raises(InputError, match="given to --text twice"):
        PrepareOptions(text=(text, text), out=tmp_path / "d", seq_len=4, vocab_size=300)


def test_is_a_file_that_changes_between_two_passes_refused(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = TextTokenizer.trained

    def trained(texts: Iterator[str], vocab_size: int) -> TextTokenizer:
        made = real(texts, vocab_size)
        write_text(text, STORIES[1:])
        return made

    monkeypatch.setattr(prepare_module.TextTokenizer, "trained", trained)
    with pytest.raises(InputError, match=r"stories\.txt: the file changed while it was being read"):
        prepare(options(text, tmp_path / "data"))
    assert os.listdir(tmp_path) == ["stories.txt"]


class FailingSync:
    """Counts syncs and fails the n-th."""

    def __init__(self, patch: pytest.MonkeyPatch, nth: int, number: int) -> None:
        self.count, self._nth, self._number = 0, nth, number
        self._real = os.fsync
        patch.setattr(os, "fsync", self)

    def __call__(self, descriptor: int) -> None:
        self.count += 1
        if self.count == self._nth:
            raise OSError(self._number, os.strerror(self._number))
        self._real(descriptor)


def prepare_failing(chosen: PrepareOptions, nth: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        FailingSync(patch, nth, errno.ENOSPC)
        prepare(chosen)


def test_does_no_failed_sync_leave_half_a_data_set(text: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        counted = FailingSync(patch, 0, errno.ENOSPC)
        prepare(options(text, tmp_path / "good"))
    whole = files_of(tmp_path / "good")
    # Every file, the two row files when they are finished, three folders, and the parent.
    assert counted.count == len(whole) + 2 + 3 + 1
    for nth in range(1, counted.count):
        with pytest.raises(StorageFullError):
            prepare_failing(options(text, tmp_path / "data"), nth)
        assert sorted(os.listdir(tmp_path)) == ["good", "stories.txt"]
    with pytest.raises(StorageFailedError) as caught:
        prepare_failing(options(text, tmp_path / "data"), counted.count)
    assert "complete and in its place" in str(caught.value)
    assert files_of(tmp_path / "data") == whole


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.ENOSPC, StorageFullError, "bytes are free"),
        (errno.EDQUOT, StorageFullError, "bytes are free"),
        (errno.EIO, StorageFailedError, "nothing was kept"),
        (errno.EROFS, InputError, "give another --out"),
    ],
)
def test_is_a_failure_to_write_named_by_what_to_do(
    number: int,
    kind: type[Exception],
    words: str,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FailingSync(monkeypatch, 2, number)
    with pytest.raises(kind, match=words):
        prepare(options(text, tmp_path / "data"))
    assert os.listdir(tmp_path) == ["stories.txt"]
