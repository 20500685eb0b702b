"""Do files become the documents that stand in them, and is what is no text refused by place?"""

from __future__ import annotations

import json
import os
import re
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data import readers, source_bytes
from trainer.data.readers import (
    DocumentReader,
    Piece,
    ReadRules,
    document_pieces,
    json_lines,
    text_pieces,
    whole_lines,
)
from trainer.data.source_bytes import refuse_unreadable
from trainer.errors import InputError

END = "<|endoftext|>"
SKIP = ReadRules(skip_bad=True)


def documents(path: Path, rules: ReadRules | None = None) -> list[str]:
    return joined(DocumentReader(path, rules or ReadRules()).pieces())


def joined(pieces: Iterator[Piece]) -> list[str]:
    """Put pieces together and check that they are well formed."""
    found: list[str] = []
    is_open = False
    for piece in pieces:
        assert piece.first is not is_open
        found = [*found, piece.text] if piece.first else [*found[:-1], found[-1] + piece.text]
        is_open = not piece.last
    assert not is_open
    return found


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def packed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def test_does_a_document_end_at_the_separators_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", f"one\n\ntwo\n{END}\nthree\n{END}\n")
    assert documents(path) == ["one\n\ntwo", "three"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"a\n{END}\nb", ["a", "b"]),
        (f"a\n{END}\nb\n{END}", ["a", "b"]),
        (f"{END}\na\n{END}\n", ["a"]),
        (f"a{END}b{END}c", ["a", "b", "c"]),
        (f"a\n{END}  \nb", ["a", "b"]),
        (f"a\n{END}\n{END}\n \n\t\n{END}\nb\n", ["a", "b\n"]),
        ("plain text\nof two lines\n", ["plain text\nof two lines\n"]),
        ("a\r\nb\rc\n", ["a\nb\nc\n"]),
        (f"a\r\n{END}\r\nb", ["a", "b"]),
        (f"\ufeffa\n{END}\nb", ["a", "b"]),
        ("a\n<|endoftext|\nb", ["a\n<|endoftext|\nb"]),
        ("a\0b", ["a\0b"]),
        ("\n \n\t", []),
    ],
)
def test_is_every_layout_of_plain_text_read(text: str, expected: list[str], tmp_path: Path) -> None:
    assert documents(write(tmp_path / "a.txt", text)) == expected
    assert documents(write(tmp_path / "a.txt.zst", packed(text.encode()))) == expected
    assert documents(write(tmp_path / "no-suffix", text)) == expected


WORDS = st.sampled_from(
    ["ab", "é", "\n", "\n\n", " ", END, "\t", "猫", "<|endof", "text|>", "x" * 9]
)


@settings(max_examples=150, deadline=None)
@given(parts=st.lists(WORDS, max_size=60), cuts=st.lists(st.integers(1, 12), min_size=1))
def test_do_blocks_and_pieces_not_change_the_documents(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    blocks = split_by(text, cuts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "PIECE_CHARACTERS_MAX", 8)
        pieces = list(text_pieces(iter(blocks)))
        assert pieces == list(text_pieces(iter([text])))
    expected = re.split(r"\n?<\|endoftext\|>[ \t]{0,64}\n?", text)
    found = joined(iter(pieces))
    assert [d for d in found if d] == [d for d in expected if d]
    assert all(len(piece.text) <= 8 for piece in pieces)


def split_by(text: str, sizes: list[int]) -> list[str]:
    blocks, at = [], 0
    while at < len(text):
        size = sizes[len(blocks) % len(sizes)]
        blocks.append(text[at : at + size])
        at += size
    return blocks


@settings(max_examples=60, deadline=None)
@given(before=WORDS, text=st.text(alphabet="ab \n", max_size=80))
def test_do_equal_documents_have_equal_pieces_wherever_they_stand(before: str, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "PIECE_CHARACTERS_MAX", 8)
        alone = list(document_pieces(text))
        after = list(text_pieces(iter([before + END, text + END, "z"])))
    if not text.endswith("\n") and not text.startswith((" ", "\n")):
        assert after[-1 - len(alone) : -1] == alone


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(alphabet="aé猫😀\n\r", max_size=80), cuts=st.lists(st.integers(1, 9), min_size=1)
)
def test_are_lines_regrouped_without_breaking_characters(text: str, cuts: list[int]) -> None:
    data = text.encode()
    blocks = [data[at : at + 5] for at in range(0, len(data), 5)]
    offset, line = 0, 1
    for found_offset, found_line, block in whole_lines(iter(blocks), longest=cuts[0]):
        assert (found_offset, found_line) == (offset, line)
        block.decode()
        offset += len(block)
        line += block.count(b"\n")
    assert offset == len(data)


