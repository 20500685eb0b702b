"""What the log says: branches, snapshots, live commits and the objects they reference.

Owns the meaning of every record: `apply` is the one place that changes the tables, whether they
live in LMDB (the index) or in a dictionary (fsck, rebuilding, tests). It is deterministic: the same
records give the same tables. Knows nothing of files or locks.

A commit is live while something pins it: its branch (the newest ones, by the retention policy), a
snapshot, or a rewind that can still be undone. A commit without pins is condemned; `sweep` drops
the condemned ones that no reader has leased and returns the objects that nothing references now.

tables: meta, branches, snapshots, commits (id to record), pins (id to count), condemned,
abandoned (commits a rewind left behind), and objects and packs (see `shardb.references`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

from shardb import references
from shardb.errors import LogDamagedError, UsageError
from shardb.records import Commit, Record
from shardb.references import PackRow, Retired
from shardb.retention import Policy, kept

TABLES = (
    "meta",
    "branches",
    "snapshots",
    "commits",
    "pins",
    "condemned",
    "abandoned",
    "objects",
    "packs",
)
DEFAULT_BRANCH = "main"


class Tables(Protocol):
    """Named tables of text keys and msgpack-able values."""

    def get(self, table: str, key: str) -> Any: ...
    def put(self, table: str, key: str, value: Any) -> None: ...
    def delete(self, table: str, key: str) -> None: ...
    def items(self, table: str) -> Iterator[tuple[str, Any]]: ...
    def clear(self) -> None: ...


class DictTables:
    """Tables in memory."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, Any]] = {name: {} for name in TABLES}

    @staticmethod
    def copy_of(tables: Tables) -> DictTables:
        """The same rows in memory, to see what a change would give."""
        copied = DictTables()
        for name in TABLES:
            copied.tables[name].update(tables.items(name))
        return copied

    def get(self, table: str, key: str) -> Any:
        return self.tables[table].get(key)

    def put(self, table: str, key: str, value: Any) -> None:
        self.tables[table][key] = value

    def delete(self, table: str, key: str) -> None:
        self.tables[table].pop(key, None)

    def items(self, table: str) -> Iterator[tuple[str, Any]]:
        return iter(sorted(self.tables[table].items()))

    def clear(self) -> None:
        for rows in self.tables.values():
            rows.clear()


def apply(tables: Tables, record: Record) -> list[Retired]:
    """Change the tables as `record` says; LogDamagedError when it contradicts them.

    Returns what the record itself retires: bases that nothing is a delta against any more.
    """
    try:
        return _APPLY[record["kind"]](tables, record) or []
    except (KeyError, TypeError, ValueError, AttributeError, UsageError) as error:
        raise LogDamagedError(
            f"log record {record.get('id')} ({record.get('kind')}) lacks or garbles a field: "
            f"{error!r}"
        ) from error


def _apply_nothing(tables: Tables, record: Record) -> None:
    pass


def _apply_init(tables: Tables, record: Record) -> None:
    tables.put("meta", "store_id", record["store_id"])


def _apply_policy(tables: Tables, record: Record) -> None:
    tables.put("meta", "policy", record["policy"])
    for name, row in list(tables.items("branches")):
        _retain(tables, name, row)


def _apply_commit(tables: Tables, record: Record) -> list[Retired]:
    name, commit = record["branch"], Commit.from_record(record).id
    row = tables.get("branches", name) or {"head": None, "retained": []}
    if row["head"] != record["parent"]:
        raise LogDamagedError(
            f"commit {commit} names parent {record['parent']}, but branch {name!r} is at "
            f"{row['head']}"
        )
    retired = _know(tables, record)
    _pin(tables, commit, 1)
    _retain(tables, name, {"head": commit, "retained": [*row["retained"], commit]})
    return retired


def _know(tables: Tables, record: Record) -> list[Retired]:
    """Take in a commit. One that comes again, from another store, is referenced only once.

    Packed objects that no pinned commit needed any more are stored whole again with it.
    What it tells of the steps before it (`rolled_up`) stays in the log: tables are read often.
    """
    commit = record["id"]
    known = tables.get("commits", commit)
    lost = references.lost(tables, {bytes(d).hex() for d, *_ in record["shards"].values()})
    if known is None:
        _reference_all(tables, record)
    elif known["shards"] != record["shards"]:
        raise LogDamagedError(f"commit {commit} is recorded twice, with different shards")
    kept_fields = {key: value for key, value in record.items() if key != "rolled_up"}
    tables.put("commits", commit, kept_fields)
    return references.forget(tables, lost)


