"""What the search and the long run train on, cut from the rows of an unpacked parcel.

Owns how often a mixture meets each corpus, the sample of rows that a small run has, and the two
halves of the held-out text: one chooses steps and recipes, the other is what they are told for.
Knows nothing of training. Invariants: a document of the held-out text is in one half alone; a
sample is the same rows whichever mixture they are for; held-out rows are never trained on.

A set: SET/train (as `train` meets it), SET/val (the half that chooses), and SET/report, which is a
set of held-out rows alone, as `tools.evidence_package` reads it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tools.evidence_rows import (
    FACTS_NAME,
    MIXTURE,
    Rows,
    read_rows,
    rows_of,
    stream_of,
    write_rows,
)
from trainer.data.manifest import TOKENIZER_NAME

Range = tuple[int, int]

# How often a pass meets each corpus; one that is not named is met once.
MIXTURES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "steep": MIXTURE,
        "even": {},
        "twice": {
            "tinystories-sample": 2,
            "stories-llama31": 2,
            "scenes-llama31": 2,
            "storybooks-ccby": 2,
        },
        "stories": {
            "tinystories-sample": 4,
            "stories-llama31": 4,
            "scenes-llama31": 4,
            "storybooks-ccby": 4,
            "books-classic": 0,
        },
    }
)
# Rows of the half that chooses: whole batches, however large a run's batches are.
WHOLE_ROWS = 64
SAMPLE_SEED = 0


def make_set(data: Path, out: Path, mixture: str, parts: int) -> dict[str, Any]:
    """Write a set of one part in `parts` of the rows; give the tokens of a pass by corpus."""
    facts = json.loads((data / FACTS_NAME).read_text())
    seq_len = facts["seq_len"]
    sampled = {
        name: sample(rows, parts) for name, rows in distinct(data, _ranges(facts["train"])).items()
    }
    times = {name: MIXTURES[mixture].get(name, 1) for name in sampled}
    passed = [rows for name, rows in sampled.items() for _ in range(times[name])]
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    write_rows(out / "train", np.concatenate(passed))
    choosing = _write_held_out(data, out, facts)
    return {
        "mixture": mixture,
        "parts": parts,
        "times": times,
        "distinct_tokens": {name: len(rows) * seq_len for name, rows in sampled.items()},
        "pass_tokens": sum(len(rows) for rows in passed) * seq_len,
        "choosing_rows": choosing,
    }


def distinct(data: Path, ranges: Mapping[str, Range]) -> dict[str, Rows]:
    """Give each corpus' training rows once: an unpacked parcel repeats them."""
    rows = read_rows(data / "train")
    found, first = {}, 0
    for name, (begin, end) in ranges.items():
        found[name] = rows[first : first + end - begin]
        first += (end - begin) * MIXTURE.get(name, 1)
    assert first == len(rows), f"{data}: not the mixture that a parcel gives"
    return found


def sample(rows: Rows, parts: int) -> Rows:
    """Give one part of the rows, at least one row, drawn alike whenever it is asked for."""
    if parts == 1:
        return rows
    count = max(1, len(rows) // parts)
    drawn = np.random.default_rng(SAMPLE_SEED).permutation(len(rows))[:count]
    return rows[np.sort(drawn)]


def halves(rows: Rows, ranges: Mapping[str, Range], end_id: int) -> list[dict[str, Rows]]:
    """Give the held-out rows of every other document, and of the others, corpus by corpus.

    A document counts to the corpus in whose rows it ends.
    """
    seq_len = rows.shape[1] - 1
    stream = stream_of(rows)
    ends = np.flatnonzero(stream == end_id) + 1
    documents = list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))
    found: list[dict[str, Rows]] = [{}, {}]
    for name, (begin, end) in ranges.items():
        of_corpus = [
            (number, stream[first:last])
            for number, (first, last) in enumerate(documents)
            if begin <= (last - 1) // seq_len < end
        ]
        for half in (0, 1):
            ids = [each for number, each in of_corpus if number % 2 == half]
            if ids:
                found[half][name] = rows_of(np.concatenate(ids), seq_len)
    return found


def _write_held_out(data: Path, out: Path, facts: Mapping[str, Any]) -> int:
    """Write both halves and what else is held out; give the rows of the half that chooses."""
    held = read_rows(data / "val")
    choosing, reporting = halves(held, _ranges(facts["val"]), facts["end_of_text_id"])
    rows = np.concatenate(list(choosing.values()))
    whole = len(rows) // WHOLE_ROWS * WHOLE_ROWS or len(rows)
    write_rows(out / "val", rows[:whole])
    report = out / "report"
    report.mkdir()
    other = dict(_split(read_rows(data / "other"), _ranges(facts["other"])))
    other |= {"chosen-by": rows[:whole], "both-halves": held[: len(held) // 64 * 64]}
    told = {split: _ranged(each) for split, each in (("val", reporting), ("other", other))}
    write_rows(report / "val", np.concatenate(list(reporting.values())))
    write_rows(report / "other", np.concatenate(list(other.values())))
    (report / FACTS_NAME).write_text(json.dumps({**facts, **told}))
    for folder in (out, report):
        shutil.copyfile(data / TOKENIZER_NAME, folder / TOKENIZER_NAME)
    return whole


def _split(rows: Rows, ranges: Mapping[str, Range]) -> list[tuple[str, Rows]]:
    return [(name, rows[first:last]) for name, (first, last) in ranges.items()]


def _ranged(corpora: Mapping[str, Rows]) -> dict[str, Range]:
    found, first = {}, 0
    for name, rows in corpora.items():
        found[name] = (first, first + len(rows))
        first += len(rows)
    return found


def _ranges(told: Mapping[str, Any]) -> dict[str, Range]:
    return {name: (int(first), int(last)) for name, (first, last) in told.items()}
