"""The FORMAT file and the directories of a store.

Owns what makes a directory a store. FORMAT is one line of JSON with `magic`, `version`, `store_id`
and `checksum` (xxh3-128 over the other fields); it is written last, so that a store appears only
when everything it needs is there.
"""

from __future__ import annotations

import errno
import json
from contextlib import suppress
from dataclasses import dataclass

import xxhash

from shardb.errors import FormatError, NotFoundError, ShardbError, UsageError
from shardb.filesystem import (
    FileSystem,
    leads_nowhere,
    list_if_there,
    read_file,
    write_file_durably,
)

MAGIC = "shardb"
FORMAT_VERSION = 1
FORMAT_LIMIT_BYTES = 4096
DIRECTORIES = ("wal", "objects", "spare", "index", "leases", "locks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """What FORMAT says."""

    version: int
    store_id: str


ORPHANS = (
    "missing, and the log with it, but there are objects: the log, or the index, says which "
    "of them belong together. Put FORMAT and wal/ back from a copy of the store, clone the copy "
    "(`shardb clone COPY NEW`), or run `shardb repair`, which goes on with what the index knows"
)


def format_path(root: str) -> str:
    """Where FORMAT is."""
    return f"{root}/FORMAT"


def encode_format(store_id: str) -> bytes:
    """The bytes of FORMAT."""
    fields = {"magic": MAGIC, "version": FORMAT_VERSION, "store_id": store_id}
    return json.dumps({**fields, "checksum": _checksum(fields)}).encode() + b"\n"


def decode_format(data: bytes, path: str) -> Format:
    """Read FORMAT; FormatError when it is damaged, foreign or of a newer version."""
    try:
        fields = json.loads(data)
        checksum = fields.pop("checksum")
        magic, version, store_id = fields["magic"], fields["version"], fields["store_id"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{path}: damaged (it does not hold the fields of a FORMAT file); put the file back "
            "from a copy, or run `shardb repair`",
            path=path,
        ) from error
    if checksum != _checksum(fields) or type(version) is not int or type(store_id) is not str:
        newer = type(version) is int and version > FORMAT_VERSION
        told = f" (it says version {version}; if that is right, upgrade shardb)" if newer else ""
        raise FormatError(
            f"{path}: its checksum does not match; put the file back from a copy, or run "
            f"`shardb repair`{told}",
            path=path,
        )
    if magic != MAGIC:
        raise FormatError(f"{path}: this is no shardb store (magic {magic!r})", path=path)
    if version > FORMAT_VERSION:
        raise FormatError(
            f"{path}: format version {version} is newer than this program reads "
            f"({FORMAT_VERSION}); upgrade shardb",
            path=path,
        )
    return Format(version=version, store_id=store_id)


def is_whole(data: bytes) -> bool:
    """Whether the checksum of a FORMAT file is right, whatever magic and version it has."""
    try:
        fields = json.loads(data)
        return bool(fields.pop("checksum") == _checksum(fields))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def has_whole_format(files: FileSystem, root: str) -> bool:
    """Whether FORMAT is whole: when it is refused all the same, it is of a newer version."""
    try:
        return is_whole(read_file(files, format_path(root), limit_bytes=FORMAT_LIMIT_BYTES))
    except OSError:
        return False


def has_objects(files: FileSystem, root: str) -> bool:
    """Whether objects of a store lie there, whatever became of the rest of it."""
    with suppress(OSError):
        return bool(list_if_there(files, f"{root}/objects"))
    return False


def read_format(files: FileSystem, root: str) -> Format:
    """Read the FORMAT of a store; NotFoundError when there is no store at `root`."""
    path = format_path(root)
    try:
        data = read_file(files, path, limit_bytes=FORMAT_LIMIT_BYTES)
    except OSError as error:
        told = _why_unreadable(files, root, error)
        if told is None:
            raise
        raise told from error
    return decode_format(data, path)


def _why_unreadable(files: FileSystem, root: str, error: OSError) -> ShardbError | None:
    """What an error says of FORMAT; None where it is the storage that failed."""
    path, remedy = format_path(root), "put the file back from a copy, or run `shardb repair`"
    if isinstance(error, NotADirectoryError):
        return NotFoundError(f"{root}: this is a file, not a store", path=root)
    if isinstance(error, IsADirectoryError):
        return FormatError(f"{path}: this is a directory, not the file of a store", path=path)
    if error.errno == errno.EFBIG:
        long = f"longer than {FORMAT_LIMIT_BYTES} bytes, so it is damaged"
        return FormatError(f"{path}: {long}; {remedy}", path=path)
    if error.errno not in (errno.ENOENT, errno.ELOOP):
        return None
    if leads_nowhere(files, path):
        link = "this is a link that leads nowhere; bring back what it leads to"
        return FormatError(f"{path}: {link}, {remedy}", path=path)
    if files.exists(f"{root}/wal"):
        beside = "missing, but there is a log beside it"
        return FormatError(f"{path}: {beside}; {remedy}", path=path)
    if has_objects(files, root):
        return FormatError(f"{path}: {ORPHANS}", path=path)
    if leads_nowhere(files, root):
        there = "there is no store here: this is a link that leads nowhere; mount or bring back"
        return NotFoundError(f"{root}: {there} what it leads to", path=root)
    return NotFoundError(
        f"{root}: there is no store here: give the one that `train --store`, `import-hf --store` or"
        " `shardb pull` made",
        path=root,
    )


def create_directories(files: FileSystem, root: str) -> None:
    """Make the directories of a store, durably; UsageError when something is in the way.

    Somebody may be making the same ones at this moment, or may have died while he did.
    """
    try:
        _make_directory(files, root)
        with suppress(PermissionError):  # a parent that may not be read was not made here
            files.sync_directory(root.rpartition("/")[0] or "/")
        for name in DIRECTORIES:
            _make_directory(files, f"{root}/{name}")
    except (FileNotFoundError, FileExistsError, NotADirectoryError) as error:
        raise UsageError(
            f"{root}: a store cannot be made here ({error.strerror}); its parent must be a "
            "directory",
            path=root,
        ) from error
    files.sync_directory(root)


def _make_directory(files: FileSystem, path: str) -> None:
    try:
        files.make_directory(path)
    except FileExistsError:
        if not files.status(path).is_directory:
            raise


def write_format(files: FileSystem, root: str, store_id: str) -> None:
    """Write FORMAT, durably: from here on the directory is a store."""
    write_file_durably(files, format_path(root), encode_format(store_id))


def _checksum(fields: dict[str, object]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())
