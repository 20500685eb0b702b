"""Which state does a damaged log give, when its parts are whole and do not belong together?"""

from __future__ import annotations

import pytest

from shardb import frames, records
from shardb.log import START
from shardb.repair_state import (
    START_OF_LOG,
    End,
    Ends,
    choose,
    known_ends,
    last_chain,
    merged,
    records_behind,
    salvage,
)
from shardb.state import full_state
from tests.support.log_records import Log, applied, commit, digest, record

INIT = record("init", store_id="s" * 32, version=1)
A, B, C = (f"{number:032x}" for number in (1, 2, 3))
LOG = [INIT, commit(A, 1, None, 1), commit(B, 2, A, 2)]
NAMES = {f"{digest(n).hex()}.safetensors" for n in range(1, 9)}


def segment(payloads: list[bytes], *, lsn: int = 1, previous: bytes = bytes(16)) -> bytes:
    """Whole records that follow each other."""
    data = b""
    for number, payload in enumerate(payloads, lsn):
        frame, previous = frames.encode(lsn=number, previous=previous, payload=payload)
        data += frame
    return data


def packed(log: Log) -> list[bytes]:
    return [records.pack(one) for one in log]


def end_of(*segments: bytes | None) -> object:
    """The state that these segments give, as a checkpoint would tell it; None for none."""
    found = dict(enumerate(segments, 1))
    end = known_ends(sorted(found), found.get, None).of_log
    return None if end is None else full_state(end.tables)


def test_is_a_log_told_by_its_last_segment_that_begins_with_a_state() -> None:
    whole = full_state(applied(LOG))
    assert end_of(segment(packed(LOG))) == whole
    checkpoint = record("checkpoint", state=whole)
    assert end_of(None, segment(packed([checkpoint]), lsn=4)) == whole


@pytest.mark.parametrize(
    "begin",
    [
        records.pack(commit(C, 3, B, 3)),
        b"\xff no record",
        records.pack(record("checkpoint", state={"commits": "garbled"})),
    ],
    ids=["another kind", "no record", "a state that makes no sense"],
)
def test_is_a_segment_that_begins_with_no_state_passed_over(begin: bytes) -> None:
    first = segment(packed(LOG))
    assert end_of(first, segment([begin], lsn=4)) == full_state(applied(LOG))
    assert end_of(None, segment([begin], lsn=4)) is None


def test_is_a_segment_that_is_empty_or_spoilt_passed_over() -> None:
    first = segment(packed(LOG))
    assert end_of(first, b"") == end_of(first, b"spoilt") == full_state(applied(LOG))


def test_is_nothing_salvaged_where_nobody_knows_the_store() -> None:
    """Neither FORMAT nor the log's first record say which store this is."""
    log = {1: segment(packed(LOG[1:]), lsn=2)}
    assert salvage(None, None, [1], log.get, NAMES) is None
    end = salvage(None, "s" * 32, [1], log.get, NAMES)
    assert end is not None
    assert full_state(end.tables)["branches"] == {"main": {"head": B, "retained": [A, B]}}


def test_is_nothing_salvaged_from_records_that_change_nothing() -> None:
    idle = [record("begin", branch="main"), record("note", text="x")]
    log = {1: segment([*packed(idle), b"\xff no record"], lsn=2)}
    assert salvage(None, "s" * 32, [1], log.get, NAMES) is None


def test_is_a_store_without_a_branch_not_salvaged() -> None:
    log = {1: segment(packed([record("snapshot", name="x", commit=A)]), lsn=2)}
    assert salvage(None, "s" * 32, [1], log.get, NAMES) is None


def test_is_the_end_of_a_segment_known_only_if_all_of_it_is_whole() -> None:
    whole = segment(packed(LOG))
    chain = last_chain(whole)
    assert chain is not None
    assert chain[0] == 3
    assert last_chain(None) is None
    assert last_chain(whole[:-1]) is None
    assert last_chain(whole + segment(packed(LOG[:1]))) is None


def test_are_two_copies_merged_as_far_as_they_follow() -> None:
    whole = segment(packed(LOG))
    ends = [frame.end for frame in records_behind([1], {1: whole}.get, START)]
    assert len(ends) == 3
    spoilt = bytearray(whole)
    spoilt[ends[0] + frames.HEADER_BYTES] ^= 1
    other = segment(packed([INIT, commit(C, 1, None, 3)]))
    assert merged(bytes(spoilt), whole, START_OF_LOG) == whole
    assert merged(bytes(spoilt), None, START_OF_LOG) == whole[: ends[0]]
    assert merged(None, None, START_OF_LOG) == b""
    assert merged(bytes(spoilt), other, START_OF_LOG) == other


def one_of_two(log: Log, index: Log, names: set[str]) -> str:
    """Which of two states of one store is gone on with, where only one can be right."""
    ends = Ends(
        of_log=End(tables=applied(log), position=START, origin="log"),
        of_index=End(tables=applied(index), position=START, origin="index"),
        is_other=True,
    )
    chosen = choose(ends, "s" * 32, names)
    assert chosen is not None
    return chosen.origin


def test_is_the_state_chosen_that_keeps_more_or_else_has_more_files() -> None:
    first = [INIT, commit(A, 1, None, 1)]
    further = [*first, commit(B, 2, A, 2)]
    pinned = [*first, record("snapshot", name="one", commit=A)]
    assert one_of_two(further, first, NAMES) == "log"
    assert one_of_two(first, further, NAMES) == "index"
    # One has a newer step, the other a snapshot: neither keeps all that the other does.
    lost = NAMES - {f"{digest(1).hex()}.safetensors"}
    other = [INIT, commit(C, 3, None, 3), record("snapshot", name="one", commit=C)]
    branched = [INIT, commit(B, 4, None, 4), record("branch", name="b", commit=B)]
    assert one_of_two(other, branched, lost) == "log"
    assert one_of_two([*other, commit(A, 4, C, 1)], branched, lost) == "index"
    assert one_of_two(pinned, further, NAMES) == "log"
