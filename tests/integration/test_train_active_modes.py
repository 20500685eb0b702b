"""Do all ways of carrying a run out give the same bytes: prefetch, writes, one store or two?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardb
from shardb import ShardView
from shardb.views import TensorImage
from tests.support.training import arguments, step_lines, train_here
from trainer.device import Device
from trainer.residency import ShardWindow

PREFETCH = {
    "off": (),
    "cpu": ("--prefetch-shards", "cpu"),
    "window 4": ("--prefetch-shards", "cpu", "--prefetch-window", "4"),
    "all": ("--prefetch-shards", "cpu", "--prefetch-window", "500"),
    "parameters": (
        *("--prefetch-shards", "cpu", "--prefetch-window", "3"),
        "--no-prefetch-optimizer-shards",
    ),
}
WRITES = {
    "sync": ("--no-async-shard-writes",),
    "async": ("--async-shard-writes",),
    "async 1": ("--async-shard-writes", "--max-pending-shard-writes", "1"),
}
CLIPS = ("global", "shard")
STEPS = ("--max-steps", "3", "--gradient-accumulation-steps", "2")


def digests(data: Path, store: Path, *flags: str) -> dict[str, str]:
    assert train_here(arguments(store, data, *STEPS, *flags)) == 0
    with shardb.open(store) as opened:
        return {name: entry.digest for name, entry in opened.resolve().shards.items()}


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Train with neither prefetch nor background writes, in one store, for each clip mode."""
    return {
        clip: digests(
            data,
            tmp_path_factory.mktemp(clip) / "run",
            *("--grad-clip-mode", clip, *WRITES["sync"]),
        )
        for clip in CLIPS
    }


@pytest.mark.parametrize(
    ("clip", "tier", "part"),
    [
        ("global", "durable", 0),
        ("shard", "durable", 1),
        ("global", "active", 2),
        ("shard", "active", 0),
    ],
)
def test_no_mode_changes_a_bit(
    data: Path, tmp_path: Path, plain: dict[str, dict[str, str]], clip: str, tier: str, part: int
) -> None:
    """Each part has every prefetch mode with one way of writing or the other."""
    different = []
    for number, prefetch in enumerate(PREFETCH):
        writes = [*WRITES][(number + part) % len(WRITES)]
        folder = tmp_path / str(number)
        flags = ["--grad-clip-mode", clip, *PREFETCH[prefetch], *WRITES[writes]]
        if tier == "active":
            flags += ["--active", str(folder / "active"), "--durable-every", "2"]
        if digests(data, folder / "run", *flags) != plain[clip]:
            different.append((prefetch, writes))
        [*_, line] = step_lines(folder / "run")
        most = 1 if prefetch == "off" else 2
        assert line["max_active_param_shards"] >= most, (prefetch, writes)
        assert writes != "sync" or line["pending_writes"] == 0
    assert different == []
    assert plain["global"] != plain["shard"]


def test_a_wider_window_is_counted(data: Path, tmp_path: Path) -> None:
    counts = {}
    for name, flags in PREFETCH.items():
        digests(data, tmp_path / name, *flags)
        line = step_lines(tmp_path / name)[-1]
        counts[name] = (line["max_active_param_shards"], line["max_active_optimizer_shards"])
    assert counts["off"] == (1, 1)
    assert counts["cpu"] == (2, 1)
    assert counts["parameters"] == (4, 1)
    assert counts["window 4"][0] == 5
    # All that a step takes, one after the other: forward, head, backward, update.
    assert counts["all"] == (14, 5)


def test_control_one_shard_read_ahead_wrongly_is_noticed(
    data: Path,
    tmp_path: Path,
    plain: dict[str, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    true_way = ShardWindow._bring_nearer

    def confused(window: ShardWindow, name: str) -> ShardView:
        return true_way(window, name.replace("block_001", "block_000"))

    monkeypatch.setattr(ShardWindow, "_bring_nearer", confused)
    assert digests(data, tmp_path / "run", *PREFETCH["cpu"]) != plain["global"]


def test_control_one_step_with_another_batch_is_noticed(
    data: Path, tmp_path: Path, plain: dict[str, dict[str, str]]
) -> None:
    assert digests(data, tmp_path / "run", "--no-shuffle-train") != plain["global"]


@pytest.mark.parametrize("prefetch", ["gpu", "secondary-gpu"])
def test_prefetching_to_a_device_that_is_not_there_is_refused(
    data: Path, tmp_path: Path, prefetch: str, capsys: pytest.CaptureFixture[str]
) -> None:
    args = arguments(tmp_path / "run", data, *STEPS, "--prefetch-shards", prefetch)
    assert train_here(args) == 2
    assert f"--prefetch-shards {prefetch}: the run computes on the CPU" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# On a GPU, where shards that are read ahead are also copied there ahead.

GPUS = torch.cuda.device_count()
ON_GPU = ("--device", "cuda", *WRITES["async"])


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_prefetch_mode_changes_a_bit_on_a_gpu(data: Path, tmp_path: Path, dtype: str) -> None:
    modes = ["cpu", "gpu", *(["secondary-gpu"] if GPUS > 1 else [])]
    flags = (*ON_GPU, "--dtype", dtype)
    off = digests(data, tmp_path / "off", *flags)
    for mode in modes:
        for window in ("1", "3", "500"):
            prefetch = ("--prefetch-shards", mode, "--prefetch-window", window)
            found = digests(data, tmp_path / f"{mode}-{window}", *flags, *prefetch)
            assert found == off, (mode, window)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 1, reason="needs a CUDA device")
def test_control_one_shard_sent_ahead_wrongly_is_noticed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = digests(data, tmp_path / "off", *ON_GPU)
    true_way = Device.open_ahead

    def emptied(device: Device, prefetch: str) -> Callable[[TensorImage], None] | None:
        send = true_way(device, prefetch)
        assert send is not None

        def send_nothing(view: TensorImage) -> None:
            send(view)
            device.wait()
            if "block_001" in view.name:
                for tensor in device._sent[view].tensors.values():
                    tensor.zero_()
                device.wait()

        return send_nothing

    monkeypatch.setattr(Device, "open_ahead", emptied)
    flags = ("--prefetch-shards", "gpu", "--prefetch-window", "500")
    assert digests(data, tmp_path / "run", *ON_GPU, *flags) != off


@pytest.mark.gpu
@pytest.mark.skipif(GPUS != 1, reason="needs exactly one CUDA device")
def test_a_second_gpu_that_is_not_there_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--device", "cuda", "--prefetch-shards", "secondary-gpu")
    assert train_here(arguments(tmp_path / "run", data, *STEPS, *flags)) == 2
    assert "one CUDA device here" in capsys.readouterr().err
