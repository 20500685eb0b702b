"""The text of the evidence: token rows that travel in one small file, and how a run mixes them.

    python -m tools.evidence_rows pack DATA OTHER PARCEL ROWS   what `train-data prepare` made
    python -m tools.evidence_rows unpack PARCEL OUT             OUT/train, OUT/val, OUT/other, …
    python -m tools.evidence_rows overlap DATA                  is text of val in train?

Owns the parcel and the mixture: each corpus' rows, as often as MIXTURE says, so that 3,000 steps
meet stories several times and the classics once. Knows nothing of training. Invariant: the rows of
a corpus that come out of a parcel are those that `prepare` wrote, and held-out rows are never
repeated or mixed into train. OTHER is a set whose val split holds further held-out texts; of DATA's
training rows the first ROWS are taken, so that the last corpus makes the mixture as long as wanted.
"""

from __future__ import annotations

import io
import json
import lzma
import shutil
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.manifest import MANIFEST_NAME, TOKENIZER_NAME, Manifest, load_manifest

# How often each corpus is met, by the name of its file; a corpus that is not named is met once.
MIXTURE = {
    "tinystories-sample": 6,
    "stories-llama31": 5,
    "scenes-llama31": 4,
    "storybooks-ccby": 4,
    "books-children": 2,
    "books-classic": 1,
}
# Ids of 16 bits: pairs of bytes, of which the upper one says little.
FILTERS = [
    {
        "id": lzma.FILTER_LZMA2,
        "preset": 9 | lzma.PRESET_EXTREME,
        "dict_size": 1 << 26,
        "lc": 3,
        "lp": 1,
        "pb": 1,
    }
]
BLOCK_IDS = 1 << 23
FACTS_NAME = "facts.json"
ROWS_PER_FILE = 1 << 16
OVERLAP_TOKENS = 13

Rows = NDArray[np.uint16]


def read_rows(folder: Path) -> Rows:
    """Read every row of a folder of .npy files: [rows, L + 1]."""
    return np.concatenate([np.load(path) for path in sorted(folder.glob("*.npy"))])


def stream_of(rows: Rows) -> Rows:
    """Give the ids of neighbouring rows, which share one, as one stream."""
    return np.concatenate([rows[0, :1], rows[:, 1:].reshape(-1)])


def rows_of(stream: Rows, seq_len: int) -> Rows:
    """Cut a stream into rows that share one id with their neighbours."""
    count = (len(stream) - 1) // seq_len
    windows = np.lib.stride_tricks.sliding_window_view(stream, seq_len + 1)
    return np.ascontiguousarray(windows[::seq_len][:count])


def corpora(manifest: Manifest, rows: Rows, role: str) -> dict[str, tuple[int, int]]:
    """Give the first and last + 1 row of each corpus, by the ends of its documents."""
    stream = stream_of(rows)
    ends = np.flatnonzero(stream == manifest.end_of_text_id)
    found, documents, first = {}, 0, 0
    for source in manifest.sources:
        if source.role != role:
            continue
        documents += source.documents
        is_last = documents > len(ends)
        # A row that holds the end of one corpus and the begin of the next counts to the first.
        last = len(rows) if is_last else int(ends[documents - 1]) // manifest.seq_len + 1
        last = min(last, len(rows))
        found[source.name.split(".")[0]] = (first, last)
        first = last
    return found


def pack(data: Path, other: Path, parcel: Path, row_limit: int) -> dict[str, Any]:
    """Write the data sets of `prepare` into one compressed file."""
    manifest, others = _manifest(data), _manifest(other)
    rows = {split: read_rows(data / split) for split in ("train", "val")}
    rows["train"] = rows["train"][:row_limit]
    rows["other"] = read_rows(other / "val")
    facts = {
        "seq_len": manifest.seq_len,
        "end_of_text_id": manifest.end_of_text_id,
        "train": corpora(manifest, rows["train"], "text"),
        "val": corpora(manifest, rows["val"], "val-text"),
        "other": corpora(others, rows["other"], "val-text"),
    }
    with tarfile.open(parcel, "w") as tar:
        for name in (MANIFEST_NAME, TOKENIZER_NAME):
            _add(tar, f"{name}.xz", lzma.compress((data / name).read_bytes()))
        _add(tar, FACTS_NAME, json.dumps(facts).encode())
        for split, each in rows.items():
            stream = stream_of(each)
            blocks = [stream[at : at + BLOCK_IDS] for at in range(0, len(stream), BLOCK_IDS)]
            with ThreadPoolExecutor() as pool:
                for number, packed in enumerate(pool.map(_compressed, blocks)):
                    _add(tar, f"{split}-{number:03d}.xz", packed)
    return facts


