"""How small packing makes real training state, and how fast: by kind of tensor and way of packing.

Takes two or more retained commits of a run and packs the tensors of the newest one, all parameters
together, all first moments, all second moments. Ways: zstd over the bytes as they are; byte planes;
the difference to an older commit in byte planes; and what `shardb pack` would choose. Ratios are
whole to packed. Speeds are megabytes of the object for a second of processor time, one thread, best
of the rounds: other work on the machine changes them less than it changes the clock on the wall.

Usage: python -m tools.bench.pack_ratio --store RUN --step 60 --older 59 50 [--level 1 3]
           [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import xxhash
import zstandard

import shardb
from shardb import layout
from shardb.buffers import Bytes
from shardb.filesystem import RealFileSystem
from shardb.layout import Layout, TensorSpec
from shardb.pack_codec import Compressors, packed_chunks, plan
from shardb.pack_format import CHUNK_BYTES, Header, encode_header
from shardb.pack_reading import packed_content
from shardb.views import ShardView

KINDS = ("parameters", "first moment", "second moment")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement; speeds in megabytes a second of processor time."""

    kind: str
    way: str
    level: int
    whole_bytes: int
    packed_bytes: int
    pack_speed: float
    unpack_speed: float

    @property
    def ratio(self) -> float:
        return self.whole_bytes / self.packed_bytes


def kind_of(shard: str, tensor: str) -> str | None:
    """What a tensor of a training run is."""
    if shard.startswith("params/"):
        return KINDS[0]
    if shard.startswith("optim/"):
        return KINDS[2] if tensor.endswith("exp_avg_sq") else KINDS[1]
    return None


def gather(store: shardb.Store, step: int, kind: str) -> tuple[Layout, Bytes]:
    """All tensors of a kind in one image, in the order of the shards."""
    specs: dict[str, TensorSpec] = {}
    parts: dict[str, Bytes] = {}
    with store.at(step=step) as view:
        for shard in view.names():
            found: ShardView = view.read(shard)
            for tensor, spec in found.specs.items():
                if kind_of(shard, tensor) == kind:
                    specs[f"{shard}/{tensor}"] = spec
                    parts[f"{shard}/{tensor}"] = found.raw(tensor).copy()
    placed = layout.build(specs)
    image = np.zeros(placed.size_bytes, dtype=np.uint8)
    image[: len(placed.header)] = np.frombuffer(placed.header, dtype=np.uint8)
    for name, part in parts.items():
        image[placed.offsets[name] : placed.offsets[name] + len(part)] = part
    return placed, image


class Bench:
    """One kind of tensor of one step, packed in every way."""

    def __init__(
        self, kind: str, image: tuple[Layout, Bytes], level: int, rounds: int, directory: Path
    ) -> None:
        self._kind = kind
        self._layout, self._image = image
        self._level = level
        self._rounds = rounds
        self._directory = directory

    def rows(self, older: dict[int, Bytes], step: int) -> Iterator[Row]:
        yield self._raw()
        yield self._packed("planes", self._image, None)
        for base_step, base in older.items():
            behind = f"{step - base_step} {'step' if step - base_step == 1 else 'steps'} before"
            yield self._packed(f"XOR with {behind}, planes", self._image ^ base, None)
            yield self._packed(f"as packed, base {behind}", self._image, base)

    def _raw(self) -> Row:
        """zstd over chunks of the bytes as they are: what a file system would give."""
        packer = zstandard.ZstdCompressor(level=self._level)
        unpacker = zstandard.ZstdDecompressor()
        starts = range(0, len(self._image), CHUNK_BYTES)
        frames = [packer.compress(self._image[s : s + CHUNK_BYTES].data) for s in starts]

        def pack() -> None:
            for start in starts:
                packer.compress(self._image[start : start + CHUNK_BYTES].data)

        def unpack() -> None:
            for frame in frames:
                unpacker.decompress(frame)

        return self._row("zstd alone", sum(map(len, frames)), pack, unpack)

    def _packed(self, way: str, image: Bytes, base: Bytes | None) -> Row:
        compressors = Compressors(self._level)

        def pack() -> list[list[memoryview]]:
            chosen = plan(self._layout, image, base, compressors)
            return list(packed_chunks(chosen, image, base, compressors, threads=1))

        chunks, chosen = pack(), plan(self._layout, image, base, compressors)
        digest = xxhash.xxh3_128_hexdigest(image.data)
        base_digest = None
        if base is not None and chosen.needs_base:
            base_digest = xxhash.xxh3_128_hexdigest(base.data)
            (self._directory / f"{base_digest}.safetensors").write_bytes(base.data)
        lengths = np.array([len(plane) for planes in chunks for plane in planes], dtype=np.uint32)
        header = Header(
            digest=digest,
            base=base_digest,
            bytes=len(image),
            segments=chosen.segments,
            lengths=lengths,
        )
        front = encode_header(header)
        path = self._directory / f"{digest}.pack"
        path.write_bytes(front + b"".join(plane for planes in chunks for plane in planes))
        out, files = np.empty_like(image), RealFileSystem()

        def unpack() -> None:
            directory = str(self._directory)
            with packed_content(files, directory, digest, len(image)) as content:
                content.unpack_into(out, threads=1)

        row = self._row(way, path.stat().st_size, pack, unpack)
        assert np.array_equal(out, image), "what was packed comes out again"
        return row

    def _row(
        self, way: str, packed_bytes: int, pack: Callable[[], object], unpack: Callable[[], object]
    ) -> Row:
        return Row(
            kind=self._kind,
            way=way,
            level=self._level,
            whole_bytes=len(self._image),
            packed_bytes=packed_bytes,
            pack_speed=len(self._image) / 1e6 / self._seconds(pack),
            unpack_speed=len(self._image) / 1e6 / self._seconds(unpack),
        )

    def _seconds(self, act: Callable[[], object]) -> float:
        """Processor time of the fastest round."""
        best = float("inf")
        for _ in range(self._rounds):
            began = time.process_time()
            act()
            best = min(best, time.process_time() - began)
        return best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--store", required=True, help="a store with retained training steps")
    parser.add_argument("--step", type=int, required=True, help="the step that is packed")
    parser.add_argument("--older", type=int, nargs="+", default=[], help="steps to compare with")
    parser.add_argument("--level", type=int, nargs="+", default=[1], help="levels of zstd")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where the rows are written too")
    options = parser.parse_args()
    rows: list[Row] = []
    with shardb.open(options.store) as store, tempfile.TemporaryDirectory() as directory:
        for kind in KINDS:
            image = gather(store, options.step, kind)
            older = {step: gather(store, step, kind)[1] for step in options.older}
            for level in options.level:
                bench = Bench(kind, image, level, options.rounds, Path(directory))
                for row in bench.rows(older, options.step):
                    rows.append(row)
                    print_row(row)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def print_row(row: Row) -> None:
    """One line of a Markdown table."""
    print(
        f"| {row.kind} | {row.way} | {row.level} | {row.ratio:.3f} | {row.pack_speed:,.0f} | "
        f"{row.unpack_speed:,.0f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