def _apply_branch(tables: Tables, record: Record) -> None:
    name, commit = record["name"], record["commit"]
    _pin(tables, commit, 1)
    tables.put("branches", name, {"head": commit, "retained": [commit]})


def _apply_snapshot(tables: Tables, record: Record) -> list[Retired]:
    """Name a commit for good. `received` is the commit itself, where another store sent it."""
    received = record.get("received")
    retired: list[Retired] = []
    if received is not None:
        Commit.from_record(received)
        retired = _know(tables, received)
    _pin(tables, record["commit"], 1)
    row = {"commit": record["commit"], "time": record["time"]}
    tables.put("snapshots", record["name"], row)
    return retired


def _apply_pack(tables: Tables, record: Record) -> None:
    """An object is packed now. It references its base, which so stays as long as it does."""
    base = None if record["base"] is None else bytes(record["base"]).hex()
    row = [base, record["bytes"], record["packed_bytes"], record["file_digest"]]
    references.add_pack(tables, bytes(record["digest"]).hex(), PackRow.from_row(row))


def _apply_unpack(tables: Tables, record: Record) -> list[Retired]:
    return references.remove_pack(tables, bytes(record["digest"]).hex())


def _apply_delete(tables: Tables, record: Record) -> None:
    if record["what"] == "snapshot":
        row = tables.get("snapshots", record["name"])
        tables.delete("snapshots", record["name"])
        _pin(tables, row["commit"], -1)
        return
    row = tables.get("branches", record["name"])
    tables.delete("branches", record["name"])
    for commit in row["retained"]:
        _pin(tables, commit, -1)


def _apply_rewind(tables: Tables, record: Record) -> None:
    """Move a branch. What it leaves behind stays until gc, so that it can be undone."""
    name, target = record["branch"], record["to"]
    retained = tables.get("branches", name)["retained"]
    if target in retained:
        cut = retained.index(target) + 1
        stays, left = retained[:cut], retained[cut:]
    else:
        _pin(tables, target, 1)
        stays, left = [target], retained
    for commit in left:
        if tables.get("abandoned", commit) is not None:
            _pin(tables, commit, -1)  # abandoned twice: one pin is enough
        tables.put("abandoned", commit, {"branch": name, "time": record["time"]})
    tables.put("branches", name, {"head": target, "retained": stays})


def _apply_gc(tables: Tables, record: Record) -> None:
    for commit in record["abandoned"]:
        if tables.get("abandoned", commit) is not None:
            tables.delete("abandoned", commit)
            _pin(tables, commit, -1)


def _apply_repair(tables: Tables, record: Record) -> None:
    """Give up what is lost: commits whose objects are, and parts of the log.

    The head of a branch is never among them: a branch is rewound, or deleted, before.
    """
    for commit in record["dropped"]:
        for name, row in list(tables.items("branches")):
            if row["head"] == commit:
                raise ValueError(f"commit {commit} is the head of branch {name!r}")
            if commit in row["retained"]:
                rest = [kept for kept in row["retained"] if kept != commit]
                tables.put("branches", name, {"head": row["head"], "retained": rest})
                _pin(tables, commit, -1)
        if tables.get("abandoned", commit) is not None:
            tables.delete("abandoned", commit)
            _pin(tables, commit, -1)
    known = tables.get("meta", "acknowledged") or []
    added = [list(fault) for fault in record["acknowledged"]]
    if added:
        tables.put("meta", "acknowledged", known + [f for f in added if f not in known])
    if record["closed"] is not None:
        tables.put("meta", "closed", record["closed"])


def _apply_checkpoint(tables: Tables, record: Record) -> None:
    """Start over from a full state.

    Commits that the tables hold and the state does not may still be leased by a reader: they are
    condemned, not forgotten, so that nobody takes their objects for leftovers.
    """
    state = record["state"]
    _check_full_state(state)
    before = {k: r for k, r in tables.items("commits") if k not in state["commits"]}
    packs_before = dict(tables.items("packs"))
    tables.clear()
    for table in ("meta", "branches", "snapshots", "commits", "pins", "abandoned"):
        for key, value in state[table].items():
            tables.put(table, key, value)
    for commit in state["commits"].values():
        _reference_all(tables, commit)
    packs = state.get("packs", {})
    references.restore_packs(tables, packs, packs)
    for key, commit in before.items():
        tables.put("commits", key, commit)
        tables.put("condemned", key, 1)
        _reference_all(tables, commit)
        digests = [bytes(digest).hex() for digest, *_ in commit["shards"].values()]
        references.restore_packs(tables, packs_before, digests)


