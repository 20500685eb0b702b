"""A server of the real scheduler and a scripted model, for the clients of the OpenAI API.

The model says `uó猫y😀z!` after a `Q`, one byte a token, and then ends; a chat's prompt ends with
`:`, after which it goes on with the same text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serve.scheduler import Scheduler, SchedulerOptions
from tests.support.byte_model import WINDOW
from tests.support.byte_server import running_server, service_of
from tests.support.http_client import HttpClient
from tests.support.spoken_steps import write_spoken_steps

SAID = "uó猫y😀z!"
API_KEY = "key"


def write_spoken_store(root: Path) -> Path:
    """Write two steps, each a snapshot, that say the same."""
    said = ["Q" + SAID, ":u"]
    return write_spoken_steps(root, {1: said, 2: said}, window=WINDOW)


@contextmanager
def spoken_server(store: Path) -> Iterator[HttpClient]:
    """Serve it, to those who have the key."""
    scheduler = Scheduler(SchedulerOptions(kv_cache_bytes=1 << 22))
    service = service_of([("primary", store)], scheduler, api_keys=[API_KEY])
    with running_server(service) as (_, port):
        yield HttpClient(port=port)
    scheduler.close(drain=False)
    service.catalogue.close()
