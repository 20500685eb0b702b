"""Log records by hand: histories that a store could have written, without a store."""

from __future__ import annotations

from typing import Any

from shardb import records, state
from shardb.state import DictTables, Tables

Log = list[records.Record]


def digest(shard: int) -> bytes:
    return bytes([shard]) * 16


def commit(name: str, step: int, parent: str | None, *shards: int, branch: str = "main") -> Any:
    return {
        "kind": "commit",
        "id": name,
        "time": float(step),
        "branch": branch,
        "step": step,
        "parent": parent,
        "shards": {f"s{number}": [digest(s), 4096, step, True] for number, s in enumerate(shards)},
        "state": {},
        "metrics": {"loss": 1.0 / step},
        "statistics": {},
        "recipe": None,
    }


def record(kind: str, **fields: Any) -> Any:
    return {"kind": kind, "id": f"{kind}-{sorted(fields.items())}", "time": 0.0, **fields}


def applied(log: Log, tables: Tables | None = None) -> DictTables:
    found = tables or DictTables()
    for one in log:
        state.apply(found, one)
    return found  # type: ignore[return-value]


def live(tables: DictTables) -> set[str]:
    return set(tables.tables["commits"]) - set(tables.tables["condemned"])
