"""A file of a pushed store is damaged: is what is pulled right, or refused with nothing changed?

Two values exchanged, or an older one put back, cannot be told from what they claim to be: objects
and commits carry their names, refs and the policy do not.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardb
from shardb.errors import CorruptionError, NotFoundError
from shardb.remote.pull import pull_commit, pull_snapshot
from shardb.remote.push import push_commit, push_snapshot
from shardb.remote.urls import open_remote
from shardb.retention import Policy
from tests.support.damage_store import Specimen
from tests.support.small_stores import flip_bit

OFFSETS = int(os.environ.get("DAMAGE_OFFSETS", "3"))
KINDS = ("FORMAT", "objects", "commits", "refs/branches", "refs/snapshots", "policy")
Pulled = dict[str, dict[str, bytes]]


@pytest.fixture(scope="module")
def pushed(specimen: Specimen, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A remote store in a directory: a branch, a snapshot and a policy."""
    root = tmp_path_factory.mktemp("pushed") / "remote"
    remote = open_remote(f"file://{root}", create=True)
    copy = shutil.copytree(specimen.root, root.parent / "whole")
    with shardb.open(copy) as store:
        push_commit(store, remote, "main")
        push_snapshot(store, remote, "step-7")
    remote.set_policy(Policy(keep_last=5))
    return root


def pull(remote_path: Path, target: Path) -> None:
    """Pull everything into a new store."""
    remote = open_remote(f"file://{remote_path}")
    with shardb.open(target, create=True) as store:
        pull_commit(remote, store, "main")
        pull_snapshot(remote, store, "step-7")
    assert remote.policy() == Policy(keep_last=5)


def held(target: Path) -> Pulled:
    """What came of it: every byte of what has a name."""
    found: Pulled = {}
    with shardb.open(target, create=True) as store:
        for name in (*store.branches(), *store.snapshots()):
            with store.at(ref=name) as view:
                found[name] = {n: view.read(n).image.tobytes() for n in view.names()}
    return found


def damaged(pushed: Path, scratch: Path, kind: str) -> Iterator[Path]:
    """Copies of the remote store, each with one damage."""
    source = random.Random(kind)
    names = [p for p in (pushed / kind).rglob("*") if p.is_file()] or [pushed / kind]
    for number in range(OFFSETS):
        name = source.choice(sorted(names)).relative_to(pushed)
        for damage in ("flip", "zero", "cut", "append"):
            copy = Path(shutil.copytree(pushed, scratch / f"{number}-{damage}"))
            data = (copy / name).read_bytes()
            offset = source.randrange(len(data))
            if damage == "flip":
                flip_bit(copy / name, offset, source.randrange(8))
            elif damage == "append":
                (copy / name).write_bytes(data + source.randbytes(1 + offset))
            else:
                tail = bytes(len(data) - offset) if damage == "zero" else b""
                (copy / name).write_bytes(data[:offset] + tail)
            yield copy


@pytest.mark.parametrize("kind", KINDS)
def test_is_damage_of_a_pushed_store_found(pushed: Path, scratch: Path, kind: str) -> None:
    pull(pushed, scratch / "target")
    whole = held(scratch / "target")
    assert set(whole) == {"main", "step-7"}
    refused = tried = 0
    for copy in damaged(pushed, scratch, kind):
        tried += 1
        target = copy.parent / f"{copy.name}-target"
        try:
            pull(copy, target)
            assert held(target) == whole
        except (CorruptionError, NotFoundError):
            refused += 1
            assert held(target).items() <= whole.items()
    assert tried == 4 * OFFSETS
    assert refused > tried // 3
