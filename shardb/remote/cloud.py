"""A bucket in object storage: `s3://bucket/prefix`, through the library obstore.

Owns the library: its import, its configuration and the meaning of its errors. S3 and what speaks
its protocol is tested; `gs://` and `az://` are passed to the library as they are. Conditional
writes are `If-None-Match: *` and `If-Match` on the ETag; requests are signed, timed out and retried
with back-off by the library.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from shardb.errors import (
    ConflictError,
    CorruptionError,
    NotFoundError,
    ObjectMissingError,
    RemoteFailedError,
    ShardbError,
    UsageError,
)
from shardb.extras import install
from shardb.remote.bucket import Stored, Version
from shardb.remote.credentials import s3_settings

SCHEMES = ("s3", "gs", "az")
# Below this size a value is one request; above it, parts of at least this size.
PART_BYTES = 8 << 20
PARTS_MAX = 9_000
PARTS_AT_ONCE = 3
STREAM_CHUNK_BYTES = 8 << 20
# The library counts the time of a whole transfer of one part or stream against `timeout`.
TIMEOUTS = {
    "connect_timeout": timedelta(seconds=5),
    "read_timeout": timedelta(seconds=60),
    "timeout": timedelta(hours=6),
}
RETRIES = {
    "max_retries": 6,
    "retry_timeout": timedelta(minutes=3),
    "backoff": {
        "init_backoff": timedelta(milliseconds=200),
        "max_backoff": timedelta(seconds=10),
        "base": 2,
    },
}
_TRANSIENT = re.compile(r"HTTP error|status code: (5\d\d|429|408)|timed? ?out|connection", re.I)
_NO_CREDENTIALS = re.compile(
    r"169\.254\.169\.254|Missing ?(AccessKey|SecretAccessKey|Credential)|fd00:ec2::254", re.I
)
_REFUSED = re.compile(r"status code: 40[13]|AccessDenied|InvalidAccessKeyId|SignatureDoesNotMatch")


class CloudBucket:
    """Values below a URL; make one with `open_cloud`."""

    def __init__(self, url: str, store: Any) -> None:
        self._url = url.rstrip("/")
        self._store = store

    @property
    def url(self) -> str:
        return self._url

    def read(self, key: str, *, limit_bytes: int) -> Stored | None:
        try:
            with self._errors(key):
                found = self._store.get(key)
                meta = found.meta
                if meta["size"] > limit_bytes:
                    raise CorruptionError(
                        f"{self._url}/{key}: {meta['size']} bytes, more than {limit_bytes}",
                        path=key,
                    )
                data = bytes(found.bytes())
        except FileNotFoundError:
            return None
        return Stored(data=data, version=Version(etag=meta["e_tag"], version=meta["version"]))

    def size(self, key: str) -> int | None:
        try:
            with self._errors(key):
                return int(self._store.head(key)["size"])
        except FileNotFoundError:
            return None

    def chunks(self, key: str, start: int) -> Iterator[memoryview]:
        try:
            with self._errors(key):
                found = self._store.get(key, options={"range": {"offset": start}})
                for chunk in found.stream(min_chunk_size=STREAM_CHUNK_BYTES):
                    yield memoryview(chunk)
        except FileNotFoundError as error:
            raise ObjectMissingError(f"{self._url}/{key}: missing", path=key) from error

    def create(self, key: str, data: bytes) -> bool:
        return self._put_if(key, data, "create")

    def replace(self, key: str, data: bytes, version: Version) -> bool:
        known = {"e_tag": version.etag, "version": version.version}
        mode = {name: value for name, value in known.items() if value is not None}
        if not mode:
            raise UsageError(f"{self._url}: this storage names no versions to compare and swap")
        return self._put_if(key, data, mode)

    def keeps_conditions(self, key: str, data: bytes) -> bool:
        wrong_etag = {"e_tag": f'"{"0" * 32}"'}
        return self._is_refused(key, data, "create") and self._is_refused(key, data, wrong_etag)

    def upload(self, key: str, size_bytes: int, chunks: Iterator[bytes]) -> None:
        with self._errors(key):
            if size_bytes <= PART_BYTES:
                self._store.put(key, b"".join(chunks), use_multipart=False)
                return
            self._store.put(
                key,
                chunks,
                use_multipart=True,
                chunk_size=max(PART_BYTES, -(-size_bytes // PARTS_MAX)),
                max_concurrency=PARTS_AT_ONCE,
            )

    def keys(self, prefix: str) -> Iterator[str]:
        with self._errors(prefix):
            for page in self._store.list(prefix.rstrip("/")):
                for meta in page:
                    if meta["path"].startswith(prefix):
                        yield meta["path"]

    # Parts

    def _put_if(self, key: str, data: bytes, mode: Any) -> bool:
        """A conditional write. Refused, it may have been this one: a request that timed out and
        was sent again finds its own value, which is why every value that is moved has a nonce."""
        try:
            with self._errors(key):
                self._store.put(key, data, mode=mode)
        except ConflictError:
            present = self.read(key, limit_bytes=max(1 << 20, len(data)))
            return present is not None and present.data == data
        return True

    def _is_refused(self, key: str, data: bytes, mode: Any) -> bool:
        try:
            with self._errors(key):
                self._store.put(key, data, mode=mode)
        except ConflictError:
            return True
        return False

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Give the library's errors their meaning here. FileNotFoundError is a missing key."""
        try:
            yield
        except ShardbError:
            raise
        except Exception as error:
            if not isinstance(error, OSError) and "obstore" not in type(error).__module__:
                raise
            raise self._meaning(key, error) from error

    def _meaning(self, key: str, error: Exception) -> Exception:
        kind, text = type(error).__name__, str(error)
        where = f"{self._url}/{key}"
        if "NoSuchBucket" in text:
            bucket = urlsplit(self._url).netloc
            return NotFoundError(
                f"{self._url}: there is no bucket {bucket!r} at this endpoint; make it first, or "
                "correct the URL",
                path=where,
            )
        if isinstance(error, FileNotFoundError):
            return error
        if kind in ("AlreadyExistsError", "PreconditionError"):
            return ConflictError(f"{where}: somebody else wrote it first", path=where)
        if kind == "NotSupportedError":
            return UsageError(
                f"{self._url}: this storage has no conditional writes, without which two pushers "
                f"could lose each other's commits ({_first_line(text)})"
            )
        if _NO_CREDENTIALS.search(text):
            return _no_credentials(self._url)
        if kind in ("PermissionDeniedError", "UnauthenticatedError") or _REFUSED.search(text):
            return UsageError(f"{where}: access was refused: {_first_line(text)}")
        if kind == "UnknownConfigurationKeyError":
            return UsageError(f"{self._url}: {_first_line(text)}")
        again = "run the same command again, it goes on where it stopped"
        if not _TRANSIENT.search(text) and kind not in ("GenericError", "OSError"):
            again = "nothing was changed at either end"
        return RemoteFailedError(f"{where}: {_first_line(text)}; {again}", path=where)


