"""An S3-compatible server in a process of its own, on this machine's loopback.

Run as a module it serves until it is killed; `serving` starts it for a test. The server is moto's.
It compares and writes in two steps, so a lock around each request gives conditional writes the
atomicity that object storage promises.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
BUCKET = "bucket"


@contextmanager
def serving() -> Iterator[str]:
    """Start a server with an empty bucket and point the environment at it; give its URL."""
    for library in ("obstore", "moto.server", "flask_cors"):
        pytest.importorskip(library, reason=f"no S3-compatible server: {library} is not installed")
    command = [sys.executable, "-m", "tests.support.object_storage"]
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    kept = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("AWS_")}
    try:
        assert process.stdout is not None
        endpoint = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        os.environ.update(settings(endpoint))
        make = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
        urllib.request.urlopen(make).close()
        yield endpoint
    finally:
        process.kill()
        process.wait()
        for name in settings(""):
            os.environ.pop(name, None)
        os.environ.update(kept)


def settings(endpoint: str) -> dict[str, str]:
    """The variables that a user sets, and none of the user's own files."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_CONFIG_FILE": os.devnull,
    }


def main() -> None:
    """Serve on a free port, which is printed first."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    application = DomainDispatcherApplication(create_backend_app)
    lock = threading.Lock()

    def one_at_a_time(environment: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        with lock:
            return list(application(environment, start_response))

    server = make_server("127.0.0.1", 0, one_at_a_time, threaded=True)
    print(server.port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
