"""Are shards that two commits share read once for both, and is the difference told exactly?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shardb
from tests.support.http_client import HttpClient
from tests.support.live_serving import following_server
from tests.support.spoken_steps import write_spoken_steps


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two commits that differ in their head alone: one says `ab` after Q, the other `ac`."""
    return write_spoken_steps(tmp_path / "run", {1: ["Qab"], 2: ["Qac"]})


def counted(client: HttpClient, name: str) -> int:
    text = client.ask("/metrics").data.decode()
    found = re.search(rf"^shardb_serve_scheduler_{name}_total (\d+)", text, re.MULTILINE)
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("resident_bytes", [None, 0])
def test_are_shared_shards_read_once(store: Path, resident_bytes: int | None) -> None:
    with shardb.open(store) as opened:
        newest = opened.resolve("step-2").shards
    sizes = {name: entry.bytes for name, entry in newest.items() if name.startswith("params/")}
    body = {"prompt": "Q", "models": ["step-1", "step-2"], "max_new_tokens": 2}
    with following_server(store, max_resident_bytes=resident_bytes) as client:
        found = client.ask("/compare", body).json
        read, sweeps = counted(client, "bytes_read"), counted(client, "sweeps")
    assert (found["shared_shards"], found["shards"]) == (3, 4)
    once = sum(sizes.values()) + sizes["params/lm_head"]
    assert read == once * (1 if resident_bytes is None else sweeps)


def test_where_two_commits_part(store: Path) -> None:
    body = {"prompt": "Q", "models": ["step-1", "step-2"], "max_new_tokens": 8}
    with following_server(store) as client:
        found = client.ask("/compare", body).json
        same = client.ask("/compare", {**body, "models": ["step-1", "step-1"]}).json
    assert [side["text"] for side in found["results"]] == ["ab", "ac"]
    assert found["first_difference"]["index"] == found["common_tokens"] == 1
    assert abs(found["logprob_difference"]) < 1e-6
    assert (same["first_difference"], same["logprob_difference"]) == (None, 0)
    assert same["shared_shards"] == same["shards"]