def open_cloud(url: str) -> CloudBucket:
    """The bucket at an s3://, gs:// or az:// URL. No request is made yet.

    Raises UsageError for a bad URL or setting, or where the library is not installed.
    """
    parts = urlsplit(url)
    if not parts.netloc or parts.query or parts.fragment:
        raise UsageError(f"{url}: expected {parts.scheme}://BUCKET/PREFIX")
    try:
        from obstore import store as library
    except ImportError as error:
        raise UsageError(
            f"{url}: object storage needs the library obstore: {install('remote')}"
        ) from error
    settings: Mapping[str, Any] = s3_settings(os.environ) if parts.scheme == "s3" else {}
    options = {**TIMEOUTS, "allow_http": str(settings.get("endpoint", "")).startswith("http:")}
    from_url: Any = library.from_url  # its overloads know one provider each
    try:
        store = from_url(url, client_options=options, retry_config=RETRIES, **settings)
    except Exception as error:
        text = str(error)
        wrong = UsageError(f"{url}: {_first_line(text)}")
        raise (_no_credentials(url) if _NO_CREDENTIALS.search(text) else wrong) from error
    return CloudBucket(url, store)


def _no_credentials(url: str) -> UsageError:
    return UsageError(
        f"{url}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE "
        "for a profile of ~/.aws/credentials"
    )


def _first_line(text: str) -> str:
    return text.split("\n\nDebug source", 1)[0].split("\n", 1)[0].strip()
