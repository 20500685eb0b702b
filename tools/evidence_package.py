"""What transformers makes of the exported run: held-out loss text by text, and what it writes.

Owns the loading of a package by transformers and the arithmetic of nats and bits. Knows nothing of
stores. Bits a byte count the bytes that the predicted tokens stand for; the token that ends a
document stands for none, and is predicted like the others.

    python -m tools.evidence_package --package run/package --data rows --device cuda --out out.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tools.evidence_rows import FACTS_NAME, read_rows

PROMPTS = (
    "Once upon a time, there was a little girl named",
    "Tom had a red ball. One day",
    "The old lighthouse keeper looked out at the sea",
    "It was a dark night in the city, and the detective",
)
NEW_TOKENS = 180
TEMPERATURE = 0.8
TOP_P = 0.95
BATCH_ROWS = 16


def held_out(data: Path, batch_rows: int) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Give every held-out text's rows by name, first the whole batches that the run measured."""
    facts = json.loads((data / FACTS_NAME).read_text())
    for folder in ("val", "other"):
        rows = read_rows(data / folder).astype(np.int64)
        if folder == "val":
            yield "val", rows[: len(rows) // batch_rows * batch_rows]
        for name, (first, last) in facts[folder].items():
            yield name, rows[first:last]


def byte_counts(tokenizer: Path) -> NDArray[np.int64]:
    """Give how many bytes each id stands for: a byte-level token has a character a byte."""
    loaded = Tokenizer.from_file(str(tokenizer))
    special = {token.content for token in loaded.get_added_tokens_decoder().values()}
    words = [loaded.id_to_token(index) or "" for index in range(loaded.get_vocab_size())]
    return np.array([0 if word in special else len(word) for word in words])


def unigram_entropy(ids: NDArray[np.int64]) -> float:
    """Give the loss of a predictor that knows only how often each id occurs here."""
    counts = np.bincount(ids.reshape(-1))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


@torch.no_grad()
def loss_of(model: Any, rows: NDArray[np.int64], device: str) -> float:
    """Give the mean loss of every target in the rows, in nats."""
    total = 0.0
    for first in range(0, len(rows), BATCH_ROWS):
        ids = torch.from_numpy(rows[first : first + BATCH_ROWS]).to(device)
        logits = model(ids[:, :-1]).logits.float()
        total += float(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
    return total / rows[:, 1:].size


def losses(model: Any, dtype: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Give each text's loss in nats a token and bits a byte, beside its unigram entropy."""
    sizes = byte_counts(given.data / "tokenizer.json")
    for name, rows in held_out(given.data, given.batch_rows):
        chosen = rows[: given.rows]
        nats = loss_of(model, chosen, given.device)
        targets = chosen[:, 1:]
        yield {
            "kind": "loss",
            "text": name,
            "dtype": dtype,
            "rows": len(chosen),
            "tokens": int(targets.size),
            "bytes": int(sizes[targets].sum()),
            "nats_per_token": nats,
            "bits_per_byte": nats / math.log(2) * targets.size / int(sizes[targets].sum()),
            "unigram_entropy_nats": unigram_entropy(targets),
        }


@torch.no_grad()
def samples(model: Any, package: Path, device: str) -> Iterator[dict[str, Any]]:
    """Write on from each prompt: the likeliest words, and drawn ones."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(package)
    for number, prompt in enumerate(PROMPTS):
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids.to(device)
        for is_drawn in (False, True):
            torch.manual_seed(number)
            drawn = {"temperature": TEMPERATURE, "top_p": TOP_P} if is_drawn else {}
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=is_drawn,
                pad_token_id=model.config.eos_token_id,
                **drawn,
            )
            text = tokenizer.decode(made[0], skip_special_tokens=True)
            yield {"kind": "sample", "prompt": prompt, **drawn, "seed": number, "text": text}


def main(words: Sequence[str] | None = None) -> int:
    """Measure and write; lines are written as they come."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch-rows", type=int, default=1, help="of the run's validation")
    parser.add_argument("--rows", type=int, default=1 << 30, help="rows of each text at most")
    parser.add_argument("--losses-alone", action="store_true", help="in bf16, and no samples")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(words)
    from transformers import AutoModelForCausalLM  # seconds, which help and arithmetic do not need

    with given.out.open("w", buffering=1) as out:
        for dtype in ("bfloat16",) if given.losses_alone else ("float32", "bfloat16"):
            model = AutoModelForCausalLM.from_pretrained(
                given.package, dtype=getattr(torch, dtype)
            ).to(given.device)
            model.eval()
            for line in losses(model, dtype, given):
                out.write(json.dumps(line) + "\n")
            if dtype == "float32":
                for line in samples(model, given.package, given.device):
                    out.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
