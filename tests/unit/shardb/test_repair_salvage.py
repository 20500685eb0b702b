"""Is a state that is put together behind damage the one that the log told, as far as it is known?

Where no record is lost, it must be exactly that. Each test then takes records away.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

import shardb
from shardb import frames, records, state
from shardb.branching import rewind as rewind_branch
from shardb.frames import Frame
from shardb.repair import repair
from shardb.repair_salvage import image_name, packed_name, salvaged
from shardb.retention import Policy
from shardb.state import DictTables
from tests.support.damage import (
    Known,
    check_repaired,
    frames_of,
    last_segment,
    spoil_record,
    without_index,
)
from tests.support.log_records import Log, applied, commit, digest, record
from tests.support.small_stores import commit_step, fill_store

IDS = [f"{number:032x}" for number in range(10)]
KEEP_ALL = Policy(keep_last=9).to_record()


def pack(shard: int, base: int | None) -> records.Record:
    held = None if base is None else digest(base)
    sizes = {"bytes": 4096, "packed_bytes": 400, "file_digest": digest(shard + 100)}
    return record("pack", digest=digest(shard), base=held, **sizes)


def rewind(branch: str, to: str) -> records.Record:
    return record("rewind", branch=branch, to=to)


def everything() -> Log:
    """A log with a record of each kind that changes something."""
    received = {**commit(IDS[8], 40, None, 15), "branch": "elsewhere"}
    return [
        record("init", store_id="s" * 32, version=1),
        record("policy", policy=KEEP_ALL),
        commit(IDS[1], 1, None, 1, 20, 21),
        record("begin", branch="main"),
        commit(IDS[2], 2, IDS[1], 2, 22),
        record("snapshot", name="two", commit=IDS[2]),
        pack(21, None),
        pack(20, 21),
        pack(22, None),
        record("unpack", digest=digest(22)),
        record("branch", name="side", commit=IDS[1]),
        commit(IDS[3], 2, IDS[1], 3, branch="side"),
        record("branch", name="gone", commit=IDS[2]),
        record("delete", what="branch", name="gone"),
        record("snapshot", name="lost", commit=IDS[1]),
        record("delete", what="snapshot", name="lost"),
        commit(IDS[4], 3, IDS[2], 4),
        commit(IDS[5], 4, IDS[4], 5),
        rewind("main", IDS[2]),
        record("gc", abandoned=[IDS[5]]),
        rewind("main", IDS[3]),
        record("snapshot", name="sent", commit=IDS[8], received=received),
        record("note", text="nothing"),
    ]


def framed(log: Iterable[records.Record]) -> list[Frame]:
    """Whole records, whatever they follow on."""
    found = []
    for number, one in enumerate(log, 1):
        data, _ = frames.encode(lsn=number, previous=bytes(16), payload=records.pack(one))
        frame = frames.decode(memoryview(data), 0)
        assert frame is not None
        found.append(frame)
    return found


def names_of(tables: DictTables) -> set[str]:
    """The files that the objects of a state have."""
    packs = tables.tables["packs"]
    objects = tables.tables["objects"]
    return {packed_name(d) if d in packs else image_name(d) for d in objects}


def salvage(
    log: Log, names: set[str] | None = None, *, before: DictTables | None = None
) -> DictTables:
    """By default every file of the commits that are told is there."""
    if names is None:
        names = names_of(applied(everything()))
    return salvaged(before or DictTables(), framed(log), names)


def told(log: Log) -> dict[str, dict[str, object]]:
    return state.full_state(applied(log))


def test_is_a_log_without_a_hole_told_as_it_is() -> None:
    for length in range(3, len(everything()) + 1):
        log = everything()[:length]
        found = salvage(log, names_of(applied(log)))
        assert state.full_state(found) == told(log), log[-1]["kind"]


def test_does_a_checkpoint_make_everything_before_it_known() -> None:
    whole = everything()
    checkpoint = record("checkpoint", state=told(whole))
    head = commit(IDS[9], 9, IDS[3], 9)
    names = names_of(applied([*whole, head]))
    assert state.full_state(salvage([checkpoint, head], names)) == told([*whole, head])


def test_is_a_commit_behind_a_hole_the_head_without_its_parent() -> None:
    log = everything()[:5]
    found = salvage([*log[:2], log[4]])
    assert found.get("branches", "main") == {"head": IDS[2], "retained": [IDS[2]]}
    assert found.get("commits", IDS[1]) is None


@pytest.mark.parametrize(
    "orphan",
    [
        record("branch", name="other", commit=IDS[7]),
        record("snapshot", name="other", commit=IDS[7]),
        rewind("main", IDS[7]),
        record("delete", what="snapshot", name="never"),
        record("gc", abandoned=[IDS[7]]),
        record("unpack", digest=digest(29)),
        {**commit(IDS[6], 5, IDS[1], 6), "shards": "garbled"},
        record("policy", policy={"keep_last": 0}),
        record("pack", digest=digest(1), base=None, bytes=-1, packed_bytes=0, file_digest=b""),
        record("checkpoint", state="none"),
        record("snapshot", name="no commit"),
    ],
    ids=lambda one: one["kind"],
)
def test_does_a_record_about_what_the_hole_held_change_nothing(orphan: records.Record) -> None:
    log = everything()
    assert state.full_state(salvage([*log, orphan])) == told(log)


def test_does_a_frame_that_is_no_record_change_nothing() -> None:
    data, _ = frames.encode(lsn=1, previous=bytes(16), payload=b"\xff nonsense")
    frame = frames.decode(memoryview(data), 0)
    assert frame is not None
    log = everything()
    names = names_of(applied(log))
    assert state.full_state(salvaged(DictTables(), [frame, *framed(log)], names)) == told(log)


def test_is_a_branch_that_the_hole_made_known_by_its_rewind() -> None:
    """It was made in the hole: where it is now is what counts."""
    log = everything()[:5]
    found = salvage([*log, rewind("made", IDS[1])])
    assert found.get("branches", "made") == {"head": IDS[1], "retained": [IDS[1]]}


def test_was_a_commit_without_files_let_go_in_the_hole() -> None:
    """Retention gave it up, so its files were reused; a head and a snapshot stay all the same."""
    log = [*everything()[:2], *(commit(IDS[n], n, IDS[n - 1], n) for n in range(1, 6))]
    log += [record("snapshot", name="three", commit=IDS[3])]
    names = {image_name(digest(n).hex()) for n in (2, 4)}
    found = salvage(log, names)
    assert found.get("branches", "main") == {"head": IDS[5], "retained": IDS[2:6]}
    assert found.get("snapshots", "three")["commit"] == IDS[3]
    assert found.get("commits", IDS[1]) is None


def test_is_an_abandoned_commit_without_files_forgotten() -> None:
    log = everything()[:20]
    names = names_of(applied(log))
    assert salvage(log, names).get("abandoned", IDS[4]) is not None
    gone = names - {image_name(digest(4).hex())}
    assert salvage(log, gone).get("abandoned", IDS[4]) is None


def test_is_a_packed_object_without_its_file_no_packed_one() -> None:
    log = [*everything()[:8], record("snapshot", name="one", commit=IDS[1])]
    found = salvage(log, names_of(applied(log)) - {packed_name(digest(20).hex())})
    assert found.get("packs", digest(20).hex()) is None
    assert found.get("packs", digest(21).hex()) is not None


def test_does_the_state_before_the_hole_count() -> None:
    log = everything()
    before = applied(log[:9])
    assert state.full_state(salvage(log[9:], before=before)) == told(log)


def test_is_a_store_that_was_rewound_repaired(tmp_path: Path) -> None:
    """Log and index are damaged: once a TypeError, where a rewind had left commits behind."""
    root = tmp_path / "run"
    fill_store(root, range(5), snapshots=(1,))
    with shardb.open(root) as store:
        rewind_branch(store, "main", "step-1")
        commit_step(store, 2)
    known = Known.of(root)
    steps = [records.unpack(frame.payload).get("step") for frame in frames_of(last_segment(root))]
    without_index(spoil_record(steps.index(3)))(root)
    outcome = repair(str(root), yes=True)
    assert "log_go_on" in [action.what for action in outcome.plan.actions]
    check_repaired(root, known)
    with shardb.open(root) as store:
        assert store.resolve("step-1").step == 1
        assert store.resolve("main").step == 3  # what check_repaired has added
