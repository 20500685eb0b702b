"""Do the command lines of the system that this one replaces run here, `--store` for `--run-dir`?

The flags were typed from the published commands; directories, device and, for the runs, sizes are
those of a test.
"""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.support.training import step_lines, train_here
from trainer.model.presets import PRESETS
from trainer.model.stages import parameter_count

# What all of them have in common.
SHARED = """
 --train --seq-len 512 --dtype fp16 --master-weight-dtype fp32 --device cuda --optimizer adamw
 --beta1 0.9 --beta2 0.95 --adam-eps 1e-8 --lr-schedule tokens --prefetch-shards cpu
 --prefetch-optimizer-shards --no-clear-cuda-cache-between-shards --shard-log-every 0
 --lm-head-chunk-tokens 4096 --async-shard-writes
"""
V21 = """
 --micro-batch-size 32 --gradient-accumulation-steps 1 --shard-storage-format safetensors
 --learning-rate 3e-5 --weight-decay 0.05 --max-grad-norm 1.0 --warmup-tokens 0
 --decay-tokens 100000000 --min-lr-ratio 1.0 --max-steps 3000 --save-every 500
 --validate-every 100 --max-validation-batches 128 --max-resident-shards 500
 --prefetch-window 500 --trainer-state-every 25 --max-pending-shard-writes 4
"""
V25 = """
 --micro-batch-size 32 --gradient-accumulation-steps 4 --shard-storage-format torch
 --learning-rate 1e-5 --weight-decay 0.05 --max-grad-norm 1.0 --grad-clip-mode global
 --warmup-tokens 0 --decay-tokens 500000000 --min-lr-ratio 0.5 --max-steps 25000
 --save-every 100 --validate-every 100 --max-validation-batches 50 --no-shuffle-train
 --max-resident-shards 27 --prefetch-window 27 --trainer-state-every 25
 --max-pending-shard-writes 8
"""
V26 = """
 --micro-batch-size 64 --gradient-accumulation-steps 24 --shard-storage-format torch
 --learning-rate 6e-5 --weight-decay 0.05 --max-grad-norm 1.5 --grad-clip-mode global
 --warmup-tokens 26214400 --decay-tokens 500000000 --min-lr-ratio 0.6 --max-steps 5000
 --save-every 25 --validate-every 25 --max-validation-batches 24 --shuffle-train
 --max-resident-shards 12 --prefetch-window 12 --trainer-state-every 25
 --max-pending-shard-writes 16
"""
V28_SHARED = """
 --active-run-dir {active} --durable-flush-every 1000 --shard-storage-format torch
 --max-grad-norm 0.5 --warmup-tokens 26214400 --decay-tokens 5000000000 --min-lr-ratio 0.75
 --max-steps 20000 --save-every 100 --validate-every 100 --max-validation-batches 100
 --shuffle-train --max-resident-shards 12 --prefetch-window 12 --trainer-state-every 100
 --max-pending-shard-writes 16
"""
V28 = """
 --micro-batch-size 192 --gradient-accumulation-steps 4 --learning-rate 3e-5
 --weight-decay 0.05 --grad-clip-mode global
"""
V28_NORMALISED = """
 --micro-batch-size 32 --gradient-accumulation-steps 8 --learning-rate 2e-5
 --weight-decay 0.01 --grad-clip-mode shard --global-optimizer-every 50
 --global-optimizer-blend 0.25 --global-optimizer-min-scale 0.5
 --global-optimizer-max-scale 2.0
"""
GUARD = """
 --guarded-step-replay --guard-replay-max-replays 2 --guard-replay-loss-tolerance 0.02
 --guard-replay-loss-tolerance-ratio 0.002 --guard-replay-lr-scales 1.0,0.5,0.25
 --guard-replay-grad-norm-scales 1.0,0.75,0.5 --guard-replay-on-exhaust {on_exhaust}
"""
COMMANDS = {
    "v2.1": ("perkunas-v2.1", SHARED + V21),
    "v2.5 global clip": ("perkunas-v2.5", SHARED + V25),
    "v2.6 plateau recovery": ("perkunas-v2.6-50m", SHARED + V26),
    "v2.8": ("perkunas-v2.8-50m", SHARED + V28_SHARED + V28),
    "v2.8 normalised": ("perkunas-v2.8-50m", SHARED + V28_SHARED + V28_NORMALISED),
    "v2.9 guarded, accept": (
        "perkunas-v2.9-100m",
        SHARED + V28_SHARED + V28 + GUARD.format(on_exhaust="accept"),
    ),
    "v2.9 guarded, skip": (
        "perkunas-v2.9-100m",
        SHARED + V28_SHARED + V28 + GUARD.format(on_exhaust="skip"),
    ),
}
# The models of the commands, as they were configured.
CONFIGURATIONS = {
    "perkunas-v2.1": (32000, 1024, 24, 16, 2816),
    "perkunas-v2.5": (32000, 896, 24, 14, 2432),
    "perkunas-v2.6-50m": (32000, 448, 9, 7, 1152),
    "perkunas-v2.8-50m": (8000, 640, 9, 10, 1792),
    "perkunas-v2.9-100m": (8000, 768, 13, 12, 1920),
}
SIZE_FLAGS = (
    "--vocab-size",
    "--hidden-size",
    "--num-layers",
    "--num-heads",
    "--intermediate-size",
)
REST_OF_CONFIGURATION = """
 --max-position-embeddings 2048 --rope-theta 10000.0 --rms-norm-eps 1e-5 --dropout 0.0
 --no-tied-embeddings --initializer-range 0.02 --pad-token-id 0 --bos-token-id 1 --eos-token-id 2
"""
WITHOUT_EFFECT = {
    *("--train", "--shard-storage-format", "--max-resident-shards"),
    *("--clear-cuda-cache-between-shards", "--shard-log-every", "--trainer-state-every"),
}
# What a test changes: no GPU, a model and batches for a second, and few steps.
SMALL = """
 --device cpu --threads 1 --seq-len 16 --vocab-size 64 --hidden-size 32 --num-layers 2
 --num-heads 4 --intermediate-size 48 --micro-batch-size 2 --gradient-accumulation-steps 2
 --max-steps 3 --save-every 2 --validate-every 2 --warmup-tokens 64 --learning-rate 1e-3
"""


