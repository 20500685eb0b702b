"""A GGUF file, as a doctor looks at it: settings against tensors, tokenizer against both.

Owns what llama.cpp needs of the architectures `llama`, `qwen2` and `qwen3`; of others the tokenizer
and the values alone are looked at. Knows nothing of the format's bytes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from export.doctor_files import mode_finding
from export.doctor_findings import NAMED_MAX, Finding, Place, few
from export.doctor_gguf_header import GgufHeader, MalformedGgufError, read_gguf_header
from export.doctor_values import Extent, not_finite

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_NEEDED = (
    *("context_length", "embedding_length", "block_count", "feed_forward_length"),
    *("attention.head_count", "attention.layer_norm_rms_epsilon"),
)
_HEAD, _EMBEDDINGS = "output.weight", "token_embd.weight"
_FILE_TYPES: Mapping[int, str] = {0: "F32", 1: "F16", 2: "Q4_0", 7: "Q8_0", 32: "BF16"}


def gguf_findings(path: Path) -> tuple[GgufHeader | None, list[Finding], int]:
    """Look at a file; gives its header, findings, and how many values were looked at."""
    place = Place(file=path.name)
    try:
        header = read_gguf_header(path)
    except MalformedGgufError as error:
        return None, [place.error("", str(error), "fetch or export the file again")], 0
    found = [*mode_finding(path), *_settings(place, header), *_tokens(place, header)]
    values, looked = not_finite(
        Extent(
            name=entry.name, path=path, offset=entry.offset, bytes=entry.bytes or 0, form=entry.form
        )
        for entry in header.tensors.values()
    )
    return header, [*found, *values], looked


def _settings(place: Place, header: GgufHeader) -> Iterator[Finding]:
    name = header.settings.get("general.architecture")
    if not isinstance(name, str):
        remedy = "write it again: nobody can load this"
        yield place.error("general.architecture", "it is missing", remedy)
        return
    if name not in ARCHITECTURES:
        what = f"{name} is none of {', '.join(ARCHITECTURES)}: tensors were not compared with it"
        yield place.note("general.architecture", what)
        return
    told = {
        key.removeprefix(f"{name}."): value
        for key, value in header.settings.items()
        if key.startswith(f"{name}.")
    }
    missing = [key for key in _NEEDED if not _is_number(told.get(key))]
    for key in missing:
        yield place.error(f"{name}.{key}", "it is missing", "convert the model again")
    if told.get("rope.freq_base") is None:
        what = "it is left out: llama.cpp takes 10000"
        yield place.note(f"{name}.rope.freq_base", what, "write it")
    yield from _file_type(place, header)
    if not missing:
        yield from _tensors(place, header, name, told)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1 << 32


def _file_type(place: Place, header: GgufHeader) -> Iterator[Finding]:
    told = _FILE_TYPES.get(header.settings.get("general.file_type", -1))
    forms = sorted({entry.form for entry in header.tensors.values()})
    if told is not None and forms and told not in forms:
        what = f"it says {told}, and the tensors are {', '.join(forms)}"
        yield place.warning("general.file_type", what, "convert the model again")


def _tensors(
    place: Place, header: GgufHeader, name: str, told: Mapping[str, Any]
) -> Iterator[Finding]:
    wanted = _wanted(header, name, told)
    found = header.tensors
    optional = {key for key in found if key == "rope_freqs.weight" or key.endswith(".bias")}
    missing = sorted(wanted.keys() - found.keys() - {_HEAD})
    extra = sorted(found.keys() - wanted.keys() - optional)
    renamed: set[str] = set()
    for key in missing[:NAMED_MAX]:
        near = difflib.get_close_matches(key, extra, 1, 0.75)
        renamed.update(near)
        what = "it is missing" + (f"; {near[0]} is there instead" if near else "")
        yield place.error(key, what, "convert the model again")
    if len(missing) > NAMED_MAX:
        what = f"{len(missing) - NAMED_MAX} more tensors are missing"
        yield place.error("", what, "convert the model again")
    strange = [key for key in extra if key not in renamed]
    if strange:
        what = f"{len(strange)} tensors are not of this architecture: {few(strange)}"
        yield place.error(strange[0], what, "convert the model again")
    wrong = [key for key, shape in wanted.items() if key in found and found[key].shape != shape]
    for key in wrong[:NAMED_MAX]:
        what = f"it has shape {list(found[key].shape)}, the settings ask for {list(wanted[key])}"
        yield place.error(key, what, "see head_count, head_count_kv, key_length, vocab_size")


def _wanted(header: GgufHeader, name: str, told: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Give the shapes that the settings ask for, the fastest size first."""
    hidden, heads = told["embedding_length"], told["attention.head_count"]
    wide, groups = told["feed_forward_length"], told.get("attention.head_count_kv", heads)
    size = told.get("attention.key_length", hidden // heads)
    tokens = header.settings.get("tokenizer.ggml.tokens")
    rows = len(tokens) if isinstance(tokens, list) else told.get("vocab_size", 0)
    wanted = {_EMBEDDINGS: (hidden, rows), "output_norm.weight": (hidden,), _HEAD: (hidden, rows)}
    block = {
        "attn_norm": (hidden,), "ffn_norm": (hidden,),
        "attn_q": (hidden, heads * size), "attn_k": (hidden, groups * size),
        "attn_v": (hidden, groups * size), "attn_output": (heads * size, hidden),
        "ffn_gate": (hidden, wide), "ffn_up": (hidden, wide), "ffn_down": (wide, hidden),
    }  # fmt: skip
    if name == "qwen3":
        block |= {"attn_q_norm": (size,), "attn_k_norm": (size,)}
    # A hostile number of blocks is told as missing tensors, and not looped over.
    blocks = min(int(told["block_count"]), len(header.tensors) + 1)
    for index in range(blocks):
        wanted |= {f"blk.{index}.{key}.weight": shape for key, shape in block.items()}
    return wanted


def _tokens(place: Place, header: GgufHeader) -> Iterator[Finding]:
    settings = header.settings
    tokens, kind = settings.get("tokenizer.ggml.tokens"), settings.get("tokenizer.ggml.model")
    if not isinstance(tokens, list) or not isinstance(kind, str):
        what = "the file carries no tokenizer: llama.cpp cannot read or write texts with it"
        yield place.error("tokenizer.ggml.tokens", what, "convert it with its tokenizer")
        return
    for name in ("scores", "token_type"):
        values = settings.get(f"tokenizer.ggml.{name}")
        if isinstance(values, list) and len(values) != len(tokens):
            what = f"it has {len(values)} entries for {len(tokens)} tokens"
            yield place.error(f"tokenizer.ggml.{name}", what, "convert the model again")
    if kind == "gpt2" and not settings.get("tokenizer.ggml.pre"):
        what = "it is missing: llama.cpp cuts texts in its default way, and ids differ silently"
        yield place.error("tokenizer.ggml.pre", what, "write it, such as gpt-2")
    if kind == "gpt2" and not settings.get("tokenizer.ggml.merges"):
        yield place.error("tokenizer.ggml.merges", "it is missing", "convert the model again")
    for role in ("bos", "eos", "padding", "unknown"):
        number = settings.get(f"tokenizer.ggml.{role}_token_id")
        if type(number) is int and number >= len(tokens):
            what = f"it is {number}, and there are {len(tokens)} tokens"
            yield place.error(f"tokenizer.ggml.{role}_token_id", what, "convert the model again")
    if settings.get("tokenizer.ggml.eos_token_id") is None:
        what = "it is left out: llama.cpp takes a default, and texts may not end"
        yield place.note("tokenizer.ggml.eos_token_id", what)
    if len(set(tokens)) != len(tokens):
        what = f"{len(tokens) - len(set(tokens))} tokens are there twice"
        yield place.error("tokenizer.ggml.tokens", what, "convert the model again")
