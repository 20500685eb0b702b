"""The two sides of `tools.bench.lora_soup`, each in a process of its own.

Owns how each program is asked for a step of the same adapters on the same model. A side reads one
line of JSON a step, the micro-batches of token rows and whether what a device held is to be
forgotten before it, and answers with one: loss and seconds. Soup
is driven through its own `shard_checkpoint` and `build_streamed_model`, with the values that its
trainer hands them by default, and torch's AdamW; ours through the engine and a store, with what
`train` chooses, each step committed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import shardb
from export.import_run import plan_import, run_import
from shardb import torch_adaptor
from trainer.device import Device
from trainer.host_memory import keep_freed_memory
from trainer.lora.adoption import fill_first
from trainer.lora.engine import AdapterEngine
from trainer.model.adapter_settings import LoraSettings
from trainer.model.stored import read_model
from trainer.options import EngineOptions
from trainer.pipeline.pipeline import PipelineSettings

ADAM = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "adam_eps": 1e-8, "weight_decay": 0.0}
AGAIN_SECONDS = 0.1
LONG_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
Step = Callable[[list[np.ndarray]], float]


def main() -> None:
    """Be one side until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arm", choices=("ours", "soup"))
    parser.add_argument("plan", type=json.loads)
    asked = parser.parse_args()
    plan = asked.plan
    torch.set_num_threads(plan["threads"])
    started = time.perf_counter()
    step = {"ours": our_step, "soup": soup_step}[asked.arm](plan)
    _answer({"ready_seconds": time.perf_counter() - started})
    for line in sys.stdin:
        asked_step = json.loads(line)
        rows = [np.array(each) for each in asked_step["rows"]]
        if asked_step["anew"]:
            _device(plan).forget_peak()
        _wait(plan)
        began, cpu_began = time.perf_counter(), time.process_time()
        loss = step(rows)
        _wait(plan)
        took = {
            "seconds": time.perf_counter() - began,
            "cpu_seconds": time.process_time() - cpu_began,
        }
        _answer({"loss": loss, **took, **_memory(plan)})


def our_step(plan: dict[str, Any]) -> Step:
    """Import the package, commit the first adapters, write them for the peer; give a step."""
    keep_freed_memory()  # as the command `train` does before its first step
    work = Path(plan["work"])
    package = plan_import(Path(plan["package"]))
    run_import(package, work / "store")
    store = shardb.open(work / "store", writer_threads=2)
    with store.at() as view:
        model = read_model(view)
    lora = LoraSettings(
        rank=plan["rank"],
        alpha=2.0 * plan["rank"],
        targets=tuple(plan["targets"]),
        base_quant=plan["quant"],
    )
    values = {k: v for k, v in ADAM.items() if k != "learning_rate"}
    options = EngineOptions(
        dtype=plan["dtype"],
        grad_clip_mode="none",
        compile_blocks=plan["compile"],
        activations=plan["activations"],
        activation_placement=plan["placement"],
        lm_head_chunk_tokens=plan["chunk"],
        **values,  # type: ignore[arg-type]
    )
    # As `train` chooses where memory has room.
    copies = plan["activations"] == "keep"
    # The device that is asked for its peak: it knows what recordings hold.
    engine = AdapterEngine(model, options, _device(plan), lora, copies_base=copies)
    engine.use_pipeline(PipelineSettings())
    _commit_first(store, engine, work / "first.safetensors")
    done = 0

    def step(rows: list[np.ndarray]) -> float:
        nonlocal done
        done += 1
        with store.begin() as txn:
            rate = float(ADAM["learning_rate"])
            result = engine.train_step(txn, rows, step=done, learning_rate=rate)
            txn.commit(step=done + 1)
        return result.loss

    return step