def _check_full_state(state: dict[str, dict[str, Any]]) -> None:
    """The rows of a full state are what their readers rely on, and name commits that are there."""
    commits = state["commits"]
    for key, commit in commits.items():
        if Commit.from_record(commit).id != key:
            raise ValueError(f"commit {key} is another one")
    named = [*state["pins"], *state["abandoned"]]
    named += [row["commit"] for row in state["snapshots"].values()]
    for name, row in state["branches"].items():
        named += row["retained"]
        if row["head"] not in row["retained"]:
            raise ValueError(f"branch {name!r} does not retain its head")
    if missing := set(named) - set(commits):
        raise ValueError(f"commit {min(missing)} is not there")
    if not all(type(count) is int and count > 0 for count in state["pins"].values()):
        raise ValueError("a commit has no number of pins")
    Policy.from_record(state["meta"].get("policy"))
    for sequence, size, digest in state["meta"].get("closed") or []:
        if (type(sequence), type(size), type(digest)) != (int, int, bytes):
            raise TypeError("a closed segment has sequence, size and digest")


def _reference_all(tables: Tables, commit: Record) -> None:
    for digest, size, *_ in commit["shards"].values():
        references.reference(tables, bytes(digest).hex(), size, 1)


_APPLY: dict[str, Callable[[Tables, Record], list[Retired] | None]] = {
    "init": _apply_init,
    "begin": _apply_nothing,
    "abort": _apply_nothing,
    "note": _apply_nothing,
    "commit": _apply_commit,
    "branch": _apply_branch,
    "snapshot": _apply_snapshot,
    "delete": _apply_delete,
    "rewind": _apply_rewind,
    "gc": _apply_gc,
    "policy": _apply_policy,
    "pack": _apply_pack,
    "unpack": _apply_unpack,
    "repair": _apply_repair,
    "checkpoint": _apply_checkpoint,
}
# What a checkpoint holds of `meta`; the rest is how far an index has applied the log.
META_KEPT = ("store_id", "policy", "closed", "acknowledged")
# Records that change no table: the index need not apply them.
WITHOUT_EFFECT = frozenset(("begin", "abort", "note"))


def full_state(tables: Tables) -> dict[str, dict[str, Any]]:
    """The state that a checkpoint record holds: all of it but what is condemned or derived."""
    names = ("branches", "snapshots", "abandoned", "pins")
    state: dict[str, dict[str, Any]] = {name: dict(tables.items(name)) for name in names}
    state["meta"] = {key: value for key, value in tables.items("meta") if key in META_KEPT}
    state["commits"] = {
        key: record
        for key, record in tables.items("commits")
        if tables.get("condemned", key) is None
    }
    if packs := references.held_packs(tables):  # a store that never packed says nothing of it
        state["packs"] = packs
    return state


def sweep(tables: Tables, leased: Collection[str]) -> list[Retired]:
    """Drop condemned commits that no reader has leased; return what is retired with them."""
    retired: list[Retired] = []
    for commit, _ in list(tables.items("condemned")):
        if commit in leased:
            continue
        record = tables.get("commits", commit)
        for digest, size, *_ in record["shards"].values():
            retired.extend(references.reference(tables, bytes(digest).hex(), size, -1))
        tables.delete("commits", commit)
        tables.delete("condemned", commit)
    return retired


def _retain(tables: Tables, name: str, row: dict[str, Any]) -> None:
    """Unpin what the policy no longer keeps; the head is never among it."""
    policy = Policy.from_record(tables.get("meta", "policy"))
    retained = row["retained"]
    keep = kept(policy, retained, lambda commit: tables.get("commits", commit))
    if row["head"] not in keep:
        raise LogDamagedError(f"the head of branch {name!r} is not among what it retains")
    for commit in set(retained) - set(keep):
        _pin(tables, commit, -1)
    tables.put("branches", name, {"head": row["head"], "retained": keep})


def _pin(tables: Tables, commit: str, change: int) -> None:
    if tables.get("commits", commit) is None:
        raise LogDamagedError(f"a log record names commit {commit}, which is not there")
    count = (tables.get("pins", commit) or 0) + change
    if count > 0:
        tables.put("pins", commit, count)
        tables.delete("condemned", commit)
        return
    if count < 0:
        raise LogDamagedError(f"a log record takes a pin from commit {commit}, which has none")
    tables.delete("pins", commit)
    tables.put("condemned", commit, 1)
