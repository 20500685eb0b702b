"""Is the packed file in the document one that the store reads, and still writes?"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from shardb.pack_format import read_header
from tests.support.packs import digest_of, image_of, unpacked, write_pack

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "file-format.md"
LINE = re.compile(r"^([0-9a-f]{8})  ((?:[0-9a-f]{2} {1,2}){16})", re.MULTILINE)


def documented() -> bytes:
    """The bytes of the example."""
    text = DOCUMENT.read_text().split("A packed file of 16,384 numbers")[1].split("```")[1]
    lines = LINE.findall(text)
    assert [int(at, 16) for at, _ in lines] == list(range(0, 0x80, 16))
    return bytes.fromhex("".join(part for _, part in lines))


def test_is_the_example_read_as_the_document_says() -> None:
    example = documented()

    def read(start: int, length: int) -> bytes:
        return example[start : start + length]

    digest = example[32:48].hex()
    header = read_header(read, path="x", digest=digest, object_bytes=69_632, file_bytes=5_980)
    assert header.base is None
    assert [(s.bytes, s.item_bytes, s.is_delta) for s in header.segments] == [
        (4096, 1, False),
        (65_536, 4, False),
    ]
    assert header.lengths.tolist() == [120, 3573, 362, 1771, 38]


def test_is_that_object_still_packed_and_read_alike(tmp_path: Path) -> None:
    placed, image = image_of({"w": np.linspace(0, 1, 16_384, dtype=np.float32)})
    path = write_pack(tmp_path, placed, image)
    example = documented()
    # What zstd makes of a plane is its own affair, and so are the lengths and the checksum.
    assert path.read_bytes()[:24] + path.read_bytes()[32:0x60] == example[:24] + example[32:0x60]
    assert unpacked(path, len(image)) == image.tobytes()
    assert path.stem == digest_of(image) == example[32:48].hex()