BAD_UTF8 = b"first line\nsecond \xe9 line\nthird\n"


def test_is_text_that_is_not_utf8_refused_with_line_and_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "latin.txt", BAD_UTF8)
    with pytest.raises(InputError, match=r"latin\.txt: line 2, byte 18: not UTF-8 \(byte 0xe9\)"):
        documents(path)
    assert path.read_bytes()[18] == 0xE9


def test_is_the_byte_of_packed_text_that_of_the_unpacked(tmp_path: Path) -> None:
    path = write(tmp_path / "latin.txt.zst", packed(BAD_UTF8))
    with pytest.raises(InputError, match="line 2, byte 18 of the unpacked text: not UTF-8"):
        documents(path)


def test_is_a_bad_line_far_inside_found(tmp_path: Path) -> None:
    good = "good line é\n".encode()
    count = 3 * source_bytes.BLOCK_BYTES // len(good)
    path = write(tmp_path / "a.txt", good * count + b"\xff" + good)
    with pytest.raises(InputError, match=f"line {count + 1:,}, byte {count * len(good):,}: not"):
        documents(path)


@pytest.mark.parametrize(
    "tail", [b"\xff", b"\xc3", b"\xe7\x8c", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80"]
)
def test_is_every_kind_of_bad_utf8_refused_or_left_out(tail: bytes, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"good\n" + tail)
    with pytest.raises(InputError, match="line 2, byte 5"):
        documents(path)
    reader = DocumentReader(path, SKIP)
    assert joined(reader.pieces()) == ["good\n"]
    assert reader.bad_lines == 1
    assert "line 2, byte 5" in reader.bad_examples[0]


def test_are_bad_lines_left_out_and_counted_when_asked(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", BAD_UTF8 * 10 + f"{END}\nend".encode())
    reader = DocumentReader(path, SKIP)
    assert joined(reader.pieces()) == [("first line\nthird\n" * 10).removesuffix("\n"), "end"]
    assert reader.bad_lines == 10
    assert len(reader.bad_examples) == readers.BAD_EXAMPLES_MAX


def record(**fields: object) -> str:
    return json.dumps(fields) + "\n"


def test_is_a_json_line_a_document(tmp_path: Path) -> None:
    text = record(text="one\r\ntwo", id=1) + "\n  \n" + record(text=f"with {END} inside")
    expected = ["one\r\ntwo", f"with {END} inside"]
    assert documents(write(tmp_path / "a.jsonl", text)) == expected
    assert documents(write(tmp_path / "a.jsonl.zst", packed(text.encode()))) == expected
    assert documents(write(tmp_path / "mark.jsonl", "\ufeff" + text)) == expected
    assert documents(write(tmp_path / "open.jsonl", text.rstrip("\n"))) == expected


def test_is_another_field_taken_when_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", record(story="x", text="y"))
    assert documents(path, ReadRules(text_field="story")) == ["x"]


BROKEN_RECORDS = {
    '{"text": "cut of': "not valid JSON",
    "{text: 1}": "not valid JSON",
    '{"text": "a"} {"text": "b"}': "not valid JSON",
    '["text"]': "not a JSON object",
    '"text"': "not a JSON object",
    "null": "not a JSON object",
    '{"body": "x"}': r'no field "text" \(fields: body\)',
    "{}": r'no field "text" \(fields: none\)',
    '{"text": null}': 'field "text" is NoneType',
    '{"text": 5}': 'field "text" is int',
    '{"text": ["a"]}': 'field "text" is list',
    '{"text": "\\ud800"}': "half a surrogate pair",
    '{"text": "a\nb"}': "not valid JSON",
    "[" * 100_000: "not valid JSON",
    "9" * 10_000: "",
}


@pytest.mark.parametrize("broken", BROKEN_RECORDS, ids=lambda text: text[:20])
def test_is_a_broken_json_line_refused_or_left_out(broken: str, tmp_path: Path) -> None:
    text = record(text="good") + broken + "\n" + record(text="also good")
    path = write(tmp_path / "a.jsonl", text)
    with pytest.raises(
        InputError, match=r"a\.jsonl: line 2: .*" + BROKEN_RECORDS[broken]
    ) as caught:
        documents(path)
    assert "mend the line, or use --skip-bad" in str(caught.value)
    reader = DocumentReader(path, SKIP)
    assert joined(reader.pieces()) == ["good", "also good"]
    assert reader.bad_lines == (2 if "\n" in broken else 1)
    assert reader.documents == 2


def test_is_a_json_line_that_is_not_utf8_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", record(text="ok").encode() + b'{"text": "\xff"}\n')
    with pytest.raises(InputError, match="line 2, byte 25: not UTF-8"):
        documents(path)
    assert path.read_bytes()[25] == 0xFF


def test_is_a_json_line_without_end_not_kept_in_memory() -> None:
    blocks = [b"x" * 100] * 50 + [b"\nshort\n", b"y" * 99]
    found = list(json_lines(iter(blocks), longest=120))
    assert found == [(0, 1, None), (5001, 2, b"short\n"), (5007, 3, b"y" * 99)]


def test_are_packed_frames_read_one_after_another(tmp_path: Path) -> None:
    skippable = struct.pack("<II", 0x184D2A50, 4) + b"skip"
    data = packed(b"one ") + packed("zwölf ".encode()) + skippable + packed(b"three")
    assert documents(write(tmp_path / "a.txt.zst", data)) == ["one zwölf three"]
    assert documents(write(tmp_path / "named-otherwise.txt", data)) == ["one zwölf three"]


def test_is_a_cut_or_damaged_archive_refused_not_taken_for_its_end(tmp_path: Path) -> None:
    whole = packed(bytes(range(32, 127)) * 3000 + str(list(range(30_000))).encode())
    for length in (len(whole) - 1, len(whole) // 2, 9):
        path = write(tmp_path / "cut.txt.zst", whole[:length])
        with pytest.raises(InputError, match=r"cut\.txt\.zst: the zstd data is cut off"):
            documents(path, SKIP)
    middle = len(whole) // 2
    path = write(tmp_path / "bad.txt.zst", whole[:middle] + b"\xff" * 40 + whole[middle + 40 :])
    with pytest.raises(InputError, match=r"bad\.txt\.zst: damaged zstd data"):
        documents(path)
    path = write(tmp_path / "tail.txt.zst", whole + b"rubbish behind it")
    with pytest.raises(InputError, match="damaged zstd data"):
        documents(path)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.txt.gz", b"\x1f\x8b\x08rest", "gzip data"),
        ("a.zip", b"PK\x03\x04rest", "zip archive"),
        ("a.xz", b"\xfd7zXZ\x00rest", "xz data"),
        ("a.bz2", b"BZh9rest", "bzip2 data"),
        ("a.parquet", b"PAR1rest", "Parquet"),
        ("a.npy", b"\x93NUMPYrest", "numpy array"),
        ("a.pdf", b"%PDF-1.7", "PDF"),
        ("utf16.txt", "text".encode("utf-16"), "UTF-16"),
        ("a.txt.zst", b"plain text", "not zstd data"),
    ],
)
def test_is_another_format_named(name: str, data: bytes, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=reason):
        documents(write(tmp_path / name, data))


def test_is_what_cannot_be_read_twice_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    write(tmp_path / "empty.txt", "")
    reasons = {
        "missing.txt": "no such file",
        ".": "a directory",
        "pipe": "can be read only once",
        "empty.txt": "the file is empty",
    }
    for name, reason in reasons.items():
        with pytest.raises(InputError, match=reason):
            refuse_unreadable(tmp_path / name)


def test_are_counts_and_digest_those_of_the_stored_file(tmp_path: Path) -> None:
    data = packed(f"a\n{END}\nb\n{END}\n".encode())
    seen: list[int] = []
    reader = DocumentReader(write(tmp_path / "a.txt.zst", data), ReadRules(), seen.append)
    assert len(joined(reader.pieces())) == reader.documents == 2
    assert reader.source.digest == xxhash.xxh3_128_hexdigest(data)
    assert reader.source.byte_count == sum(seen) == len(data)


def test_does_memory_not_grow_with_a_document(tmp_path: Path) -> None:
    text = " ".join(str(number * number) for number in range(1_000_000))
    for name, data in (("a.txt", text.encode()), ("a.txt.zst", packed(text.encode()))):
        reader = DocumentReader(write(tmp_path / name, data), ReadRules())
        tracemalloc.start()
        characters = sum(len(piece.text) for piece in reader.pieces())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert (reader.documents, characters) == (1, len(text))
        # A line longer than a block is held up to a mebibyte; nothing else is.
        assert peak < 6 << 20 < len(text)


def test_are_the_shared_corpora_read_to_their_documented_counts(shared_data: Path) -> None:
    reader = DocumentReader(
        shared_data / "corpora" / "tinystories-sample.valid.txt.zst", ReadRules()
    )
    found = joined(reader.pieces())
    assert len(found) == 299
    assert sum(map(len, found)) + 299 * len(f"\n{END}\n") == 259_431
