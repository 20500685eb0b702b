"""Going on past damage in a log, where the state behind it has to be put together.

Owns the lenient replay: records behind a hole are whole, and each commit record tells its commit
completely, but what the hole held is not known. So every record changes what it can, in order,
and retention is believed to have let go what has no files any more. Knows nothing of files but the
names of those in `objects/`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

from shardb import records, state
from shardb.errors import LogDamagedError, UsageError
from shardb.frames import Frame
from shardb.objects import OBJECT_SUFFIX, PACK_SUFFIX
from shardb.records import Commit, Record, new_record
from shardb.references import PackRow
from shardb.retention import Policy, kept
from shardb.state import DictTables


def salvaged(tables: DictTables, behind: Iterable[Frame], names: Collection[str]) -> DictTables:
    """The state of `tables`, taken on by the whole records that come behind a hole.

    `names` are those of the files that objects have.
    """
    salvage = _Salvage(tables)
    for frame in behind:
        try:
            salvage.meet(records.unpack(frame.payload))
        except (LogDamagedError, UsageError, KeyError, TypeError, ValueError, AttributeError):
            continue  # what makes no sense here changes nothing
    return salvage.tables(names)


class _Salvage:
    """A state that takes records one by one, whatever they follow on."""

    def __init__(self, tables: DictTables) -> None:
        self._begin(tables)

    def _begin(self, tables: DictTables) -> None:
        rows = DictTables.copy_of(tables).tables
        self.meta = {key: value for key, value in rows["meta"].items() if key in state.META_KEPT}
        self.branches: dict[str, Any] = rows["branches"]
        self.snapshots: dict[str, Any] = rows["snapshots"]
        self.abandoned: dict[str, Any] = rows["abandoned"]
        self.commits: dict[str, Record] = rows["commits"]
        self.packs: dict[str, Any] = rows["packs"]

    def meet(self, record: Record) -> None:
        """Let a record change what it can."""
        kind = record["kind"]
        if kind == "init":
            self.meta["store_id"] = record["store_id"]
        elif kind == "policy":
            Policy.from_record(record["policy"])
            self.meta["policy"] = record["policy"]
        elif kind == "commit":
            self._know(record)
            self._move(record["branch"], record["id"])
        elif kind == "branch" and record["commit"] in self.commits:
            row = {"head": record["commit"], "retained": [record["commit"]]}
            self.branches[record["name"]] = row
        elif kind == "snapshot":
            self._meet_snapshot(record)
        elif kind == "delete":
            names = self.snapshots if record["what"] == "snapshot" else self.branches
            names.pop(record["name"], None)
        elif kind == "rewind" and record["to"] in self.commits:
            self._meet_rewind(record)
        elif kind == "gc":
            for commit in record["abandoned"]:
                self.abandoned.pop(commit, None)
        elif kind == "pack":
            self._meet_pack(record)
        elif kind == "unpack":
            self.packs.pop(bytes(record["digest"]).hex(), None)
        elif kind == "checkpoint":
            self._meet_checkpoint(record["state"])

    def _know(self, record: Record) -> None:
        Commit.from_record(record)
        self.commits[record["id"]] = {k: v for k, v in record.items() if k != "rolled_up"}

    def _meet_snapshot(self, record: Record) -> None:
        if record.get("received") is not None:
            self._know(record["received"])
        if record["commit"] in self.commits:
            row = {"commit": record["commit"], "time": record["time"]}
            self.snapshots[record["name"]] = row

    def _move(self, branch: str, commit: str) -> None:
        before = self.branches.get(branch, {"retained": []})["retained"]
        retained = [*(c for c in before if c != commit), commit]
        policy = Policy.from_record(self.meta.get("policy"))
        keep = kept(policy, retained, lambda c: self.commits[c])
        self.branches[branch] = {"head": commit, "retained": keep}

    def _meet_rewind(self, record: Record) -> None:
        name, target = record["branch"], record["to"]
        before = self.branches.get(name, {"retained": []})["retained"]
        stays = before[: before.index(target) + 1] if target in before else [target]
        for commit in before:
            if commit not in stays:
                self.abandoned[commit] = {"branch": name, "time": record["time"]}
        self.branches[name] = {"head": target, "retained": stays}

    def _meet_pack(self, record: Record) -> None:
        base = None if record["base"] is None else bytes(record["base"]).hex()
        row = [base, record["bytes"], record["packed_bytes"], record["file_digest"]]
        self.packs[bytes(record["digest"]).hex()] = PackRow.from_row(row).to_row()

    def _meet_checkpoint(self, told: Any) -> None:
        """A whole state: nothing from before is needed."""
        tables = DictTables()
        state.apply(tables, new_record("checkpoint", state=told))
        self._begin(tables)

    def tables(self, names: Collection[str]) -> DictTables:
        """The state: what has no files and is neither a head nor a snapshot was let go."""
        pinned = {row["head"] for row in self.branches.values()}
        pinned |= {row["commit"] for row in self.snapshots.values()}
        stays = {
            commit
            for commit, record in self.commits.items()
            if commit in pinned or is_whole(record, names)
        }
        branches = {
            name: {"head": row["head"], "retained": [c for c in row["retained"] if c in stays]}
            for name, row in self.branches.items()
        }
        abandoned = {c: row for c, row in self.abandoned.items() if c in stays}
        pins = Counter(c for row in branches.values() for c in row["retained"])
        pins.update(row["commit"] for row in self.snapshots.values())
        pins.update(abandoned.keys())  # the names: a mapping would be taken for counts
        needed = {
            bytes(digest).hex()
            for commit in pins
            for digest, *_ in self.commits[commit]["shards"].values()
        }
        told = {
            "meta": self.meta,
            "branches": branches,
            "snapshots": self.snapshots,
            "commits": {commit: self.commits[commit] for commit in pins},
            "pins": dict(pins),
            "abandoned": abandoned,
            "packs": self._packs_of(needed, names),
        }
        made = DictTables()
        state.apply(made, new_record("checkpoint", state=told))
        return made

    def _packs_of(self, needed: Iterable[str], names: Collection[str]) -> dict[str, Any]:
        """The rows of packed objects that are needed, and of their bases, where they have files."""
        found: dict[str, Any] = {}
        waiting = set(needed)
        while waiting:
            digest = waiting.pop()
            row = self.packs.get(digest)
            if row is not None and digest not in found and packed_name(digest) in names:
                found[digest] = row
                base = PackRow.from_row(row).base
                waiting |= {base} if base is not None else set()
        return found


def image_name(digest: str) -> str:
    """The file of an object that is stored whole."""
    return f"{digest}{OBJECT_SUFFIX}"


def packed_name(digest: str) -> str:
    """The file of an object that is stored packed."""
    return f"{digest}{PACK_SUFFIX}"


def has_file(digest: str, names: Collection[str]) -> bool:
    """Whether an object has a file of either kind."""
    return image_name(digest) in names or packed_name(digest) in names


def is_whole(record: Record, names: Collection[str]) -> bool:
    """Whether every object of a commit has a file."""
    return all(has_file(bytes(digest).hex(), names) for digest, *_ in record["shards"].values())
