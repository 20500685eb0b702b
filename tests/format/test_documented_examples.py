"""Are the examples in docs/file-format.md what the code writes, and its tables complete?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardb import format as store_format
from shardb import frames, layout, pack_format, records
from shardb.layout import ITEM_BITS, TensorSpec
from shardb.records import RECORD_KINDS
from shardb.state import TABLES

ID = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def document(repository: Path) -> str:
    return (repository / "docs" / "file-format.md").read_text()


def example(document: str, name: str) -> str:
    """The fenced block behind a marker."""
    found = re.search(rf"<!-- example: {name} -->\n```\w+\n(.*?)```", document, re.DOTALL)
    assert found, f"no example {name!r}"
    return found.group(1)


def hex_dump(data: bytes) -> str:
    lines = (f"{at:04x}  {data[at : at + 16].hex(' ')}\n" for at in range(0, len(data), 16))
    return "".join(lines)


def test_is_the_frame_what_the_code_writes(document: str) -> None:
    record = {"kind": "note", "id": ID, "time": 1.5, "text": "hello"}
    payload = records.pack(record)
    data, _ = frames.encode(lsn=2, previous=bytes(range(16)), payload=payload)
    assert example(document, "frame") == hex_dump(data)


def test_can_the_documented_frame_be_read(document: str) -> None:
    lines = example(document, "frame").splitlines()
    data = bytes.fromhex("".join(line[4:] for line in lines))
    found = frames.decode(memoryview(data), 0)
    assert found is not None
    assert records.unpack(found.payload)["text"] == "hello"


def test_is_format_what_the_code_writes(document: str) -> None:
    told = example(document, "FORMAT")
    assert told.encode() == store_format.encode_format(ID)
    assert store_format.decode_format(told.encode(), "FORMAT").version == 1


def test_is_the_header_what_the_code_writes(document: str) -> None:
    built = layout.build(
        {"weight": TensorSpec(dtype="F32", shape=(2, 3)), "step": TensorSpec(dtype="I64", shape=())}
    )
    assert example(document, "header").strip().encode() == built.header[8:].rstrip()
    assert "4,128 bytes, with data from byte 4,096 on" in document
    assert (built.size_bytes, len(built.header)) == (4128, 4096)


def test_is_every_record_kind_in_the_table(document: str) -> None:
    rows = document.split("## Records")[1].split("A commit:")[0]
    assert {word for word in re.findall(r"`(\w+)`", rows) if word in RECORD_KINDS} == RECORD_KINDS


def test_is_every_table_and_data_type_named(document: str) -> None:
    index = document.split("## The index")[1]
    assert all(f"`{table}`" in index for table in TABLES)
    [types] = re.findall(r"Data types: ([^.]+)\.", document)
    assert set(types.replace("\n", " ").split(", ")) == set(ITEM_BITS)


def test_is_every_field_of_a_commit_in_the_table(document: str) -> None:
    commit = document.split("A commit:")[1].split("The `state` of")[0]
    named = set(re.findall(r"^\| `(\w+)` \|", commit, re.MULTILINE))
    assert named - {"rolled_up"} == set(records.Commit.__dataclass_fields__) - {"id", "time"}


@pytest.mark.parametrize(
    "fact",
    [
        f"header of {frames.HEADER_BYTES} bytes",
        f"magic `{frames.MAGIC.decode()}`",
        f"magic `{pack_format.MAGIC.decode()}`",
        f"at most {store_format.FORMAT_LIMIT_BYTES:,} bytes",
        f"at most {layout.DIMENSIONS_MAX} whole numbers",
        f"at most {layout.HEADER_LIMIT_BYTES:,} bytes",
        f"multiple of {layout.DATA_ALIGNMENT_BYTES:,}",
    ],
)
def test_are_the_numbers_those_of_the_code(document: str, fact: str) -> None:
    assert fact in " ".join(document.split())