def rows_in(folder: Path, seq_len: int) -> Path:
    for split in ("train", "val"):
        (folder / split).mkdir(parents=True)
        ids = np.arange(12 * (seq_len + 1), dtype="<i4").reshape(12, seq_len + 1)
        np.save(folder / split / "rows.npy", ids * 7 % 64)
    return folder


def command(name: str, folder: Path, data: Path) -> list[str]:
    """Give a published command with this test's folders; the last of two equal flags counts."""
    _, text = COMMANDS[name]
    args = ["--store", str(folder / "run"), "--data-dir", str(data / "train")]
    args += ["--val-data-dir", str(data / "val")]
    return args + shlex.split(text.format(active=folder / "active"))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_published_command_parses_and_is_planned_as_it_was_meant(
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Their disks were large; on a smaller one a dry run fails, as it should.
    monkeypatch.setattr("trainer.budget._free_bytes", lambda _: 1 << 50)
    monkeypatch.setattr("trainer.budget.machine_memory", lambda: (1 << 40, 1 << 40))
    model, _ = COMMANDS[name]
    args = command(name, tmp_path, rows_in(tmp_path / "data", 512))
    on_cpu = ["--device", "cpu", "--dry-run", "--json"]
    assert train_here([*args, "--preset", model, *on_cpu]) == 0
    named = json.loads(capsys.readouterr().out)
    sizes = zip(SIZE_FLAGS, map(str, CONFIGURATIONS[model]), strict=True)
    configured = [part for pair in sizes for part in pair] + REST_OF_CONFIGURATION.split()
    assert train_here([*args, *configured, *on_cpu]) == 0
    typed = json.loads(capsys.readouterr().out)
    assert typed["model"] == named["model"]
    assert named["parameter_count"] == parameter_count(PRESETS[model])
    given = dict(pairwise(args))
    rows = int(given["--micro-batch-size"]) * int(given["--gradient-accumulation-steps"])
    assert named["rows_per_step"] == rows
    assert named["max_steps"] == int(given["--max-steps"])
    noted = {note.split()[0] for note in named["notes"] if note.startswith("--")}
    assert noted == WITHOUT_EFFECT
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_published_command_trains(name: str, tmp_path: Path) -> None:
    args = command(name, tmp_path, rows_in(tmp_path / "data", 16)) + SMALL.split()
    assert train_here(args) == 0
    lines = step_lines(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["updated_shards"] == 5 for line in lines)
    assert ["validation_loss" in line for line in lines] == [False, True, True]


def test_what_was_called_otherwise_is_answered_by_its_name_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = command("v2.1", tmp_path, tmp_path)
    args[0] = "--run-dir"
    assert train_here(args) == 2
    assert f"--store {tmp_path / 'run'}" in capsys.readouterr().err
    assert train_here([*args, "--max-resident-shard", "3"]) == 2
    assert "--max-resident-shards" in capsys.readouterr().err
