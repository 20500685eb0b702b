"""Is an active store that cannot be trusted refused with a way to keep its steps?"""

from __future__ import annotations

from pathlib import Path

import pytest

import shardb
from shardb.errors import ConflictError, CorruptionError
from shardb.repair import repair
from shardb.transfer import clone
from tests.support.small_stores import commit_step, copy_store, fill_store, flip_bit
from trainer.active_relation import Relation, open_active, relation_of

DURABLE, AHEAD = 4, 7


def relation(active: Path, durable: Path) -> Relation:
    with shardb.open(active) as one, shardb.open(durable) as other:
        return relation_of(one, other, "main")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "durable"


@pytest.fixture
def ahead(root: Path, tmp_path: Path) -> Path:
    """An active store that is some steps before the durable one at `root`."""
    fill_store(root, range(DURABLE + 1))
    active = copy_store(root, tmp_path / "active")
    with shardb.open(active) as store:
        for step in range(DURABLE + 1, AHEAD + 1):
            commit_step(store, step)
    return active


def test_is_an_active_store_ahead(ahead: Path, root: Path) -> None:
    assert relation(ahead, root) is Relation.AHEAD
    assert relation(root, ahead) is Relation.BEHIND
    assert relation(root, root) is Relation.SAME


def test_can_the_steps_of_a_damaged_active_store_be_kept(
    ahead: Path, root: Path, tmp_path: Path
) -> None:
    """What the refusals say is what works: repair, then a clone; never a guess at the lineage."""
    log = next((ahead / "wal").iterdir())
    with shardb.open(root) as store:
        at = store.log.size_bytes(1) + 40  # in the record of the first step that is only here
    flip_bit(log, at)
    (ahead / "index" / "data.mdb").unlink()  # else the index alone would do
    told = r"`shardb repair .*`, then `shardb clone .* NEW`"
    with pytest.raises(CorruptionError, match=told), open_active(ahead, DURABLE):
        pytest.fail("a damaged log is refused")
    repair(str(ahead), yes=True)
    with pytest.raises(ConflictError, match=r"shardb clone .* NEW"):
        relation(ahead, root)
    with shardb.open(ahead) as store, shardb.open(tmp_path / "new", create=True) as new:
        kept = store.resolve("main")
        clone(store, new)
    with shardb.open(tmp_path / "new") as store:
        assert store.resolve("main").shards == kept.shards
        assert kept.step == AHEAD
