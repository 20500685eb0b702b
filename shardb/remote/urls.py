"""Which remote store a URL means.

Owns the schemes: `file://` is a directory, `s3://`, `gs://` and `az://` are object storage.
"""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from shardb.errors import UsageError
from shardb.filesystem import RealFileSystem
from shardb.remote.bucket import Bucket
from shardb.remote.cloud import SCHEMES, open_cloud
from shardb.remote.directory import DirectoryBucket
from shardb.remote.repository import RemoteStore


def is_url(text: str) -> bool:
    """Whether an argument is a URL and not a path."""
    return "://" in text


def open_remote(url: str, *, create: bool = False) -> RemoteStore:
    """Open the remote store at a URL, with one request.

    Raises UsageError for a bad URL or credentials, NotFoundError where there is no bucket or,
    unless `create`, no store, and RemoteFailedError where nobody answers.
    """
    return RemoteStore(open_bucket(url), create=create)


def open_bucket(url: str) -> Bucket:
    """The bucket at a URL; no request is made yet."""
    parts = urlsplit(url)
    if parts.scheme in SCHEMES:
        return open_cloud(url)
    if parts.scheme != "file":
        known = ", ".join(f"{scheme}://" for scheme in ("file", *SCHEMES))
        raise UsageError(f"{url}: unknown kind of place; known are paths and {known}")
    if parts.netloc not in ("", "localhost") or not os.path.isabs(parts.path):
        raise UsageError(f"{url}: expected file:///absolute/path")
    return DirectoryBucket(RealFileSystem(), os.path.normpath(unquote(parts.path)))
