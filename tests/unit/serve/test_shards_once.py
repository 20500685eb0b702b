"""Is every shard read once and kept once, in the dtype it is computed in, and given up in time?"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from serve.pinned import PinnedModel
from serve.requests import Event, Finished, SamplingParameters
from tests.support.packages import config_of, import_here, write_package
from tests.support.served import WAIT_SECONDS, ask, scheduler, write_model
from tests.support.tiny_model import TINY

SIZE_SHARE = 1.1  # objects have headers, which count for more where tensors are tiny


def opened(root: Path, *, tied: bool) -> PinnedModel:
    write_model(root, replace(TINY, tied_embeddings=tied), seed=1)
    return PinnedModel.open(root)


@pytest.fixture(params=[True, False], ids=["tied", "not tied"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PinnedModel]:
    found = opened(tmp_path / "run", tied=request.param)
    yield found
    found.release()


def shard_bytes(pinned: PinnedModel) -> int:
    return sum(pinned.size_bytes(name) for name in pinned.commit.shards if "params/" in name)


def test_is_every_shard_read_and_kept_once(model: PinnedModel) -> None:
    with scheduler() as to:
        ask(to, model, [1, 2], 4).wait()
        found = to.statistics()
        assert found.bytes_read == shard_bytes(model)
        assert found.resident_bytes <= found.bytes_read < SIZE_SHARE * found.resident_bytes
        assert found.resident_stages == len(
            [name for name in model.commit.shards if name.startswith("params/")]
        )


def test_is_every_shard_read_once_a_sweep_where_none_stays(model: PinnedModel) -> None:
    with scheduler(max_resident_bytes=0) as to:
        ask(to, model, [1, 2], 4).wait()
        to.forget_prefixes()  # the worker has gone on
        found = to.statistics()
        assert found.bytes_read == found.sweeps * shard_bytes(model)
        assert found.resident_bytes == 0


def test_do_tied_embeddings_say_the_same_resident_and_streamed(tmp_path: Path) -> None:
    pinned = opened(tmp_path / "run", tied=True)
    for dtype in ("fp32", "bf16"):
        found = []
        for most in (None, 0):
            with scheduler(dtype=dtype, max_resident_bytes=most) as to:
                found.append(ask(to, pinned, [3, 4, 5], 8).wait().scored)
        assert found[0] == found[1]
    pinned.release()


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "phi3"])
def test_is_a_bf16_import_kept_in_bf16(name: str, tmp_path: Path) -> None:
    write_package(tmp_path / "package", config_of(name))
    import_here(tmp_path / "package", tmp_path / "store")
    pinned = PinnedModel.open(tmp_path / "store")
    values = {}
    for dtype in ("bf16", "fp32"):
        with scheduler(dtype=dtype) as to:
            ask(to, pinned, [3, 4, 5], 2).wait()
            kept = [each.weights for each in to._shelf._resident.values()]
            dtypes = {tensor.dtype for weights in kept for tensor in weights.values()}
            values[dtype] = to.statistics().resident_bytes
        assert (torch.float32 in dtypes) is (dtype == "fp32")
    assert values["bf16"] < 0.7 * values["fp32"], "the control arm holds more"
    pinned.release()


def test_is_everything_given_up_before_the_last_event(tmp_path: Path) -> None:
    pinned = opened(tmp_path / "run", tied=False)
    ended = threading.Event()
    seen: list[tuple[int, int, list[str]]] = []

    def sink(event: Event) -> None:
        now = to.statistics()
        leases = os.listdir(tmp_path / "run" / "leases")
        seen.append((now.requests_running, now.kv_bytes_used, leases))
        if isinstance(event, Finished):
            ended.set()

    with scheduler() as to:
        to.submit(
            pinned, [1, 2], SamplingParameters(max_tokens=3, temperature=0.0, ignore_eos=True), sink
        )
        pinned.release()
        assert ended.wait(WAIT_SECONDS)
    assert seen[-1] == (0, 0, [])
    assert all(running == 1 and used > 0 and leases for running, used, leases in seen[:-1])
