"""The bytes of shards that a step reads and writes.

Owns the counting, at the transaction that the engine uses. What is read may come from memory that
the store keeps: the counts say what passes between store and step, not what a disk did.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardb import ShardView, StagedShard, TensorSpec, Transaction


class MeteredTransaction:
    """A transaction as the engine sees it, which counts what passes."""

    def __init__(self, txn: Transaction) -> None:
        self.bytes_read = 0
        self.bytes_written = 0
        self._txn = txn

    def read(self, name: str) -> ShardView:
        """Give the immutable shard."""
        view = self._txn.read(name)
        self.bytes_read += view.bytes
        return view

    def stage(self, name: str, like: ShardView | Mapping[str, TensorSpec]) -> StagedShard:
        """Give the writable image of a shard of the next commit."""
        staged = self._txn.stage(name, like)
        self.bytes_written += staged.bytes
        return staged

    def discard(self, name: str) -> None:
        """Drop what is staged of a shard, so that it can be staged again."""
        self._txn.discard(name)
