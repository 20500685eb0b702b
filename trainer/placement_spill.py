"""Boundaries in a file: for steps whose activations fit neither the device nor host memory.

Owns one file without a name in a folder of the store, so that nothing is left of it however the
process ends, and the places in it. Reads and writes go through the store's file seam. Knows nothing
of steps. Invariants: space is taken before a step begins, so that a full disk stops the step before
anything is computed or staged; places are used again, so that the file grows to one step's need.

The system's page cache holds what fits there: a step waits for the disk only beyond that.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardb.errors import StorageFullError
from shardb.filesystem import CREATE, EXCLUSIVE, WRITE, FileSystem, RealFileSystem, write_all
from shardb.storage_errors import FULL, storage_errors
from trainer.device import Device
from trainer.placement import Put, whole_pages
from trainer.sizes import in_bytes

UNNAMED = getattr(os, "O_TMPFILE", 0)
# What says that a file system has no files without names, or cannot take space ahead.
CANNOT = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.ENOSYS)
DOING = "spilling boundary activations"


class SpillFile:
    """Bytes by place in an unnamed file, made when it is first needed."""

    def __init__(self, folder: str, files: FileSystem | None = None) -> None:
        self.size_bytes = 0
        self._folder = folder
        self._files = files or RealFileSystem()
        self._file: int | None = None
        self._end = 0
        self._free: dict[int, list[int]] = {}

    def reserve(self, size: int) -> None:
        """Take space for `size` bytes; StorageFullError, with nothing taken, where it is not."""
        if size <= self.size_bytes:
            return
        try:
            with storage_errors(self._files, self._folder, DOING, size):
                self._allocate(size)
        except StorageFullError as error:
            raise self._full(size) from error
        self.size_bytes = size

    def write(self, data: memoryview) -> int:
        """Write to a free place; give where it is."""
        size = whole_pages(len(data))
        start = self._place(size)
        try:
            with storage_errors(self._files, self._folder, DOING, size):
                write_all(self._files, self._opened(), data, start)
        except StorageFullError as error:
            self._free.setdefault(size, []).append(start)
            raise self._full(size) from error
        return start

    def read(self, start: int, data: memoryview) -> None:
        """Fill `data` from a place."""
        done = 0
        with storage_errors(self._files, self._folder, "reading spilled activations"):
            while done < len(data):
                count = self._files.pread_into(self._opened(), data[done:], start + done)
                if count <= 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                done += count

    def drop(self, start: int, size: int) -> None:
        """Let a place be used again."""
        self._free.setdefault(whole_pages(size), []).append(start)

    def close(self) -> None:
        """Give the space back; the file is made again when it is needed."""
        if self._file is not None:
            self._files.close(self._file)
        self._file, self._end, self.size_bytes = None, 0, 0
        self._free.clear()

    def __del__(self) -> None:
        with suppress(OSError):
            self.close()

    def _place(self, size: int) -> int:
        free = self._free.get(size)
        if free:
            return free.pop()
        self._end += size
        return self._end - size

    def _allocate(self, size: int) -> None:
        try:
            self._files.allocate(self._opened(), size, keep_size=False)
        except OSError as error:
            if error.errno in FULL:
                # Some of it may have been taken.
                self._files.truncate(self._opened(), self.size_bytes)
            if error.errno not in CANNOT:
                raise

    def _opened(self) -> int:
        if self._file is None:
            self._file = self._open()
        return self._file

    def _open(self) -> int:
        if UNNAMED:
            try:
                return self._files.open(self._folder, UNNAMED | WRITE, 0o600)
            except OSError as error:
                if error.errno not in CANNOT:
                    raise
        # A process that dies between these two lines leaves an empty file of the kind that a
        # store's writer holds buffers in: `shardb gc` removes it.
        path = f"{self._folder}/held.{os.getpid()}.{secrets.token_hex(8)}"
        file = self._files.open(path, WRITE | CREATE | EXCLUSIVE, 0o600)
        self._files.unlink(path)
        return file

    def _full(self, size: int) -> StorageFullError:
        try:
            free = f"{in_bytes(self._files.space(self._folder).free_bytes)} are free"
        except OSError:
            free = "how much is free is unknown"
        return StorageFullError(
            f"{self._folder}: no space left while {DOING}: {in_bytes(size)} are needed, {free}."
            " Nothing of this step was committed and the commit before it is intact: free some"
            " space, or go on with --activation-placement host, a lower --micro-batch-size or"
            " fewer --gradient-accumulation-steps",
            path=self._folder,
        )


class SpillShelf:
    """Tensors of a device, or of the host, in a file."""

    def __init__(self, device: Device, file: SpillFile) -> None:
        self._device = device
        self._file = file

    def put(self, tensor: Tensor) -> Put:
        """Write a tensor."""
        start = self._file.write(_bytes_of(self._device.to_host(tensor).contiguous()))
        return Put(place=start, shape=tensor.shape, dtype=tensor.dtype)

    def get(self, put: Put) -> Tensor:
        """Read a tensor to the device."""
        held = torch.empty(put.shape, dtype=put.dtype)
        self._file.read(_start_of(put), _bytes_of(held))
        return self._device.to_device(held)

    def drop(self, put: Put) -> None:
        """Let the place be used again."""
        self._file.drop(_start_of(put), put.bytes)


def _start_of(put: Put) -> int:
    assert isinstance(put.place, int), "another shelf's"
    return put.place


def _bytes_of(tensor: Tensor) -> memoryview:
    """Give a contiguous host tensor's own memory."""
    array: NDArray[np.uint8] = tensor.view(-1).view(torch.uint8).numpy()
    return array.data
