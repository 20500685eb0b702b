"""A small set of documents, and how tests prepare it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from trainer.data.options import PrepareOptions

END = "<|endoftext|>"
NOUNS = ["cat", "dog", "river", "tree", "stone", "king", "naïve élève", "猫"]
VERBS = ["sees", "likes", "finds", "paints", "hears"]


def story(number: int) -> str:
    draw = random.Random(number)
    return f"Story {number}.\n\n" + " ".join(
        f"The {draw.choice(NOUNS)} {draw.choice(VERBS)} the {draw.choice(NOUNS)}."
        for _ in range(draw.randrange(3, 30))
    )


STORIES = [story(number) for number in range(120)]


def write_text(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(f"{d}\n{END}\n" for d in documents), encoding="utf-8")
    return path


def options(text: Path, out: Path, **more: Any) -> PrepareOptions:
    chosen: dict[str, Any] = {"seq_len": 16, "vocab_size": 320, **more}
    return PrepareOptions(text=(text,), out=out, **chosen)


def files_of(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}
