"""How an active store stands to the durable one: whose head comes from whose.

Owns the comparison of their histories and the refusal of an active store that cannot be trusted.
Copies and writes nothing. Invariant: what cannot be told apart for certain is refused in words, and
nobody's steps are given up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

import shardb
from shardb import Commit, Store
from shardb.errors import ConflictError, CorruptionError
from shardb.transfer_lineage import PastStep, lineage


class Relation(Enum):
    """Where the head of an active store's branch is, seen from the durable store."""

    ABSENT = "absent"
    SAME = "same"
    AHEAD = "ahead"
    BEHIND = "behind"


@contextmanager
def open_active(path: Path, durable_step: int) -> Iterator[Store]:
    """Open an active store for reading; CorruptionError says how to go on without it."""
    try:
        store = shardb.open(path)
    except CorruptionError as error:
        raise CorruptionError(
            f"{path}: the active store cannot be read ({error.message}); the newest durable step is"
            f" {durable_step}. Remove the folder to go on from there. Newer steps can be kept as a"
            f" store of their own: `shardb repair {path}`, then `shardb clone {path} NEW`",
            path=str(path),
        ) from error
    with store:
        yield store


def relation_of(active: Store, durable: Store, branch: str) -> Relation:
    """Compare one branch of both stores; ConflictError when they are not of one history."""
    heads = active.branches()
    relation = Relation.ABSENT
    for name, head in heads.items():
        found = _relation_of_head(active, durable, name, head)
        if name == branch:
            relation = found
    return relation


def _relation_of_head(active: Store, durable: Store, branch: str, head: Commit) -> Relation:
    durable_head = durable.branches().get(branch)
    if durable_head is None:
        raise _foreign(active, durable, branch, head, "where there is no such branch")
    if head.id == durable_head.id:
        return Relation.SAME
    found = lineage(active, head.id, [durable_head.id])
    if found.reached:
        _refuse_rewound(active, durable, branch, durable_head, [*found.steps, head])
        return Relation.AHEAD
    if lineage(durable, durable_head.id, [head.id]).reached:
        return Relation.BEHIND
    raise _foreign(active, durable, branch, head, f"which is at step {durable_head.step}")


def _refuse_rewound(
    active: Store, durable: Store, branch: str, head: Commit, later: list[PastStep | Commit]
) -> None:
    """Refuse an active store that holds what the durable one was rewound from."""
    ids = {step.id if isinstance(step, Commit) else step.commit for step in later}
    for record in durable.history():
        is_rewind = record["kind"] == "rewind" and record["branch"] == branch
        if is_rewind and record["to"] == head.id and record["origin"] in ids:
            raise ConflictError(
                f"{durable.root}: branch {branch!r} was rewound to step {head.step}, but the active"
                f" store {active.root} is still at step {later[-1].step}: remove that folder to go"
                f" on from step {head.step}, or undo the rewind with `shardb rewind`"
            )


def _foreign(active: Store, durable: Store, branch: str, head: Commit, where: str) -> ConflictError:
    return ConflictError(
        f"{active.root}: branch {branch!r} of this active store is at step {head.step}, which has"
        f" no history in common with {durable.root}, {where}: it belongs to another run, or one of"
        " the two went another way, or a repair gave up the records between. Give another --active,"
        f" keep its steps as a store of their own (`shardb clone {active.root} NEW`), or remove the"
        " folder if nothing in it is wanted"
    )
