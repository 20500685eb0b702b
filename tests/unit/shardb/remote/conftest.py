"""A store to push from, one to pull into, and a bucket of every kind that needs no server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import shardb
from shardb.filesystem import RealFileSystem
from shardb.remote.bucket import Bucket
from shardb.remote.cloud import CloudBucket
from shardb.remote.directory import DirectoryBucket
from shardb.remote.repository import RemoteStore
from tests.support.transfer_stores import commit


@pytest.fixture
def source(quick_path: Path) -> Iterator[shardb.Store]:
    with shardb.open(quick_path / "source", create=True) as store:
        for step in range(3):
            commit(store, step)
        yield store


@pytest.fixture(params=["directory", "memory"])
def bucket(request: pytest.FixtureRequest, quick_path: Path) -> Bucket:
    if request.param == "directory":
        return DirectoryBucket(RealFileSystem(), str(quick_path / "bucket"))
    library = pytest.importorskip("obstore.store", reason="the extra `remote` is not installed")
    return CloudBucket("memory://", library.MemoryStore())


@pytest.fixture
def remote(bucket: Bucket) -> RemoteStore:
    return RemoteStore(bucket, create=True)
