"""What is stored under which key of a remote store, and in which form.

    FORMAT                        JSON: magic, version, store_id, checksum
    objects/<digest>.safetensors  the bytes of objects, as in a store on a path
    commits/<id>                  a line with the digest of the rest, then the record in msgpack
    refs/branches/<name>          JSON: commit, step, time, nonce, checksum; compare-and-swap only
    refs/snapshots/<name>         the same; written once
    policy                        JSON: the retention policy and a checksum, for a clone

Owns the keys and the encodings. Everything read is foreign: each decoder checks what it returns.
A slash in a name is written as "@", which names cannot have.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from typing import Any

import xxhash

from shardb import records
from shardb.errors import CorruptionError, FormatError, ShardbError
from shardb.layout import check_name
from shardb.objects import OBJECT_SUFFIX, branch_token
from shardb.records import Commit, Record
from shardb.transfer_lineage import PastStep

MAGIC = "shardb-remote"
VERSION = 1
FORMAT_KEY = "FORMAT"
POLICY_KEY = "policy"
OBJECTS = "objects/"
COMMITS = "commits/"
BRANCHES = "refs/branches/"
SNAPSHOTS = "refs/snapshots/"
SMALL_LIMIT_BYTES = 64 << 10
COMMIT_LIMIT_BYTES = 256 << 20
COMMIT_MAGIC = b"shardb commit 1 "
ID_PATTERN = re.compile(r"^[0-9a-f]{32}$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ref:
    """What a branch or a snapshot points to."""

    commit: str
    step: int


def object_key(digest: str) -> str:
    """The key of an object."""
    return f"{OBJECTS}{digest}{OBJECT_SUFFIX}"


def commit_key(commit: str) -> str:
    """The key of a commit's record."""
    return f"{COMMITS}{commit}"


def ref_key(kind: str, name: str) -> str:
    """The key of a branch or snapshot; `kind` is BRANCHES or SNAPSHOTS."""
    return f"{kind}{branch_token(name)}"


def ref_name(kind: str, key: str) -> str:
    """The name of the branch or snapshot under a key."""
    return key.removeprefix(kind).replace("@", "/")


def encode_format(store_id: str) -> bytes:
    """The value of FORMAT."""
    fields = {"magic": MAGIC, "version": VERSION, "store_id": store_id}
    return json.dumps({**fields, "checksum": _checksum(fields)}).encode() + b"\n"


def decode_format(data: bytes, where: str) -> str:
    """The store id; FormatError when this is no remote store or one of a newer version."""
    fields = _json(data, where)
    checksum = fields.pop("checksum", None)
    version = fields.get("version")
    if fields.get("magic") != MAGIC:
        raise FormatError(f"{where}: this is not the FORMAT of a pushed store", path=where)
    if isinstance(version, int) and version > VERSION:
        raise FormatError(
            f"{where}: format version {version} is newer than this program reads ({VERSION}); "
            "upgrade shardb",
            path=where,
        )
    store_id = fields.get("store_id")
    if checksum != _checksum(fields) or not isinstance(store_id, str):
        raise FormatError(f"{where}: damaged: its checksum does not match", path=where)
    return store_id


def encode_ref(commit: Commit) -> bytes:
    """A ref's value. The nonce tells this write from another one of the same commit."""
    fields = {
        "commit": commit.id,
        "step": commit.step,
        "time": time.time(),
        "nonce": os.urandom(8).hex(),
    }
    return _sealed(fields)


def decode_ref(data: bytes, where: str) -> Ref:
    """Read a ref; CorruptionError when it is damaged or names no commit."""
    fields = _unsealed(data, where)
    commit, step = fields.get("commit"), fields.get("step")
    if not isinstance(commit, str) or not ID_PATTERN.match(commit) or not isinstance(step, int):
        raise CorruptionError(f"{where}: names no commit", path=where)
    return Ref(commit=commit, step=step)


def encode_commit(record: Record) -> bytes:
    """A commit record's value."""
    packed = records.pack(record)
    return COMMIT_MAGIC + xxhash.xxh3_128_hexdigest(packed).encode() + b"\n" + packed


def decode_commit(data: bytes, commit: str, where: str) -> Record:
    """The record of a commit, with every field that is used later checked."""
    head, _, packed = data.partition(b"\n")
    digest = head.removeprefix(COMMIT_MAGIC)
    if not head.startswith(COMMIT_MAGIC) or digest != xxhash.xxh3_128_hexdigest(packed).encode():
        raise CorruptionError(f"{where}: damaged, or no commit record", path=where)
    try:
        record = records.unpack(packed)
        found = Commit.from_record(record)
        check_name(found.branch, "branch")
        for name in found.shards:
            check_name(name, "shard")
        for entry in record.get("rolled_up") or []:
            PastStep.from_record(entry)
    except (ShardbError, TypeError) as error:
        raise CorruptionError(f"{where}: {error}", path=where) from error
    is_wanted = record["kind"] == "commit" and found.id == commit and found.step >= 0
    if not is_wanted or not (found.parent is None or ID_PATTERN.match(found.parent)):
        raise CorruptionError(f"{where}: is not the record of commit {commit}", path=where)
    return record


def encode_policy(policy: dict[str, Any]) -> bytes:
    """A retention policy's value."""
    return _sealed(policy)


def decode_policy(data: bytes, where: str) -> dict[str, Any]:
    """Read a retention policy's fields; the caller checks them."""
    return _unsealed(data, where)


def _sealed(fields: dict[str, Any]) -> bytes:
    return json.dumps({**fields, "checksum": _checksum(fields)}).encode() + b"\n"


def _unsealed(data: bytes, where: str) -> dict[str, Any]:
    """The fields of a small value; one that was written without a checksum is let through."""
    fields = _json(data, where)
    checksum = fields.pop("checksum", None)
    if checksum not in (None, _checksum(fields)):
        raise CorruptionError(
            f"{where}: damaged: its checksum does not match; delete it and push again, or put it "
            "back from a copy",
            path=where,
        )
    return fields


def _json(data: bytes, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{where}: damaged ({error})", path=where) from error
    if not isinstance(fields, dict):
        raise FormatError(f"{where}: damaged: no JSON object", path=where)
    return fields


def _checksum(fields: dict[str, object]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())
