"""Does the doctor name what is wrong with a GGUF file, within bounds whatever its header says?"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from export.doctor_findings import ERROR, NOTE, WARNING, Finding
from export.doctor_gguf_header import MalformedGgufError, read_gguf_header
from export.doctor_run import examine
from export.gguf_export import GgufRequest, export_gguf
from tests.support.ailing import MODEL
from tests.support.exports import byte_tokenizer, make_store

gguf = pytest.importorskip("gguf", reason="pip install '.[test]'")
TOKENS = [f"t{index}" for index in range(8)]
SIZES: dict[str, Any] = {
    "context_length": 16,
    "embedding_length": 32,
    "block_count": 1,
    "feed_forward_length": 32,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.key_length": 16,
    "rope.freq_base": 10000.0,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES = {
    "token_embd.weight": (8, 32),
    "output_norm.weight": (32,),
    "blk.0.attn_norm.weight": (32,),
    "blk.0.ffn_norm.weight": (32,),
    "blk.0.attn_q.weight": (32, 32),
    "blk.0.attn_k.weight": (16, 32),
    "blk.0.attn_v.weight": (16, 32),
    "blk.0.attn_output.weight": (32, 32),
    "blk.0.ffn_gate.weight": (32, 32),
    "blk.0.ffn_up.weight": (32, 32),
    "blk.0.ffn_down.weight": (32, 32),
}


class Parts(NamedTuple):
    settings: dict[str, Any]
    tensors: dict[str, Any]


Change = Callable[[Parts], Any]


def write(path: Path, change: Change) -> Path:
    """Write a small file; `change` gets what will be in it."""
    settings: dict[str, Any] = {f"llama.{key}": value for key, value in SIZES.items()}
    settings |= {
        "general.file_type": 0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [1] * len(TOKENS),
        "tokenizer.ggml.eos_token_id": 0,
    }
    tensors = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    change(Parts(settings, tensors))
    writer = gguf.GGUFWriter(path, settings.pop("general.architecture", "llama"))
    for key, value in settings.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[
                type(value)
            ](key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def findings_of(path: Path) -> list[Finding]:
    return list(examine(path).findings)


def test_is_nothing_said_of_a_sound_file(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", MODEL, tokenizer=byte_tokenizer(300))
    for form in ("f32", "bf16", "q8_0"):
        file = tmp_path / f"{form}.gguf"
        export_gguf(GgufRequest(store=str(store), out=file, form=form))
        examined = examine(file)
        assert list(examined.findings) == []
        assert examined.exit_code == 0
        shapes = [entry.shape for entry in read_gguf_header(file).tensors.values()]
        assert examined.values_read == sum(math.prod(shape) for shape in shapes)
        assert {t.name for t in gguf.GGUFReader(file).tensors} == read_gguf_header(
            file
        ).tensors.keys()
    assert findings_of(write(tmp_path / "own.gguf", lambda _: None)) == []


def put(name: str, value: Any) -> Change:
    return lambda p: p.settings.update({name: value})


def take(name: str) -> Change:
    return lambda p: p.settings.pop(name)


Q = "blk.0.attn_q.weight"
CASES: dict[str, tuple[Change, str, str, str]] = {
    "missing tensor": (lambda p: p.tensors.pop(Q), ERROR, Q, "missing"),
    "renamed tensor": (
        lambda p: p.tensors.update({"blk.0.attn_qq.weight": p.tensors.pop(Q)}), ERROR, Q, "attn_qq",
    ),
    "strange tensor": (
        lambda p: p.tensors.update(ghost=np.ones(3, np.float32)), ERROR, "ghost", "not of this",
    ),
    "heads": (put("llama.attention.head_count", 4), ERROR, Q, "[32, 64]"),
    "kv heads": (
        put("llama.attention.head_count_kv", 2), ERROR, "blk.0.attn_k.weight", "[32, 32]",
    ),
    "many blocks": (put("llama.block_count", 1 << 31), ERROR, "", "more tensors are missing"),
    "no sizes": (take("llama.embedding_length"), ERROR, "llama.embedding_length", "missing"),
    "vocabulary": (
        lambda p: p.settings["tokenizer.ggml.tokens"].append("x"), ERROR,
        "token_embd.weight", "[32, 9]",
    ),
    "token types": (
        lambda p: p.settings["tokenizer.ggml.token_type"].append(1), ERROR,
        "tokenizer.ggml.token_type", "9 entries for 8",
    ),
    "twins": (
        put("tokenizer.ggml.tokens", ["a"] * 8), ERROR, "tokenizer.ggml.tokens", "twice",
    ),
    "no cutting": (take("tokenizer.ggml.pre"), ERROR, "tokenizer.ggml.pre", "silently"),
    "no tokenizer": (take("tokenizer.ggml.model"), ERROR, "tokenizer.ggml.tokens", "no tokenizer"),
    "end": (
        put("tokenizer.ggml.eos_token_id", 8), ERROR, "tokenizer.ggml.eos_token_id", "8 tokens",
    ),
    "no end": (
        take("tokenizer.ggml.eos_token_id"), NOTE, "tokenizer.ggml.eos_token_id", "may not end",
    ),
    "file type": (put("general.file_type", 1), WARNING, "general.file_type", "the tensors are F32"),
    "theta": (take("llama.rope.freq_base"), NOTE, "llama.rope.freq_base", "10000"),
    "another architecture": (
        put("general.architecture", "mamba"), NOTE, "general.architecture", "mamba",
    ),
    "overflow": (
        lambda p: p.tensors.update({Q: np.full((32, 32), np.inf, np.float16)}), ERROR, Q,
        "1024 infinite",
    ),
    "NaN": (lambda p: p.tensors[Q].__setitem__((0, 0), np.nan), ERROR, Q, "1 NaN"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_is_it_found_with_its_place(case: str, tmp_path: Path) -> None:
    change, grade, field, words = CASES[case]
    found = [f for f in findings_of(write(tmp_path / "x.gguf", change)) if f.field == field]
    assert [f.severity for f in found][:1] == [grade]
    assert words in found[0].what


def test_is_a_file_that_others_cannot_read_told(tmp_path: Path) -> None:
    file = write(tmp_path / "x.gguf", lambda _: None)
    os.chmod(file, 0o600)
    [finding] = findings_of(file)
    assert (finding.field, finding.severity) == ("mode", WARNING)


def header(tensors: int = 0, settings: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, settings) + rest


KEY = struct.pack("<Q", 1) + b"k"
HOSTILE = {
    "nothing": b"GGUF",
    "version": header(version=99),
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "tensors without end": header(tensors=1 << 60),
    "settings without end": header(settings=1 << 60),
    "a long key": header(settings=1, rest=struct.pack("<Q", 1 << 40) + bytes(20)),
    "a long string": header(settings=1, rest=KEY + struct.pack("<IQ", 8, 1 << 50) + bytes(20)),
    "a long array": header(settings=1, rest=KEY + struct.pack("<IIQ", 9, 4, 1 << 50) + bytes(20)),
    "deep arrays": header(
        settings=1, rest=KEY + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50 + bytes(20)
    ),
    "an unknown kind": header(settings=1, rest=KEY + struct.pack("<I", 77) + bytes(20)),
    "a setting twice": header(settings=2, rest=(KEY + struct.pack("<II", 4, 1)) * 2 + bytes(20)),
    "many sizes": header(tensors=1, rest=KEY + struct.pack("<I", 1 << 30) + bytes(40)),
    "beyond the file": header(
        tensors=1, rest=KEY + struct.pack("<IQIQ", 1, 1 << 40, 0, 0) + bytes(64)
    ),
    "a huge product": header(
        tensors=1, rest=KEY + struct.pack("<I4QIQ", 4, *[1 << 62] * 4, 0, 0) + bytes(64)
    ),
    "an odd place": header(tensors=1, rest=KEY + struct.pack("<IQIQ", 1, 1, 0, 3) + bytes(64)),
    "overlapping": header(
        tensors=2,
        rest=b"".join(
            struct.pack("<Q", 1) + name + struct.pack("<IQIQ", 1, 16, 0, 32)
            for name in (b"a", b"b")
        )
        + bytes(256),
    ),
    "the same name": header(
        tensors=2,
        rest=b"".join(KEY + struct.pack("<IQIQ", 1, 8, 0, at) for at in (0, 32)) + bytes(256),
    ),
    "a broken block": header(tensors=1, rest=KEY + struct.pack("<IQIQ", 1, 33, 8, 0) + bytes(99)),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_is_a_hostile_header_a_finding(case: str, tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(HOSTILE[case])
    with pytest.raises(MalformedGgufError):
        read_gguf_header(file)
    [finding] = findings_of(file)
    assert finding.severity == ERROR


def test_is_a_truncated_file_found_wherever_it_ends(tmp_path: Path) -> None:
    file = write(tmp_path / "x.gguf", lambda _: None)
    data = file.read_bytes()
    for size in (*range(4, 400, 13), len(data) // 2, len(data) - 64):
        file.write_bytes(data[:size])
        assert [f.severity for f in findings_of(file)] == [ERROR], size
