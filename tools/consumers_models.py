"""Stores, the packages made of them by the commands, and what our own stages say of each.

Owns which models are shown to consumers: three random geometries that have led readers astray (more
heads than key heads, biases, norms of queries and keys, `head_dim` apart from the hidden size), one
trained here, and published ones where the data is at hand. Knows nothing of consumers.

Shapes: T positions, V vocabulary.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import zstandard
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from export.package_weights import Weights, open_weights
from export.reference_logits import check_ids, stage_logits
from tests.support.ailing import put_interleaved
from tests.support.exports import byte_tokenizer, make_store
from tools.gguf_to_hf import convert
from trainer.generate import Sampling, generate_ids
from trainer.model.config import ModelConfig

CORPUS = "tinystories-sample.valid.txt.zst"
NEW_TOKENS = 24
HELD_OUT_ROWS = 8
ROW_TOKENS = 256
TEXT_BYTES = 2_000_000
HELD_OUT_BYTES = 100_000
SMOLLM_CHARACTERS = 4000
TRAINED_STEPS = 40
VOCABULARY = 300
TEXTS = (
    "Once upon a time, there was a naïve élève named Lily.",
    "  two leading spaces,\n\nan empty line\tand a tab ",
    "1234567890 + 3.14159 = x² → 猫 🙂",
    "KING HENRY.\nDon't they'll we've I'm",
)
TRAINED, STORIES, SMOLLM = "trained here", "stories260K", "SmolLM2-135M"
CONTROLLED = "grouped"
RANDOM: Mapping[str, Mapping[str, Any]] = {
    "grouped": {"head_dim": 32, "num_kv_heads": 2},
    "biases, tied": {"head_dim": 64, "attention_bias": True, "tied_embeddings": True},
    "norms of q and k": {"head_dim": 96, "num_kv_heads": 2, "qk_norm": True},
}
NAMES = (*RANDOM, TRAINED, STORIES, SMOLLM)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A model as consumers get it, and what our own stages say: logits [T, V] in fp32."""

    name: str
    package: Path
    gguf: Path
    model: ModelConfig
    ids: list[int]
    logits_TV: NDArray[np.float32]
    prompts: list[list[int]]
    greedy: list[list[int]]
    rows: list[list[int]]
    perplexity: float | None
    tokenizer: Tokenizer
    is_control: bool = False

    def question(self, threads: int) -> dict[str, Any]:
        """Give what a consumer is asked."""
        return {
            "package": str(self.package),
            "gguf": str(self.gguf),
            "ids": self.ids,
            "prompts": self.prompts,
            "rows": self.rows,
            "texts": TEXTS,
            "new_tokens": NEW_TOKENS,
            "end_id": self.model.eos_token_id,
            "vocabulary": self.model.vocab_size,
            "positions": min(512, self.model.max_position_embeddings),
            "threads": threads,
        }


def shown_models(
    work: Path,
    data: Path | None,
    smollm: Path | None,
    *,
    stores: Sequence[Path],
    names: Sequence[str],
) -> Iterator[Shown]:
    """Make each model and its packages; published ones where their data is given.

    `stores` are shown as they are; of the others those that `names` has, in its order.
    """
    held_out = _held_out(work, data) if data is not None else None
    for store in stores:
        yield _shown(store.name, store.absolute(), work, held_out)
    for name in names:
        if name in RANDOM:
            yield from _random(name, work)
        elif data is None or held_out is None:
            continue
        elif name == TRAINED:
            yield _shown(name, _trained_store(work), work, held_out)
        elif name == STORIES:
            yield _shown(name, _imported(work, name, data / "models" / name), work, held_out)
        elif smollm is not None:
            tokenizer = data / "tokenizers" / "smollm2-49152" / "tokenizer.json"
            convert(smollm, work / "smollm2", dtype="fp32", tokenizer=tokenizer)
            store = _imported(work, name, work / "smollm2")
            yield _shown(name, store, work, held_out[:SMOLLM_CHARACTERS])


def _held_out(work: Path, data: Path) -> str:
    packed = (data / "corpora" / CORPUS).read_bytes()
    text = zstandard.ZstdDecompressor().decompress(packed)[:TEXT_BYTES]
    (work / "text.txt").write_bytes(text[:-HELD_OUT_BYTES])
    return text[-HELD_OUT_BYTES:].decode(errors="ignore")


