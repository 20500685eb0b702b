"""Packed files by hand: images of tensors, packed without a store around them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xxhash

from shardb import layout
from shardb.buffers import Bytes
from shardb.filesystem import RealFileSystem
from shardb.layout import Layout
from shardb.pack_codec import Compressors, packed_chunks, plan
from shardb.pack_format import Header, encode_header
from shardb.pack_reading import packed_content
from shardb.views import Array, specs_of


def image_of(tensors: Mapping[str, Array]) -> tuple[Layout, Bytes]:
    """The image that a store would write for these tensors."""
    placed = layout.build(specs_of(tensors))
    image = np.zeros(placed.size_bytes, dtype=np.uint8)
    image[: len(placed.header)] = np.frombuffer(placed.header, dtype=np.uint8)
    for name, array in tensors.items():
        start = placed.offsets[name]
        image[start : start + array.nbytes] = np.frombuffer(array.tobytes(), dtype=np.uint8)
    return placed, image


def weights(seed: int, items: int = 20_000, *, drift: float = 0.0) -> dict[str, Array]:
    """Tensors as training leaves them: normal numbers, moved a little by `drift`."""
    source = np.random.default_rng(seed)
    values = source.normal(0, 0.02, items).astype(np.float32)
    moved = values + drift * np.random.default_rng(seed + 1).normal(0, 1e-5, items)
    return {"weight": moved.astype(np.float32), "norm": np.ones(64, dtype=np.float32)}


def digest_of(image: Bytes) -> str:
    return xxhash.xxh3_128_hexdigest(image.data)


def write_object(directory: Path, image: Bytes) -> str:
    """Store an object whole; give its digest."""
    digest = digest_of(image)
    (directory / f"{digest}.safetensors").write_bytes(image.tobytes())
    return digest


def write_pack(
    directory: Path, placed: Layout, image: Bytes, base: Bytes | None = None, *, threads: int = 1
) -> Path:
    """Store an object packed, against a base where that gains something."""
    chosen = plan(placed, image, base, Compressors(1))
    base = base if chosen.needs_base else None
    chunks = list(packed_chunks(chosen, image, base, Compressors(1), threads=threads))
    header = Header(
        digest=digest_of(image),
        base=None if base is None else digest_of(base),
        bytes=len(image),
        segments=chosen.segments,
        lengths=np.array([len(plane) for planes in chunks for plane in planes], dtype=np.uint32),
    )
    path = directory / f"{header.digest}.pack"
    path.write_bytes(
        encode_header(header) + b"".join(plane for planes in chunks for plane in planes)
    )
    return path


def unpacked(path: Path, size_bytes: int, *, threads: int = 1) -> bytes:
    """What comes out of a packed file; its digest is not checked."""
    digest = path.name.split(".")[0]
    out = np.empty(size_bytes, dtype=np.uint8)
    files = RealFileSystem()
    with packed_content(files, str(path.parent), digest, size_bytes) as content:
        content.unpack_into(out, threads=threads)
    return out.tobytes()
