"""Is every value of a remote store that is damaged or hostile refused before it is used?"""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest
import xxhash

from shardb.errors import CorruptionError, FormatError
from shardb.records import Commit, ShardEntry
from shardb.remote import layout

ID = "0" * 31 + "1"
COMMIT = Commit(
    id=ID,
    branch="main",
    step=3,
    parent=None,
    shards={"params/a": ShardEntry(digest="ab" * 16, bytes=10, step=3)},
    time=1.5,
    metrics={"loss": float("nan"), "path": b"\x00"},
)


def changed(**fields: Any) -> bytes:
    """A commit value with fields changed, and the right digest over them."""
    packed = msgpack.packb({**COMMIT.to_record(), **fields}, use_bin_type=True)
    return layout.COMMIT_MAGIC + xxhash.xxh3_128_hexdigest(packed).encode() + b"\n" + packed


def test_does_every_value_come_back() -> None:
    record = layout.decode_commit(layout.encode_commit(COMMIT.to_record()), ID, "x")
    assert Commit.from_record(record).shards == COMMIT.shards
    assert layout.decode_ref(layout.encode_ref(COMMIT), "x") == layout.Ref(commit=ID, step=3)
    assert layout.decode_format(layout.encode_format("abc"), "x") == "abc"
    assert layout.encode_ref(COMMIT) != layout.encode_ref(COMMIT)  # a nonce


def test_is_a_ref_without_a_checksum_still_read() -> None:
    value = json.loads(layout.encode_ref(COMMIT))
    del value["checksum"]
    assert layout.decode_ref(json.dumps(value).encode(), "x").commit == ID


@pytest.mark.parametrize("name", ["main", "a/b", "v1.0_x-y"])
def test_is_a_name_found_again_under_its_key(name: str) -> None:
    key = layout.ref_key(layout.BRANCHES, name)
    assert key.count("/") == 2
    assert layout.ref_name(layout.BRANCHES, key) == name


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"shardb commit 1 \n",
        layout.encode_commit(COMMIT.to_record())[:-1],
        layout.encode_commit(COMMIT.to_record()) + b"\x00",
        changed(id="f" * 32),
        changed(kind="init"),
        changed(step=-1),
        changed(parent="../../refs/branches/main"),
        changed(step="3"),
        changed(branch="../../etc"),
        changed(shards={"../x": [b"\xab" * 16, 10, 3, True]}),
        changed(shards={"a": [b"\xab" * 15, 10, 3, True]}),
        changed(shards={"a": ["ab" * 16, 10, 3, True]}),
        changed(shards={"a": [b"\xab" * 16, -1, 3, True]}),
        changed(shards=[1, 2]),
        changed(metrics=None),
        changed(rolled_up=[{"id": "x"}]),
        changed(rolled_up=3),
        changed(state={1: 2}),
        layout.COMMIT_MAGIC + xxhash.xxh3_128_hexdigest(b"\xc1").encode() + b"\n\xc1",
    ],
)
def test_is_a_wrong_commit_record_refused(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        layout.decode_commit(data, ID, "s3://bucket/commits/x")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"commit": "x", "step": 1}',
        b'{"commit": "' + b"a" * 32 + b'"}',
        b"\xff",
        layout.encode_ref(COMMIT).replace(b'"step": 3', b'"step": 7'),
    ],
)
def test_is_a_wrong_ref_refused(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        layout.decode_ref(data, "x")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"magic": "shardb"}, "not the FORMAT"),
        ({"version": 2}, "newer"),
        ({"store_id": "other"}, "checksum"),
        ({"checksum": None}, "checksum"),
    ],
)
def test_is_a_wrong_format_refused(fields: dict[str, Any], message: str) -> None:
    value = {**json.loads(layout.encode_format("abc")), **fields}
    with pytest.raises(FormatError, match=message):
        layout.decode_format(json.dumps(value).encode(), "x")
    with pytest.raises(FormatError, match="damaged"):
        layout.decode_format(b"[" * 100_000, "x")
