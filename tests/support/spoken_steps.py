"""A store of steps that each say something else, letter by letter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import shardb
from tests.support.byte_model import END_ID, VOCAB_SIZE, byte_tokenizer, ids_of
from tests.support.scripted_store import followers_of, write_scripted_store


def write_spoken_steps(root: Path, said: Mapping[int, Sequence[str]], *, window: int = 256) -> Path:
    """Commit and pin each step of `said`, whose texts tell which letter comes after which."""
    for step, texts in said.items():
        write_scripted_store(
            root,
            followers_of(*map(ids_of, texts)),
            vocab_size=VOCAB_SIZE,
            window=window,
            eos_token_id=END_ID,
            tokenizer=byte_tokenizer(),
            step=step,
        )
        with shardb.open(root) as opened:
            opened.create_snapshot(f"step-{step}")
    return root
