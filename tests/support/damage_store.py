"""A store with a file of every kind, what it holds, and the older versions its files had."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import shardb
from shardb.pack import pack_snapshots
from shardb.records import Commit, Record
from shardb.references import chain_of, pack_rows
from shardb.state import Tables

SHARDS = ("params/a", "params/b")
ITEMS = 5000  # objects of less than 16 KiB are not packed
STEPS = 9
SNAPSHOTS = (2, 3, 5, 7)
PACKED = ("step-2", "step-3")
SEGMENT_BYTES = 2500
# Where the files of a kind lie: patterns below the store.
KINDS = {
    "object": ("objects/*.safetensors",),
    "packed object": ("objects/*.pack",),
    "open log segment": ("wal/*.wal",),
    "closed log segment": ("wal/*.wal.zst",),
    "index": ("index/data.mdb",),
    "FORMAT": ("FORMAT",),
    "lock file of the index": ("index/lock.mdb",),
    "lock": ("locks/*",),
    "lease": ("leases/*",),
    "spare file": ("spare/free.*",),
    "staged file": ("spare/staged.*",),
    "unfinished file": ("wal/*.partial", "objects/*.partial"),
    "reserve": ("reserve",),
    "journal of steps": ("logs/steps.jsonl",),
}
DEAD_LEASE = f"{'1' * 32}.0123456789abcdef"


@dataclass(frozen=True, kw_only=True)
class Held:
    """Everything that a store says: names, records, and the bytes of every shard."""

    branches: dict[str, list[str]]  # the commits that each retains, its head last
    records: dict[str, Record]  # of commits
    snapshots: dict[str, str]
    shards: dict[str, dict[str, bytes]]  # commit to shard to bytes
    wrong: list[str]  # what could not be read, with the store's own error


@dataclass(kw_only=True)
class Specimen:
    """The store, what it holds, which commits need each file, and older versions of its files."""

    root: Path
    held: Held
    steps: dict[str, int] = field(default_factory=dict)
    needed_by: dict[str, set[str]] = field(default_factory=dict)  # path to commits
    older: dict[str, list[bytes]] = field(default_factory=dict)

    def files(self, kind: str) -> list[str]:
        """The paths of a kind, below the store."""
        found = (path for pattern in KINDS[kind] for path in self.root.glob(pattern))
        return sorted(path.relative_to(self.root).as_posix() for path in found)


def held(store: shardb.Store) -> Held:
    """Read everything; what is damaged is noted, and anything but the store's own error fails."""
    shards: dict[str, dict[str, bytes]] = {}
    wrong = []
    for commit in store.commits():
        with store.at(commit=commit.id) as view:
            shards[commit.id] = {}
            for name in view.names():
                try:
                    shards[commit.id][name] = view.read(name).image.tobytes()
                except shardb.ShardbError as error:
                    wrong.append(f"{commit.id} {name} {error.exit_code} {error}")
    return Held(
        branches=store.index.read(_retained),
        records={commit.id: commit.to_record() for commit in store.commits()},
        snapshots={name: commit.id for name, commit in store.snapshots().items()},
        shards=shards,
        wrong=wrong,
    )


def _retained(tables: Tables) -> dict[str, list[str]]:
    return {name: row["retained"] for name, row in tables.items("branches")}


def commit_step(store: shardb.Store, step: int) -> Commit:
    """Commit a step whose shards differ little from those of the step before."""
    with store.begin() as txn:
        for index, name in enumerate(SHARDS):
            values = np.arange(ITEMS, dtype=np.float32) * 1e-3 + (step * 10 + index) * 1e-5
            txn.write(name, {"w": values.astype(np.float32)})
        if txn.base is None:
            txn.write("meta/recipe", {"json": np.frombuffer(b"{}", np.uint8)}, trainable=False)
        return txn.commit(step=step, state={"position": step * 8}, metrics={"loss": 1 / (step + 1)})


def make_specimen(root: Path) -> Specimen:
    """Make the store; nobody has it open afterwards."""
    older: dict[str, list[bytes]] = {}
    with shardb.open(root, create=True) as store:
        for step in range(STEPS):
            last_segment = step >= STEPS - 2  # its older versions end at other steps
            store.appender._segment_limit_bytes = SEGMENT_BYTES << (10 if last_segment else 0)
            commit_step(store, step)
            if step in SNAPSHOTS:
                store.create_snapshot(f"step-{step}")
            _keep_versions(root, older)
        pack_snapshots(store, PACKED)
        _keep_versions(root, older)
    _add_scratch(root)
    with shardb.open(root) as store:
        found = held(store)
        specimen = Specimen(root=root, held=found)
        specimen.steps = {commit.id: commit.step for commit in store.commits()}
        specimen.needed_by = _needed_by(store)
    specimen.older = {path: list(_differing(root, path, older[path])) for path in older}
    return specimen


def _keep_versions(root: Path, older: dict[str, list[bytes]]) -> None:
    for pattern in ("wal/*.wal", "index/data.mdb", "objects/*.safetensors", "FORMAT"):
        for path in root.glob(pattern):
            versions = older.setdefault(path.relative_to(root).as_posix(), [])
            data = path.read_bytes()
            if data not in versions:
                versions.append(data)


def _differing(root: Path, path: str, versions: list[bytes]) -> Iterator[bytes]:
    now = (root / path).read_bytes() if (root / path).exists() else None
    yield from (version for version in versions if version != now)


def _add_scratch(root: Path) -> None:
    """What dead processes left: a spare and a staged file, half a segment, a lease, a journal."""
    image = next(iter(sorted(root.glob("objects/*.safetensors"))))
    size = image.stat().st_size
    shutil.copy(image, root / f"spare/free.{size}.00000000000000aa")
    shutil.copy(image, root / "spare/staged.main.00000000000000bb")
    (root / "wal/0000000099.wal.partial").write_bytes(b"half a segment" * 500)
    (root / "leases" / DEAD_LEASE).write_bytes(b'{"pid": 1}')
    (root / "logs").mkdir()
    (root / "logs/steps.jsonl").write_bytes(b'{"step": 1, "loss": 1.0}\n' * 300)


def _needed_by(store: shardb.Store) -> dict[str, set[str]]:
    """Which commits need each file of `objects/`, as an image, packed, or as the base of others."""
    found: dict[str, set[str]] = {}

    def of_digest(digest: str) -> list[str]:
        def chain(tables: Tables) -> list[str]:
            packed = chain_of(tables, digest)
            base = pack_rows(tables)[packed[-1]].base if packed else digest
            return [*(f"objects/{d}.pack" for d in packed), f"objects/{base}.safetensors"]

        return store.index.read(chain)

    for commit in store.commits():
        for entry in commit.shards.values():
            for path in of_digest(entry.digest):
                found.setdefault(path, set()).add(commit.id)
    return found
