"""Ways to damage a store of known history, and what a repaired one must still be."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import shardb
from shardb import frames
from shardb.format import encode_format
from shardb.frames import Frame
from tests.support.small_stores import SHARDS, commit_step, flip_bit, fsck, object_of

Damage = Callable[[Path], None]


@dataclass(frozen=True, kw_only=True)
class Known:
    """Every commit that a store ever made: id to step and the digests of its shards."""

    commits: dict[str, tuple[int, dict[str, str]]]

    @staticmethod
    def of(root: Path) -> Known:
        """What the log of a whole store tells."""
        with shardb.open(root) as store:
            told = {}
            for record in store.history():
                if record["kind"] == "commit":
                    shards = {n: bytes(e[0]).hex() for n, e in record["shards"].items()}
                    told[record["id"]] = (record["step"], shards)
        return Known(commits=told)


def check_repaired(root: Path, known: Known, *, may_be_empty: bool = False) -> None:
    """No error is found, every commit is one that was made and reads, and the run goes on."""
    report = fsck(root)
    assert not report.has_errors, report.findings
    with shardb.open(root) as store:
        for commit in store.commits():
            step, digests = known.commits[commit.id]
            assert commit.step == step
            assert {name: entry.digest for name, entry in commit.shards.items()} == digests
            check_values(store, commit)
        if may_be_empty and not store.branches():
            return
        assert store.branches(), "a store with history never opens empty"
        head = store.resolve()
        made = commit_step(store, head.step + 1)
        check_values(store, made)
    assert not fsck(root).has_errors


def check_values(store: shardb.Store, commit: shardb.Commit) -> None:
    """Every shard holds what its step wrote."""
    with store.at(commit=commit.id) as view:
        for index, name in enumerate(SHARDS):
            assert np.all(view.read(name).array("w") == commit.step * 10 + index)


# Damages


def last_segment(root: Path) -> Path:
    return max(path for path in (root / "wal").iterdir() if path.name[:1].isdigit())


def frames_of(path: Path) -> list[Frame]:
    """The records of a raw segment up to the first damaged one."""
    data, offset, found = memoryview(path.read_bytes()), 0, []
    while (frame := frames.decode(data, offset)) is not None:
        offset = frame.end
        found.append(frame)
    return found


def spoil_record(number: int) -> Damage:
    """Flip a bit of a record of the last segment; negative numbers count from its end."""

    def damage(root: Path) -> None:
        path = last_segment(root)
        frame = frames_of(path)[number]
        flip_bit(path, frame.offset + frames.HEADER_BYTES + 3)

    return damage


def shorten_log(count: int) -> Damage:
    """Cut the last records off, to the byte."""

    def damage(root: Path) -> None:
        path = last_segment(root)
        path.write_bytes(path.read_bytes()[: frames_of(path)[-count].offset])

    return damage


def without_index(damage: Damage) -> Damage:
    """The same, and the index is gone too."""

    def both(root: Path) -> None:
        damage(root)
        shutil.rmtree(root / "index")

    return both


def remove(name: str) -> Damage:
    """A file or a directory is gone."""

    def damage(root: Path) -> None:
        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def object_of_newest(root: Path, step: int, shard: str) -> Path:
    """The file of a shard of a step; -1 is the newest one."""
    if step < 0:
        with shardb.open(root) as store:
            step = store.resolve().step
    return object_of(root, step, shard)


def remove_object(step: int, shard: str) -> Damage:
    return lambda root: object_of_newest(root, step, shard).unlink()


def spoil_object(step: int, shard: str, offset: int = 5000) -> Damage:
    return lambda root: flip_bit(object_of_newest(root, step, shard), offset)


def exchange_objects(root: Path) -> None:
    """Two objects of the same size lie under each other's names."""
    one, other = object_of(root, 2, "params/a"), object_of(root, 6, "params/b")
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def object_as_directory(root: Path) -> None:
    path = object_of(root, 2, "params/a")
    path.unlink()
    path.mkdir()


def garble_last_record(root: Path) -> None:
    """A whole record whose content contradicts what is before it."""
    path = last_segment(root)
    last = frames_of(path)[-1]
    payload = last.payload.replace(b"\xa6parent", b"\xa6parenT")
    frame, _ = frames.encode(lsn=last.lsn, previous=last.previous, payload=payload)
    path.write_bytes(path.read_bytes()[: last.offset] + frame)


def foreign_format(root: Path) -> None:
    (root / "FORMAT").write_bytes(encode_format("0" * 32))


def spoil_closed_segment(root: Path) -> None:
    path = min((root / "wal").iterdir())
    flip_bit(path, path.stat().st_size // 2)


def spoil_index_entry(root: Path) -> None:
    path = root / "index/data.mdb"
    digest = bytes.fromhex(object_of(root, 6, "params/a").stem)
    path.write_bytes(path.read_bytes().replace(digest, bytes(16)))
