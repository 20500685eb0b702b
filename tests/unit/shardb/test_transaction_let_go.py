"""Can a commit be larger than memory, and does letting go change nothing else?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shardb
from shardb.errors import UsageError

SHARD_BYTES = 1 << 20
SHARDS = 12


def shard(index: int) -> dict[str, np.ndarray]:
    return {"w": np.full(SHARD_BYTES // 4, index, dtype=np.float32)}


def pooled_bytes(store: shardb.Store) -> int:
    return store.buffers.free_bytes  # type: ignore[attr-defined]


@pytest.mark.parametrize("writer_threads", [0, 2])
def test_what_is_let_go_is_committed_like_anything_else(
    tmp_path: Path, writer_threads: int
) -> None:
    with shardb.open(tmp_path / "s", create=True, writer_threads=writer_threads) as store:
        with store.begin() as txn:
            for index in range(SHARDS):
                txn.write(f"params/{index}", shard(index))
                txn.let_go(f"params/{index}")
                txn.let_go(f"params/{index}")
            txn.commit(step=0)
        # One buffer served every shard: it is all that waits for its next use.
        assert SHARD_BYTES <= pooled_bytes(store) <= 3 * SHARD_BYTES
        with store.at() as view:
            for index in range(SHARDS):
                np.testing.assert_array_equal(
                    view.read(f"params/{index}").array("w"), shard(index)["w"]
                )


def test_without_letting_go_every_shard_stays_in_memory(tmp_path: Path) -> None:
    with shardb.open(tmp_path / "s", create=True, cache_bytes=1) as store, store.begin() as txn:
        for index in range(SHARDS):
            txn.write(f"params/{index}", shard(index))
        assert pooled_bytes(store) == 0
        assert txn.read("params/0").array("w")[0] == 0
        txn.abort()


def test_a_shard_that_was_let_go_is_read_after_the_commit_only(tmp_path: Path) -> None:
    with shardb.open(tmp_path / "s", create=True) as store, store.begin() as txn:
        with pytest.raises(UsageError, match="not staged"):
            txn.let_go("params/0")
        txn.write("params/0", shard(0))
        txn.let_go("params/0")
        with pytest.raises(UsageError, match="was let go"):
            txn.read("params/0")
        txn.discard("params/0")
        txn.write("params/0", shard(7))
        assert txn.read("params/0").array("w")[0] == 7


def test_an_abort_after_letting_go_leaves_nothing(tmp_path: Path) -> None:
    with shardb.open(tmp_path / "s", create=True) as store:
        with store.begin() as txn:
            txn.write("params/0", shard(0))
            txn.let_go("params/0")
        assert store.branches() == {}
        assert not list((tmp_path / "s" / "objects").iterdir())
