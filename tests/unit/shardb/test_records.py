"""Do records come back as they went in, and are foreign ones refused?"""

from __future__ import annotations

import time
from typing import Any

import msgpack
import numpy as np
import pytest

from shardb import records
from shardb.errors import LogDamagedError, UsageError
from shardb.records import Commit, ShardEntry


def a_commit(**changes: Any) -> Commit:
    fields: dict[str, Any] = {
        "id": "ab" * 16,
        "branch": "main",
        "step": 7,
        "parent": None,
        "shards": {"params/a": ShardEntry(digest="cd" * 16, bytes=4096, step=7, trainable=False)},
        "time": 1.5,
        "state": {"seed": 3, "nested": {"list": [1, None, True, "x", b"y"]}},
        "metrics": {"loss": 0.25},
        "statistics": {"params/a": {"norm": 1.0}},
        "recipe": "ef" * 16,
    }
    return Commit(**{**fields, **changes})


def test_does_a_commit_come_back_from_the_log_as_it_was() -> None:
    commit = a_commit()
    record = records.unpack(records.pack(commit.to_record()))
    assert record["kind"] == "commit"
    assert Commit.from_record(record).to_record() == commit.to_record()
    assert Commit.from_record(record).shards == dict(commit.shards)


def test_is_every_field_of_a_commit_stored() -> None:
    record = records.unpack(records.pack(a_commit().to_record()))
    fields = {*Commit.__dataclass_fields__, "kind"}
    assert set(record) == fields


@pytest.mark.parametrize("field", sorted({*Commit.__dataclass_fields__}))
def test_is_a_commit_record_without_a_field_refused(field: str) -> None:
    record = a_commit().to_record()
    del record[field]
    with pytest.raises(LogDamagedError, match=field):
        Commit.from_record(record)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("shards", None),
        ("shards", [1]),
        ("shards", {"a": 1}),
        ("shards", {"a": [b"x", 1, 1]}),
        ("shards", {"a": ["text", 1, 1, True]}),
        ("shards", {"a": [b"too short", 1, 1, True]}),
        ("shards", {"a": [bytes(16), "many", 1, True]}),
        ("shards", {"a": [bytes(16), -1, 1, True]}),
        ("id", 5),
        ("branch", None),
        ("step", "7"),
        ("step", True),
        ("parent", 9),
        ("time", "now"),
        ("state", None),
        ("metrics", []),
        ("statistics", "x"),
        ("recipe", 1),
    ],
)
def test_is_a_commit_record_with_a_garbled_field_refused(field: str, value: Any) -> None:
    with pytest.raises(LogDamagedError):
        Commit.from_record({**a_commit().to_record(), field: value})


def test_are_ids_unique_and_ordered_by_time() -> None:
    first = [records.new_id() for _ in range(1000)]
    time.sleep(0.002)
    later = records.new_id()
    assert len({*first, later}) == 1001
    assert all(len(name) == 32 and set(name) <= set("0123456789abcdef") for name in first)
    assert max(first)[:12] < later[:12]


def test_has_a_new_record_kind_id_and_time() -> None:
    before = time.time()
    record = records.new_record("note", text="x")
    assert record["kind"] == "note"
    assert len(record["id"]) == 32
    assert before <= record["time"] <= time.time()
    assert record["text"] == "x"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgpack.packb(5),
        msgpack.packb([1]),
        msgpack.packb({}),
        msgpack.packb({"kind": None}),
        msgpack.packb({"kind": ["commit"]}),
        msgpack.packb({"kind": "commit", 5: 1}),
        msgpack.packb({"kind": "commit"})[:-1],
        msgpack.packb({"kind": "commit"}) + b"\x00",
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
    ],
)
def test_is_a_payload_that_is_no_record_refused(payload: bytes) -> None:
    with pytest.raises(LogDamagedError, match="record"):
        records.unpack(payload)


def test_is_a_record_of_a_later_version_named_as_such() -> None:
    with pytest.raises(LogDamagedError, match="newer version"):
        records.unpack(msgpack.packb({"kind": "teleport"}))


@pytest.mark.parametrize(
    "value",
    [
        {1: "whole number as key"},
        {(1, 2): "pair as key"},
        {None: "nothing as key"},
        {"nested": [{"deeper": {7: 1}}]},
        {"array": np.zeros(2)},
        {"scalar": np.float32(1)},
        {"set": {1, 2}},
        {"large": 1 << 64},
        {"complex": 1j},
        {"surrogate": "\ud800"},
    ],
)
def test_is_state_refused_that_could_not_be_read_back(value: dict[Any, Any]) -> None:
    with pytest.raises(UsageError, match="metrics holds a value that cannot be stored"):
        records.stored_form("metrics", value)


def test_is_state_given_back_as_it_will_be_read() -> None:
    nested: dict[str, Any] = {}
    for _ in range(400):
        nested = {"deeper": nested}
    assert records.stored_form("state", None) == {}
    assert records.stored_form("state", {"pair": (1, 2.5)}) == {"pair": [1, 2.5]}
    assert records.stored_form("state", nested) == nested


def test_is_state_refused_that_nests_too_deep() -> None:
    nested: dict[str, Any] = {}
    for _ in range(2000):
        nested = {"deeper": nested}
    with pytest.raises(UsageError, match="cannot be stored"):
        records.stored_form("state", nested)
