"""Which objects' bytes were found right, and in which file as it was at that moment.

Owns the digests that are checked when objects are read. An object is checked again when its file is
another one, or was written to, since: the mapping of a file shows what anybody writes into it.
Knows nothing of what is done with the bytes.

What a stamp cannot see: a bit that falls over in memory, and, of pages that were written to before,
writing through a mapping. `shardb.patrol` digests one object of each commit again, in turn.
"""

from __future__ import annotations

import xxhash

from shardb.buffers import Bytes
from shardb.errors import ObjectCorruptError
from shardb.filesystem import FileSystem, Stamp

READ_BYTES = 1 << 20


class Verified:
    """The objects of one store that this process has found right; with `wanted` False it asks not.

    Any thread may ask: two that check the same object come to the same answer.
    """

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self._stamps: dict[str, Stamp] = {}

    def is_changed(self, digest: str, stamp: Stamp) -> bool:
        """Whether the file was written to since its bytes were found right; False if never."""
        return self._stamps.get(digest, stamp) != stamp

    def check(self, path: str, digest: str, stamp: Stamp, image: Bytes) -> None:
        """Check an image's digest unless it was right in this very file: ObjectCorruptError.

        `stamp` is of a moment before the image is looked at.
        """
        if self.is_due(digest, stamp):
            check_digest(path, digest, image)
            self._stamps[digest] = stamp

    def is_due(self, digest: str, stamp: Stamp) -> bool:
        """Whether the bytes of this very file have not been found right yet, and are to be."""
        return self.wanted and self._stamps.get(digest) != stamp

    def check_file(
        self, files: FileSystem, file: int, path: str, digest: str, stamp: Stamp
    ) -> None:
        """Check the digest of an open file by reading it: OSError where the disk does not show it.

        `stamp` is as for `check`. Read through a mapping, such a page ends the process (SIGBUS).
        What was read here is in memory, where a mapping made next shows it, for as long as there is
        room.
        """
        if not self.is_due(digest, stamp):
            return
        try:
            actual = _file_digest(files, file)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from error
        compare_digest(path, digest, actual)
        self._stamps[digest] = stamp

    def note(self, digest: str, stamp: Stamp) -> None:
        """An image was digested while its file had this stamp."""
        self._stamps[digest] = stamp

    def forget(self, digest: str) -> None:
        """Let go of an object that is retired, or has a new file that nobody has read."""
        self._stamps.pop(digest, None)


def _file_digest(files: FileSystem, file: int) -> str:
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(READ_BYTES))
    offset = 0
    while (count := files.pread_into(file, buffer, offset)) > 0:
        hasher.update(buffer[:count])
        offset += count
    return hasher.hexdigest()


def check_digest(path: str, digest: str, image: Bytes) -> None:
    """Raise ObjectCorruptError when an image has another digest than its name says."""
    compare_digest(path, digest, xxhash.xxh3_128_hexdigest(image.data))


def compare_digest(path: str, digest: str, actual: str) -> None:
    """Raise ObjectCorruptError when the digest of a file is not the one that names it."""
    if actual != digest:
        raise ObjectCorruptError(
            f"{path}: the bytes have digest {actual}, not the one that names the file; run "
            "`shardb fsck` to see which steps it hits",
            path=path,
        )
