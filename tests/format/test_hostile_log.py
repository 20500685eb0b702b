"""Is a log whose records are forged, with right digests, refused without a plain error?"""

from __future__ import annotations

import copy
import random
import shutil
from pathlib import Path
from typing import Any

import msgpack
import pytest

import shardb
from shardb import frames
from shardb.errors import CorruptionError, StorageFailedError
from tests.format.make_golden import build
from tests.support.stores import copied, last_segment

FORGERIES = 30
WEIRD: list[Any] = [
    None, True, -1, 0, 1.5, "", b"", [], {}, "main", "x" * 600, "\0", 1 << 63, [None], {"a": {}},
    bytes(16), float("nan"), "../../escaped",
]  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile") / "run"
    build(root)
    shutil.rmtree(root / "index")
    (root / "reserve").unlink(missing_ok=True)
    return root


def read_records(path: Path) -> tuple[frames.Frame, list[dict[str, Any]]]:
    """The first frame of a segment, and the records of all."""
    data, at, found = memoryview(path.read_bytes()), 0, []
    while (frame := frames.decode(data, at)) is not None:
        found.append(frame)
        at = frame.end
    return found[0], [msgpack.unpackb(frame.payload) for frame in found]


def write_records(path: Path, first: frames.Frame, records: list[dict[str, Any]]) -> None:
    """Write a segment anew, with right digests and a right chain."""
    parts, previous = [], first.previous
    for number, record in enumerate(records):
        payload = msgpack.packb(record)
        part, previous = frames.encode(lsn=first.lsn + number, previous=previous, payload=payload)
        parts.append(part)
    path.write_bytes(b"".join(parts))


def forged(value: Any, source: random.Random) -> Any:
    """The value with one thing in it changed, left out or added."""
    if isinstance(value, dict) and value and source.random() < 0.85:
        changed = dict(value)
        key = source.choice(list(value))
        if source.random() < 0.15:
            del changed[key]
        elif source.random() < 0.1:
            changed[source.choice(["zz", "head", "kind"])] = source.choice(WEIRD)
        else:
            changed[key] = forged(value[key], source)
        return changed
    if isinstance(value, list) and value and source.random() < 0.7:
        rest = list(value)
        at = source.randrange(len(rest))
        rest[at] = forged(rest[at], source)
        return rest
    return source.choice(WEIRD)


def read_everything(root: Path) -> None:
    with shardb.open(root) as store:
        for commit in store.commits():
            with store.at(commit=commit.id) as view:
                for name in view.names():
                    view.read(name).arrays()
        assert len(list(store.history())) > 0


@pytest.mark.parametrize("seed", range(4))
def test_does_a_forged_record_end_in_an_error_of_its_own(
    original: Path, tmp_path: Path, seed: int
) -> None:
    source = random.Random(seed)
    first, records = read_records(last_segment(original))
    refused = 0
    for number in range(FORGERIES):
        root = copied(original, tmp_path / f"copy-{number}")
        changed = copy.deepcopy(records)
        at = source.randrange(len(changed))
        changed[at] = forged(changed[at], source)
        write_records(last_segment(root), first, changed)
        try:
            read_everything(root)
        except (CorruptionError, StorageFailedError):
            refused += 1
        assert not (tmp_path / "escaped").exists()
        shutil.rmtree(root)
    assert refused > FORGERIES // 4


def test_is_the_same_log_written_anew_let_through(original: Path, tmp_path: Path) -> None:
    """The control arm."""
    root = copied(original, tmp_path / "copy")
    first, records = read_records(last_segment(root))
    write_records(last_segment(root), first, records)
    assert last_segment(root).read_bytes() == last_segment(original).read_bytes()
    read_everything(root)
