"""The text of one preparation: its files, and which part of it is held out.

Owns the first pass over the text, which finds out what is there and decides the split, and hands
out the parts of later passes. It does not know tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import xxhash

from trainer.data.manifest import SourceEntry
from trainer.data.options import PrepareOptions
from trainer.data.progress import PrepareProgress
from trainer.data.sources import TextSources
from trainer.data.split import (
    Part,
    Scan,
    Splitter,
    WholeSplitter,
    choose_splitter,
    document_hash,
    scan_documents,
)
from trainer.errors import InputError

# A vocabulary does not get better with more text than this; the trainer's word table gets larger.
TRAINING_CHARACTERS_MAX: Final = 1 << 30


class Corpus:
    """Text files that were read once; `split_by` says how val is chosen."""

    def __init__(self, options: PrepareOptions, progress: PrepareProgress) -> None:
        self._text = TextSources("text", options.text, options.rules, progress)
        self._val_text = TextSources("val-text", options.val_text, options.rules, progress)
        self._seed = options.seed
        self._progress = progress
        progress.begin("reading", self.total_bytes)
        elsewhere = self._val_hashes()
        scan = Scan(val_fraction=options.val_fraction)
        scan_documents(self._text.pieces(), options.seed, scan)
        progress.end()
        if not scan.documents or (options.val_text and not elsewhere):
            raise _no_text(self._val_text if scan.documents else self._text)
        self.characters = scan.characters
        self._splitter: Splitter = (
            WholeSplitter(split="train", seed=options.seed, elsewhere=elsewhere)
            if options.val_text
            else choose_splitter(scan, options.seed)
        )

    @property
    def split_by(self) -> str:
        return self._splitter.name

    @property
    def text_bytes(self) -> int:
        """Stored bytes of the text files."""
        return self._text.total_bytes

    @property
    def total_bytes(self) -> int:
        """Stored bytes of all files."""
        return self._text.total_bytes + self._val_text.total_bytes

    @property
    def entries(self) -> tuple[SourceEntry, ...]:
        """What the manifest says of the files."""
        return self._text.entries + self._val_text.entries

    @property
    def bad_examples(self) -> list[str]:
        """Some of the lines that were left out, with the reason."""
        return self._text.bad_examples + self._val_text.bad_examples

    @property
    def documents_in_both(self) -> int:
        """Documents of the training files left out because the validation files have them."""
        return self._splitter.dropped_documents

    def text_parts(self) -> Iterator[Part]:
        """Read the text files once more."""
        return self._splitter.parts(self._text.pieces())

    def val_text_parts(self) -> Iterator[Part]:
        """Read the validation files, if there are any, once more."""
        return WholeSplitter(split="val", seed=self._seed).parts(self._val_text.pieces())

    def training_texts(self) -> Iterator[str]:
        """Yield the train split for a tokenizer: all of it, or an even sample of a huge one."""
        share = min(1.0, TRAINING_CHARACTERS_MAX / max(1, self.characters))
        limit = int(share * (1 << 64))
        for part in self.text_parts():
            is_taken = share == 1.0 or xxhash.xxh3_64_intdigest(part.text.encode()) < limit
            if part.split == "train" and is_taken:
                yield part.text

    def _val_hashes(self) -> frozenset[int]:
        return frozenset(
            document_hash(piece.text, self._seed)
            for piece in self._val_text.pieces()
            if piece.first
        )


def _no_text(sources: TextSources) -> InputError:
    if sources.bad_examples:
        return InputError(
            f"--{sources.role}: every line was left out, for instance: {sources.bad_examples[0]}"
        )
    return InputError(
        f"--{sources.role}: the files hold no text: nothing but white space was found"
    )
