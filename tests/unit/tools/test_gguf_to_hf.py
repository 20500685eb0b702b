"""Is a GGUF file turned into the package that it was made of?"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from export.import_run import plan_import
from tools.gguf_to_hf import BLOCK_NAMES, OUTER_NAMES, convert, halves_of_pairs

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def pairs_of_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder as converters to GGUF do."""
    width = rows.shape[0] // heads
    return rows.reshape(heads, 2, width // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, tensors: dict[str, np.ndarray], architecture: str = "llama") -> Path:
    from gguf import GGUFWriter

    writer = GGUFWriter(path, architecture)
    writer.add_vocab_size(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_feed_forward_length(48)
    writer.add_context_length(128)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def named_tensors() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Give random tensors by their names in a package, and the same by their names in a file."""
    draw = np.random.default_rng(3)
    query, key = HEADS * WIDTH, KV_HEADS * WIDTH
    shapes = {
        "attn_norm": (32,),
        "attn_q": (query, 32),
        "attn_k": (key, 32),
        "attn_v": (key, 32),
        "attn_output": (32, query),
        "ffn_norm": (32,),
        "ffn_gate": (48, 32),
        "ffn_up": (48, 32),
        "ffn_down": (32, 48),
    }
    package, file = {}, {}
    for short, name in BLOCK_NAMES.items():
        values = draw.normal(size=shapes[short]).astype(np.float32)
        package[f"model.layers.0.{name}.weight"] = values
        heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(short)
        stored = values if heads is None else pairs_of_halves(values, heads)
        file[f"blk.0.{short}.weight"] = np.ascontiguousarray(stored)
    for short, name in OUTER_NAMES.items():
        shape = (32,) if short == "output_norm" else (64, 32)
        package[f"{name}.weight"] = draw.normal(size=shape).astype(np.float32)
        file[f"{short}.weight"] = package[f"{name}.weight"]
    return package, file


@pytest.mark.parametrize("tied", [False, True])
def test_are_the_tensors_those_of_the_package(tied: bool, tmp_path: Path) -> None:
    package, file = named_tensors()
    if tied:
        del package["lm_head.weight"], file["output.weight"]
    convert(write_gguf(tmp_path / "m.gguf", file), tmp_path / "p", dtype="fp32", tokenizer=None)
    found = load_file(tmp_path / "p" / "model.safetensors")
    assert found.keys() == package.keys()
    for name, values in package.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    config = json.loads((tmp_path / "p" / "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 5000.0)
    assert config["tie_word_embeddings"] is tied
    assert len(plan_import(tmp_path / "p").places) == len(package)


def test_is_another_order_of_rows_another_model() -> None:
    rows = np.arange(16, dtype=np.float32)[:, None]
    assert not np.array_equal(halves_of_pairs(rows, 2), rows)
    np.testing.assert_array_equal(halves_of_pairs(pairs_of_halves(rows, 2), 2), rows)


def test_is_another_architecture_refused(tmp_path: Path) -> None:
    _, file = named_tensors()
    path = write_gguf(tmp_path / "m.gguf", file, architecture="gemma")
    with pytest.raises(SystemExit, match="gemma"):
        convert(path, tmp_path / "p", tokenizer=None)
    assert not (tmp_path / "p").exists()


def test_is_a_wrong_place_refused_before_the_work(tmp_path: Path) -> None:
    """A folder given as the tokenizer was noticed once the weights were written."""
    path = write_gguf(tmp_path / "m.gguf", named_tensors()[1])
    for tokenizer in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(SystemExit, match=r"not a file; give a tokenizer\.json"):
            convert(path, tmp_path / "p", tokenizer=tokenizer)
        assert not (tmp_path / "p").exists()
    (tmp_path / "kept").mkdir()
    with pytest.raises(SystemExit, match="kept: exists"):
        convert(path, tmp_path / "kept", tokenizer=None)
    assert list((tmp_path / "kept").iterdir()) == []
