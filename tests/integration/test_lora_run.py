"""Does `train` with adapters keep the base, resume bit for bit, branch, and give peft's files?"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import shardb
from export.hf_cli import command as export_hf
from tests.support.adapters import imported_store
from tests.support.packages import resident
from tests.support.training import (
    TrainProcess,
    head_step,
    make_data,
    step_lines,
    step_records,
    train_here,
)
from trainer.errors import InputError
from trainer.found import find_run
from trainer.lora.reading import reading_engine
from trainer.model.adapters import adapters_of
from trainer.plan import make_plan

IDS = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


def flags(store: Path, data: Path, *more: str) -> list[str]:
    return [
        *("--store", str(store), "--data-dir", str(data / "train")),
        *("--val-data-dir", str(data / "val"), "--validate-every", "2"),
        *("--device", "cpu", "--threads", "1", "--seed", "7", "--micro-batch-size", "4"),
        *("--gradient-accumulation-steps", "2", "--learning-rate", "0.01"),
        *("--lora-rank", "4", "--lora-alpha", "8", *more),
    ]


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Give a package and a store with four steps beside it."""
    package, store = imported_store(tmp_path_factory.mktemp("run"), "phi3")
    more = ("--lora-targets", "qkv_proj,gate_up_proj", "--snapshot-every", "2")
    more += ("--lora-dropout", "0.1")
    assert train_here(flags(store, data, *more, "--max-steps", "4")) == 0
    return package, store


def test_a_step_stages_the_adapters_and_their_state_alone(trained: tuple[Path, Path]) -> None:
    _, store = trained
    with shardb.open(store) as opened:
        imported, head = opened.resolve("imported"), opened.resolve()
        assert opened.resolve("step-2").step == 2
    base = {n: e.digest for n, e in imported.shards.items() if n.startswith("params/")}
    assert base
    assert {n: e.digest for n, e in head.shards.items() if n.startswith("params/")} == base
    moved = {n for n, e in head.shards.items() if e.step == 4}
    kinds = ("adapters", "optim")
    assert moved == {f"{kind}/block_{index:03d}" for index in range(3) for kind in kinds}
    assert not any(head.shards[name].trainable for name in base)
    lines = step_lines(store)
    assert lines[-1]["validation_loss"] < lines[1]["validation_loss"]
    assert lines[-1]["bytes_written"] == sum(head.shards[name].bytes for name in moved)


def test_a_killed_run_goes_on_bit_for_bit(data: Path, tmp_path: Path) -> None:
    _, whole = imported_store(tmp_path / "whole", "llama")
    _, killed = imported_store(tmp_path / "killed", "llama")
    dropping = ("--lora-dropout", "0.2")  # its masks have to come again too
    assert train_here(flags(whole, data, *dropping, "--max-steps", "5")) == 0
    with TrainProcess(flags(killed, data, *dropping)) as process:
        process.wait_for_step(2)
        process.send(signal.SIGKILL)
        process.finish()
    assert head_step(killed) < 5
    assert train_here(["--store", str(killed), "--max-steps", "5"]) == 0
    one, other = step_records(whole), step_records(killed)
    assert one.keys() == other.keys()
    assert all(other[step] == record for step, record in one.items())


def test_a_branch_with_other_adapters_costs_only_them(data: Path, tmp_path: Path) -> None:
    _, store = imported_store(tmp_path, "llama")
    assert train_here(flags(store, data, "--max-steps", "2")) == 0
    begin = ("--branch", "wide", "--from", "imported", "--max-steps", "2")
    assert train_here(flags(store, data, *begin, "--lora-targets", "all-linear")) == 0
    again = ("--branch", "faster", "--from", "main", "--max-steps", "3", "--learning-rate", "0.1")
    assert train_here(["--store", str(store), *again]) == 0
    with shardb.open(store) as opened:
        heads = opened.branches()
        shared = [
            {n: e.digest for n, e in head.shards.items() if n.startswith("params/")}
            for head in heads.values()
        ]
        assert len(heads) == 3
        assert all(digests == shared[0] for digests in shared)
        sizes = {n: h.shards["adapters/block_000"].bytes for n, h in heads.items()}
        assert sizes["wide"] > sizes["main"] == sizes["faster"]


def test_poisoned_buffers_and_what_is_kept_change_nothing(data: Path, tmp_path: Path) -> None:
    found = []
    ways = {
        "plain": ("--activations", "recompute"),
        "poisoned": ("--poison-buffers", "--activations", "keep"),
    }
    for name, more in ways.items():
        _, store = imported_store(tmp_path / name, "llama")
        assert train_here(flags(store, data, *more, "--max-steps", "2")) == 0
        found.append(step_records(store)[2].shards)
    plain, poisoned = ({n: d for n, d in f.items() if "meta/" not in n} for f in found)
    assert plain == poisoned


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"lora_targets": "q_proj"}, "no module of this model is called q_proj.*qkv_proj"),
        ({"lora_dropout": 1.0}, "--lora-dropout is 1.0"),
        ({"master_weight_dtype": "bf16"}, "adapters are kept in fp32"),
        ({"fit": True, "lora_targets": "qkv_proj"}, "--fit"),
        (
            {"compile_blocks": True, "lora_targets": "qkv_proj"},
            "--compile-blocks: this import's layers are those of transformers.* leave it out",
        ),
        ({"lora_rank": 0, "base_quant": "nf4"}, "--base-quant nf4"),
    ],
)
def test_what_does_not_go_together_is_refused(
    more: dict[str, object], words: str, data: Path, tmp_path: Path
) -> None:
    _, store = imported_store(tmp_path, "phi3")
    asked = {"store": str(store), "data_dir": str(data / "train"), "device": "cpu", "lora_rank": 4}
    with pytest.raises(InputError, match=words):
        make_plan(find_run(asked), {**asked, **more}, [])
    same = {**asked, "lora_targets": "qkv_proj"}
    assert make_plan(find_run(same), same, []).recipe.lora is not None


