"""When this user last found each object of a store good.

Owns a small file outside the store, in the user's cache directory: checking a store writes nothing
into it. The file is a convenience for `fsck --budget`; whatever is wrong with it, it is as if it
were empty.
"""

from __future__ import annotations

import json
import os
import time

from shardb.errors import ShardbError
from shardb.filesystem import FileSystem, read_file, write_file_durably
from shardb.format import read_format

FILE_LIMIT_BYTES = 64 << 20
KEPT_MAX = 100_000


class VerifiedTimes:
    """Digest to the time, in seconds since 1970, of its last good check."""

    def __init__(self, files: FileSystem, root: str) -> None:
        self._files = files
        self._changed = False
        self._path = self._path_of(root)
        self.times: dict[str, float] = self._load()

    def _path_of(self, root: str) -> str | None:
        try:
            store_id = read_format(self._files, root).store_id
        except (ShardbError, OSError):
            return None
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return f"{cache}/shardb/verified-{store_id}.json"

    def _load(self) -> dict[str, float]:
        if self._path is None:
            return {}
        try:
            loaded = json.loads(read_file(self._files, self._path, limit_bytes=FILE_LIMIT_BYTES))
            return {str(digest): float(when) for digest, when in loaded.items()}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}

    def add(self, digest: str) -> None:
        """Note that an object is good now."""
        self._changed = True
        self.times[digest] = time.time()

    def save(self) -> None:
        """Write the times, if any are new. A cache that cannot be written is left as it is."""
        if self._path is None or not self._changed:
            return
        newest = sorted(self.times.items(), key=lambda item: -item[1])[:KEPT_MAX]
        directory = os.path.dirname(self._path)
        try:
            for place in (os.path.dirname(directory), directory):
                if not self._files.exists(place):
                    self._files.make_directory(place)
            write_file_durably(self._files, self._path, json.dumps(dict(newest)).encode())
        except OSError:
            return