def _commit_first(store: shardb.Store, engine: AdapterEngine, file: Path) -> None:
    first: dict[str, Tensor] = {}
    with store.begin() as txn:
        engine.prepare_base(txn)
        owners = {stage.name: stage for stage in engine.adapted.owners}
        for shard, specs in engine.shard_specs().items():
            tensors = {name: torch.zeros(spec.shape) for name, spec in specs.items()}
            kind, _, stage = shard.partition("/")
            if kind == "adapters":
                fill_first(owners[stage], 0, tensors)
                first |= {f"{stage}:{name}": tensor for name, tensor in tensors.items()}
            torch_adaptor.write(txn, shard, tensors)
        txn.commit(step=1)
    written = file.with_suffix(".part")
    save_file(first, written)
    written.rename(file)


def soup_step(plan: dict[str, Any]) -> Step:
    """Shard the checkpoint, build the streamed model with the same first adapters; give a step."""
    shards = importlib.import_module("soup_cli.utils.layer_shard")
    runtime = importlib.import_module("soup_cli.utils.layer_stream_runtime")
    peft = importlib.import_module("peft")
    package, out = plan["package"], Path(plan["work"]) / "soup-shards"
    quantised: Sequence[str] = ()
    dtype, is_cuda = LONG_DTYPES[plan["dtype"]], plan["device"] != "cpu"
    if plan["quant"] == "nf4":
        skeleton = runtime.build_meta_skeleton(package, dtype=dtype, quant="nf4")
        quantised = tuple(runtime.quantised_layer_suffixes(skeleton))
    index = shards.shard_checkpoint(
        package, str(out), dtype=dtype, arch="llama", quant=plan["quant"], quant_suffixes=quantised
    )
    config = peft.LoraConfig(
        r=plan["rank"],
        lora_alpha=2 * plan["rank"],
        target_modules=plan["targets"],
        task_type="CAUSAL_LM",
    )
    model, _ = runtime.build_streamed_model(
        model_id=package,
        shard_dir=str(out),
        index=index,
        lora_config=config,
        device="cuda:0" if is_cuda else "cpu",
        dtype=dtype,
        pin=is_cuda,
        quant=plan["quant"],
    )
    model.train()
    trained = _with_first(model, Path(plan["work"]) / "first.safetensors")
    optimizer = torch.optim.AdamW(
        trained,
        lr=float(ADAM["learning_rate"]),
        betas=(float(ADAM["beta1"]), float(ADAM["beta2"])),
        eps=float(ADAM["adam_eps"]),
        weight_decay=0.0,
    )
    device = trained[0].device

    def step(rows: list[np.ndarray]) -> float:
        total = 0.0
        for each in rows:
            ids, labels = (
                torch.from_numpy(p.copy()).to(device) for p in (each[:, :-1], each[:, 1:])
            )
            # Rows are one token longer than what is read, so the labels are shifted already.
            loss = model(input_ids=ids, labels=labels, shift_labels=labels).loss / len(rows)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def _with_first(model: Any, file: Path) -> list[Any]:
    """Give every adapter our first values; each must find its place."""
    while not file.exists():
        time.sleep(AGAIN_SECONDS)
    first = load_file(file)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    left = set(trained)
    for key, tensor in first.items():
        stage, _, name = key.partition(":")
        module, _, letter = name.removesuffix(".weight").rpartition(".")
        index = int(stage.removeprefix("block_"))
        [place] = [
            n
            for n in left
            if f".{index}." in n and f"{module}.{letter}." in n.replace(".inner.", ".")
        ]
        left.remove(place)
        with torch.no_grad():
            trained[place].copy_(tensor)
    assert not left, f"adapters without a first value: {sorted(left)[:3]}"
    return list(trained.values())


def _memory(plan: dict[str, Any]) -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if "kB" in line}
    # The most at once of all pages, and what of the present ones is no file's.
    found = {"peak_bytes": sizes["VmHWM"], "own_bytes": sizes["RssAnon"]}
    device = _device(plan)
    return found if device.is_host else found | {"device_bytes": device.peak_bytes()}


def _wait(plan: dict[str, Any]) -> None:
    _device(plan).wait()


@cache
def _device_named(name: str) -> Device:
    return Device.from_name(name)


def _device(plan: dict[str, Any]) -> Device:
    return _device_named(plan["device"])


def _answer(values: dict[str, Any]) -> None:
    print("=>" + json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
