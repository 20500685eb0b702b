"""Stores to begin with: closed, durable in all their parts, laid out anew as often as wanted.

Owns the copy of a small store on a simulated disk: its tree, every index it ever had, its model.
Knows nothing of what is done to the copies.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from shardb.testing.disk import DiskState, Image
from shardb.testing.explorer import STORE
from shardb.testing.model import Expectation, Journal, ModelStore
from shardb.testing.operations import Fault
from shardb.testing.oracle import index_path
from shardb.testing.recording import Ignore, IndexImage, RecordingFileSystem, ignore_nothing
from shardb.testing.workloads import Script


@dataclass(frozen=True, kw_only=True)
class Base:
    """A closed store: its files, its indexes from the first to the newest, and what it holds."""

    image: Image
    indexes: tuple[bytes, ...]
    model: ModelStore

    def lay_out(self, root: str) -> str:
        """Write the store below an empty directory; its path."""
        self.image.materialise(root)
        path = os.path.join(root, STORE)
        write_index(path, self.indexes[-1])
        return path

    def recording(
        self, root: str, *, fault: Fault | None = None, ignore: Ignore = ignore_nothing
    ) -> tuple[RecordingFileSystem, Journal]:
        """Lay the store out and record what is done to it; crashes may bring older indexes back."""
        self.lay_out(root)
        files = RecordingFileSystem(root, fault=fault, ignore=ignore)
        path = index_path(STORE)
        files.index_images.extend(
            IndexImage(number=number - len(self.indexes), path=path, data=data)
            for number, data in enumerate(self.indexes)
        )
        start = Expectation(settled=self.model, attempted=None)
        return files, Journal(lambda: len(files.operations), start=start)


def write_index(path: str, data: bytes) -> None:
    """Put the index of a store that is laid out at `path`."""
    with open(index_path(path), "wb") as file:
        file.write(data)


def make_base(root: str, fill: Callable[[RecordingFileSystem, str, Journal], Script]) -> Base:
    """Let `fill` make a store in the empty directory `root`; its script is closed here."""
    files = RecordingFileSystem(root)
    journal = Journal(lambda: len(files.operations))
    with fill(files, os.path.join(files.root, STORE), journal) as script:
        model = script.model
    files.shut_down()
    state = DiskState(files.initial)
    for operation in files.operations:
        state.advance(operation)
    return Base(
        image=state.image(state.everything()),
        indexes=tuple(image.data for image in files.index_images),
        model=model,
    )