def _random(name: str, work: Path) -> Iterator[Shown]:
    shown = _shown(
        name, _random_store(work / name.split(",")[0].replace(" ", "-"), name), work, None
    )
    yield shown
    if name == CONTROLLED:
        wrong = put_interleaved(shown.package, work / "wrong", shown.model.head_dim)
        yield replace(shown, name=f"{name}, layout wrong", package=wrong, is_control=True)


def _imported(work: Path, name: str, package: Path) -> Path:
    command("export.import_cli", package, "--store", work / name)
    return work / name


def _random_store(path: Path, name: str) -> Path:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 128, "num_layers": 3, "num_heads": 4,
        "num_kv_heads": 4, "intermediate_size": 192, "max_position_embeddings": 256,
        "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "initializer_range": 0.1,
        "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    return make_store(
        path, ModelConfig(**{**sizes, **RANDOM[name]}), tokenizer=byte_tokenizer(VOCABULARY)
    )


def _trained_store(work: Path) -> Path:
    rows, store = work / "rows", work / "trained"
    command("trainer.data_cli", "prepare", "--text", work / "text.txt", "--out", rows,
            "--vocab-size", 2000, "--seq-len", 128)  # fmt: skip
    command("trainer.cli", "--store", store, "--preset", "demo", "--data-dir", rows / "train",
            "--device", "cpu", "--max-steps", TRAINED_STEPS, "--seed", 7)  # fmt: skip
    return store


def command(module: str, *arguments: object) -> str:
    """Run a command as a user does; gives what it printed."""
    call = [sys.executable, "-c", f"from {module} import main; main()", *map(str, arguments)]
    ended = subprocess.run(call, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{module} {' '.join(map(str, arguments))}\n{ended.stderr}")
    return ended.stdout


def _shown(name: str, store: Path, work: Path, held_out: str | None) -> Shown:
    package, gguf = work / f"{store.name}-package", work / f"{store.name}.gguf"
    pad = ["--allow-padded-vocabulary"]
    command("export.hf_cli", store, "--out", package, "--dtype", "fp32", *pad)
    command("export.gguf_cli", store, "--out", gguf, "--type", "f32", *pad)
    command("export.doctor_cli", package)
    tokenizer = Tokenizer.from_file(str(package / "tokenizer.json"))
    with open_weights(str(store), ref=None) as weights:
        ids_T = check_ids(weights.model, weights.commit.id, tokenizer.get_vocab_size())
        prompts = [ids_T[:8].tolist(), ids_T[8:20].tolist()]
        rows: list[list[int]] = []
        if held_out is not None:
            told = ("Once upon a time, there was", "The little dog")
            prompts = [tokenizer.encode(text).ids for text in told]
            rows = _rows(tokenizer, held_out, weights.model)
        return Shown(
            name=name,
            package=package,
            gguf=gguf,
            model=weights.model,
            ids=ids_T.tolist(),
            logits_TV=_logits(weights, ids_T.tolist()).numpy(),
            prompts=prompts,
            greedy=[_greedy(weights, prompt) for prompt in prompts],
            rows=rows,
            perplexity=_perplexity(weights, rows),
            tokenizer=tokenizer,
        )


def _rows(tokenizer: Tokenizer, text: str, model: ModelConfig) -> list[list[int]]:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    length = min(ROW_TOKENS, model.max_position_embeddings)
    count = min(HELD_OUT_ROWS, len(ids) // length)
    return [ids[i * length : (i + 1) * length] for i in range(count)]


def _logits(weights: Weights, ids: Sequence[int]) -> Tensor:
    return stage_logits(weights.model, weights.read, torch.tensor(ids), torch.float32)


def _greedy(weights: Weights, prompt: list[int]) -> list[int]:
    return list(
        generate_ids(
            lambda ids: _logits(weights, ids)[-1],
            prompt,
            sampling=Sampling(temperature=0.0),
            max_new_tokens=NEW_TOKENS,
            seed=0,
            end_id=weights.model.eos_token_id,
        )
    )


def _perplexity(weights: Weights, rows: list[list[int]]) -> float | None:
    if not rows:
        return None
    losses = [
        F.cross_entropy(_logits(weights, row[:-1]).double(), torch.tensor(row[1:])) for row in rows
    ]
    return math.exp(float(torch.stack(losses).mean()))