def test_adapters_need_an_import_and_keep_their_settings(
    trained: tuple[Path, Path], data: Path, tmp_path: Path
) -> None:
    _, store = trained
    asked = {"data_dir": str(data / "train"), "device": "cpu", "lora_rank": 4}
    new = {**asked, "store": str(tmp_path / "new"), "preset": "demo"}
    with pytest.raises(InputError, match="import-hf"):
        make_plan(find_run(new), new, [])
    for other in ({"lora_rank": 8}, {"lora_targets": "o_proj"}, {"lora_rank": 0}):
        given = {"store": str(store), **other}
        with pytest.raises(InputError, match="this run began with"):
            make_plan(find_run(given), given, [])
    given = {"store": str(store), "lora_targets": "qkv_proj,gate_up_proj"}
    assert make_plan(find_run(given), given, []).recipe.lora_rank == 4


def store_logits(store: Path) -> torch.Tensor:
    with shardb.open(store) as opened, opened.at() as view:
        return reading_engine(view, "cpu").logits(view, IDS)


def export(store: Path, out: Path, **how: object) -> int:
    values = {"ref": None, "dtype": None, "tokenizer": None, "max_shard_size": "5GB"}
    rest = {"overwrite": False, "average": None, "reference_logits": None, "chat_template": None}
    more = {"allow_padded_vocabulary": False, "allow_network": False, "json": True}
    asked = {"adapter": False, "merge": False, **values, **rest, **more, **how}
    return export_hf(str(store), out, **asked)  # type: ignore[arg-type]


def test_an_export_is_the_adapters_or_the_base_with_them(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package, store = trained
    with pytest.raises(InputError, match="--merge"):
        export(store, tmp_path / "neither")
    with pytest.raises(InputError, match="--dtype"):
        export(store, tmp_path / "neither", adapter=True, dtype="bf16")
    assert export(store, tmp_path / "adapter", adapter=True) == 0
    report = json.loads(capsys.readouterr().out)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert report["tensors"] == report["nonzero_tensors"] == len(tensors) == 12
    names = {"self_attn.qkv_proj", "mlp.gate_up_proj"}
    assert tensors.keys() == {
        f"base_model.model.model.layers.{index}.{name}.lora_{letter}.weight"
        for index in range(3)
        for name in names
        for letter in "AB"
    }
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8, 0.1)
    assert config["target_modules"] == ["gate_up_proj", "qkv_proj"]
    assert export(store, tmp_path / "merged", merge=True, dtype="fp32") == 0
    with torch.no_grad():
        merged = resident(tmp_path / "merged")(IDS).logits
        plain = resident(package)(IDS).logits
    ours = store_logits(store)
    torch.testing.assert_close(merged, ours, rtol=1e-4, atol=1e-5)
    assert float((plain - ours).abs().max()) > 1e-3


def test_a_commit_without_adapters_has_none_to_export(tmp_path: Path) -> None:
    _, store = imported_store(tmp_path, "llama")
    for how in ({"adapter": True}, {"merge": True}):
        with pytest.raises(InputError, match="no adapters"):
            export(store, tmp_path / "out", **how)
    with shardb.open(store) as opened, opened.at() as view:
        assert adapters_of(view) is None


PEFT_SCRIPT = """
import sys
import numpy as np, torch, transformers
from peft import PeftModel
base = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
model = PeftModel.from_pretrained(base, sys.argv[2]).eval()
with torch.no_grad():
    np.save(sys.argv[4], model(torch.from_numpy(np.load(sys.argv[3]))).logits.numpy())
"""


def test_peft_loads_it_in_a_fresh_process_and_gives_the_same_logits(
    trained: tuple[Path, Path], tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="the extra `peft` is not installed")
    package, store = trained
    assert export(store, tmp_path / "adapter", adapter=True) == 0
    np.save(tmp_path / "ids.npy", IDS.numpy())
    paths = [package, tmp_path / "adapter", tmp_path / "ids.npy", tmp_path / "logits.npy"]
    subprocess.run([sys.executable, "-c", PEFT_SCRIPT, *map(str, paths)], check=True)
    theirs = torch.from_numpy(np.load(tmp_path / "logits.npy"))
    assert torch.equal(theirs, store_logits(store))