def unpack(parcel: Path, out: Path) -> dict[str, Any]:
    """Write the mixture and the held-out rows of a parcel; give the tokens of each corpus."""
    members = _members(parcel)
    facts = json.loads(members.pop(FACTS_NAME))
    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor() as pool:
        opened = dict(zip(members, pool.map(lzma.decompress, members.values()), strict=True))
    # Not under its own name: it describes rows before they are mixed.
    (out / "prepared-manifest.json").write_bytes(opened[f"{MANIFEST_NAME}.xz"])
    (out / TOKENIZER_NAME).write_bytes(opened[f"{TOKENIZER_NAME}.xz"])
    (out / FACTS_NAME).write_text(json.dumps(facts))
    rows = {}
    for split in ("train", "val", "other"):
        parts = [opened[name] for name in sorted(opened) if name.startswith(f"{split}-")]
        rows[split] = rows_of(np.frombuffer(b"".join(parts), np.uint16), facts["seq_len"])
    mixed = np.concatenate(
        [
            rows["train"][first:last]
            for name, (first, last) in facts["train"].items()
            for _ in range(MIXTURE.get(name, 1))
        ]
    )
    for split, each in {**rows, "train": mixed}.items():
        write_rows(out / split, each)
    tokens = {n: (last - first) * facts["seq_len"] for n, (first, last) in facts["train"].items()}
    return {
        "tokens": tokens,
        "times": {name: MIXTURE.get(name, 1) for name in tokens},
        "mixture_tokens": len(mixed) * facts["seq_len"],
        "distinct_tokens": len(rows["train"]) * facts["seq_len"],
        "validation_rows": len(rows["val"]),
        "end_of_text_id": facts["end_of_text_id"],
    }


def overlap(data: Path) -> dict[str, Any]:
    """Say how much of the validation text is in the training text, 13 tokens at a time.

    A validation token counts as seen when a run of 13 tokens that holds it is in train too.
    """
    manifest = _manifest(data)
    held = read_rows(data / "val")
    stream = stream_of(held)
    hashes = _hashes(stream)
    kinds, kind_of = np.unique(hashes, return_inverse=True)
    is_met = np.zeros(len(kinds), bool)
    train = stream_of(read_rows(data / "train"))
    for first in range(0, len(train) - OVERLAP_TOKENS + 1, BLOCK_IDS):
        block = _hashes(train[first : first + BLOCK_IDS + OVERLAP_TOKENS - 1])
        at = np.minimum(np.searchsorted(kinds, block), len(kinds) - 1)
        is_met[at[kinds[at] == block]] = True
    is_known = is_met[kind_of]
    seen = np.zeros(len(stream), bool)
    for start in range(OVERLAP_TOKENS):
        seen[start : start + len(is_known)] |= is_known
    ends = np.flatnonzero(stream == manifest.end_of_text_id)
    shares = [float(part.mean()) for part in np.split(seen, ends + 1) if len(part)]
    places = corpora(manifest, held, "val-text")
    return {
        "validation_tokens": len(stream),
        "seen_by_corpus": {
            name: float(seen[first * manifest.seq_len : last * manifest.seq_len].mean())
            for name, (first, last) in places.items()
        },
        "seen_share": float(seen.mean()),
        "documents": len(shares),
        "documents_above_half_seen": sum(share > 0.5 for share in shares),
        "documents_above_tenth_seen": sum(share > 0.1 for share in shares),
        "documents_in_both": manifest.documents_in_both,
    }


def _hashes(stream: Rows) -> NDArray[np.uint64]:
    """Give a hash of every run of OVERLAP_TOKENS ids."""
    count = len(stream) - OVERLAP_TOKENS + 1
    found = np.zeros(count, np.uint64)
    for place in range(OVERLAP_TOKENS):
        found *= np.uint64(0x9E3779B97F4A7C15)
        found ^= stream[place : place + count].astype(np.uint64) + np.uint64(1)
        found ^= found >> np.uint64(29)
    return found


def write_rows(folder: Path, rows: Rows) -> None:
    """Write rows as files that `train` reads, in place of what the folder held."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number, first in enumerate(range(0, len(rows), ROWS_PER_FILE)):
        np.save(folder / f"rows-{number:03d}.npy", rows[first : first + ROWS_PER_FILE])


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def _members(parcel: Path) -> dict[str, bytes]:
    found = {}
    with tarfile.open(parcel) as tar:
        for entry in tar:
            member = tar.extractfile(entry)
            assert member is not None, f"{entry.name} is no file"
            found[entry.name] = member.read()
    return found


def _compressed(ids: Rows) -> bytes:
    return lzma.compress(ids.tobytes(), lzma.FORMAT_XZ, filters=FILTERS)


def _manifest(data: Path) -> Manifest:
    manifest = load_manifest(data / MANIFEST_NAME)
    assert manifest is not None, f"{data} holds no manifest"
    return manifest


def main(words: list[str]) -> int:
    """Do one of the three; 2 for other words."""
    if words[:1] == ["pack"] and len(words) == 5:
        found = pack(Path(words[1]), Path(words[2]), Path(words[3]), int(words[4]))
    elif words[:1] == ["unpack"] and len(words) == 3:
        found = unpack(Path(words[1]), Path(words[2]))
    elif words[:1] == ["overlap"] and len(words) == 2:
        found = overlap(Path(words[1]))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    print(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
