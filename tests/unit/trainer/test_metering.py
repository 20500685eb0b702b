"""Are the bytes counted that a step really reads and stages?"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import shardb
from trainer.metering import MeteredTransaction


def test_bytes_are_those_of_the_objects(tmp_path: Path) -> None:
    with shardb.open(tmp_path / "run", create=True) as store:
        with store.begin() as txn:
            txn.write("params/a", {"x": np.arange(1000.0)})
            txn.commit(step=0)
        with store.begin() as txn:
            metered = MeteredTransaction(txn)
            size = store.resolve().shards["params/a"].bytes
            first = metered.read("params/a")
            assert (metered.bytes_read, metered.bytes_written) == (size, 0)
            metered.read("params/a")
            staged = metered.stage("params/a", first)
            staged.array("x")[:] = 1.0
            staged.seal()
            assert (metered.bytes_read, metered.bytes_written) == (2 * size, size)
            # A shard that is discarded and staged again was written twice.
            metered.discard("params/a")
            again = metered.stage("params/a", {"x": first.specs["x"]})
            again.array("x")[:] = 2.0
            assert metered.bytes_written == 2 * size
            assert txn.commit(step=1).shards["params/a"].bytes == size
