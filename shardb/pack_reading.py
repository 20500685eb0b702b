"""Reading packed objects of a store: the file, its base, the base of that.

Owns the way from a digest to the content of an object, packed or not, and `PackedObjects`, which
unpacks whole objects into memory for clients. Knows nothing of the log or the index: what is packed
is seen from the files. Invariant: no image leaves here whose digest was not checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import xxhash

from shardb import layout
from shardb.buffers import Bytes, Pool
from shardb.cache import ImageCache
from shardb.errors import ObjectCorruptError, ObjectMissingError
from shardb.filesystem import READ, FileSystem, opened, read_exactly
from shardb.layout import Layout
from shardb.objects import OBJECT_SUFFIX, OPEN_ATTEMPTS, PACK_SUFFIX
from shardb.pack_decode import Content, FileContent, PackedContent
from shardb.pack_format import Header, read_header
from shardb.pack_threads import threads_here
from shardb.references import CHAIN_MAX


class PackedObjects:
    """The packed objects under one directory, unpacked into buffers of a pool and kept in a cache.

    The cache may be the store's own: an unpacked image is the object's image as any other.
    """

    def __init__(self, files: FileSystem, directory: str, pool: Pool, cache: ImageCache) -> None:
        self._files = files
        self._directory = directory
        self._pool = pool
        self._cache = cache

    def open(self, digest: str, size_bytes: int) -> tuple[Layout, Bytes]:
        """Unpack an object; FileNotFoundError when it has no packed file.

        Raises ObjectCorruptError when its file or its base is damaged, ObjectMissingError when its
        base is not there.
        """
        cached = self._cache.get(digest)
        if cached is not None:
            return cached
        path = packed_path(self._directory, digest)
        with packed_content(self._files, self._directory, digest, size_bytes) as content:
            buffer = self._pool.take(size_bytes, "")
            try:
                content.unpack_into(buffer.array(size_bytes, writable=True), threads=threads_here())
                image = buffer.array(size_bytes, writable=False)
                check_unpacked(path, content.header, xxhash.xxh3_128_hexdigest(image.data))
                found = layout.parse(image.data, path)
            except BaseException:
                buffer.release(self._pool)
                raise
        self._cache.put(digest, found, buffer)
        return found, image


def packed_path(directory: str, digest: str) -> str:
    """Where the packed file of an object lies."""
    return f"{directory}/{digest}{PACK_SUFFIX}"


def check_unpacked(path: str, header: Header, digest: str) -> None:
    """Raise ObjectCorruptError unless what was unpacked has the digest of the object."""
    if digest != header.digest:
        base = f", or its base {header.base}," if header.base else ""
        raise ObjectCorruptError(
            f"{path}: unpacked, the bytes have digest {digest}, not the one that names the file; "
            f"it{base} is damaged. Run `shardb fsck` to see which steps it hits",
            path=path,
        )


@contextmanager
def packed_content(
    files: FileSystem,
    directory: str,
    digest: str,
    size_bytes: int,
    *,
    path: str | None = None,
    depth: int = 1,
) -> Iterator[PackedContent]:
    """The content of a packed object, open for a block; FileNotFoundError when it is not packed.

    `path` is its file where that has not its name yet. `depth` counts the packed files that are
    open for one object; ObjectCorruptError when they are too many.
    """
    path = path or packed_path(directory, digest)
    with ExitStack() as stack:
        file = stack.enter_context(opened(files, path, READ))
        header = read_header(
            lambda start, length: read_exactly(files, file, length, start),
            path=path,
            digest=digest,
            object_bytes=size_bytes,
            file_bytes=files.status(path).size_bytes,
        )
        base: Content | None = None
        if header.base is not None:
            base = _open_base(
                stack, files, directory, header.base, size_bytes, of=path, depth=depth
            )
        yield PackedContent(files, file, path, header, base)


def _open_base(
    stack: ExitStack,
    files: FileSystem,
    directory: str,
    digest: str,
    size_bytes: int,
    *,
    of: str,
    depth: int,
) -> Content:
    """The base of a packed object: its image if there is one, else its packed file."""
    image_path = f"{directory}/{digest}{OBJECT_SUFFIX}"
    for _ in range(OPEN_ATTEMPTS):
        try:
            file = stack.enter_context(opened(files, image_path, READ))
            return FileContent(files, file, image_path)
        except FileNotFoundError:
            pass  # the base is packed too
        if depth >= CHAIN_MAX:
            raise ObjectCorruptError(
                f"{of}: more than {CHAIN_MAX} packed files would have to be read for one object; "
                "the store never writes such a chain",
                path=of,
            )
        try:
            return stack.enter_context(
                packed_content(files, directory, digest, size_bytes, depth=depth + 1)
            )
        except FileNotFoundError:
            continue
    raise ObjectMissingError(
        f"{image_path}: missing, and {of} is a difference to it; run `shardb fsck`",
        path=image_path,
    )
