"""A tokenizer of one token a byte, and small stores of a model that has it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import shardb
from tests.support.stores import filled
from trainer.model.config import ModelConfig

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END_ID = 0
BEGIN_ID = 1
FIRST_BYTE_ID = len(SPECIAL)
VOCAB_SIZE = FIRST_BYTE_ID + 256
WINDOW = 256
MODEL = ModelConfig(
    vocab_size=VOCAB_SIZE,
    hidden_size=8,
    num_layers=1,
    num_heads=2,
    intermediate_size=8,
    max_position_embeddings=WINDOW,
    bos_token_id=BEGIN_ID,
    eos_token_id=END_ID,
)


def byte_tokenizer() -> bytes:
    """Give a tokenizer with one token a byte, behind three control tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate((*SPECIAL, *letters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return str(tokenizer.to_str()).encode()


def ids_of(text: str | bytes) -> list[int]:
    """Give the byte tokens of a text, which may be cut inside a character."""
    data = text.encode() if isinstance(text, str) else text
    words = Tokenizer.from_str(byte_tokenizer().decode()).get_vocab()
    # Latin-1 has a character a byte, and the alphabet writes each as it would that byte.
    letters = set(pre_tokenizers.ByteLevel.alphabet())
    printable = {letter for letter in letters if ord(letter) < 256}
    hidden = sorted(letters - printable)
    others = [byte for byte in range(256) if chr(byte) not in printable]
    written = {byte: chr(byte) for byte in range(256) if chr(byte) in printable}
    written |= dict(zip(others, hidden, strict=True))
    return [words[written[byte]] for byte in data]


def small_store(folder: Path, steps: Sequence[int] = (1,), **files: bytes) -> Path:
    """Write a store that can be served, one snapshot a step; `files` are meta shards by name."""
    with shardb.open(folder, create=True) as store:
        for step in steps:
            commit_step(store, step, **files)
            store.create_snapshot(f"step-{step}")
    return folder


def commit_step(store: shardb.Store, step: int, **files: bytes) -> shardb.Commit:
    """Commit a step whose one parameter shard is filled with the step's number."""
    small = {"model": json.dumps(MODEL.to_json()).encode(), "tokenizer": byte_tokenizer(), **files}
    with store.begin() as transaction:
        transaction.write("params/block_000", filled(step))
        for name, data in small.items():
            array = np.frombuffer(data, dtype=np.uint8)
            transaction.write(f"meta/{name}", {"json": array}, trainable=False)
        return transaction.commit(step=step, metrics={"loss": 4.0 - step / 10})
