"""Make a Hugging Face package of a GGUF file of the Llama family, its weights dequantised.

    python -m tools.gguf_to_hf model.gguf --out package [--dtype bf16] [--tokenizer tokenizer.json]

Owns the names and the layout of Llama in GGUF: rows of queries and keys lie in pairs there, and in
halves here. Needs the `gguf` package. The tokenizer is not converted: give its tokenizer.json.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    """Parse the command line and convert."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--tokenizer", type=Path)
    asked = parser.parse_args()
    convert(asked.gguf, asked.out, dtype=asked.dtype, tokenizer=asked.tokenizer)
    print(f"{asked.out}: made from {asked.gguf}")


def convert(gguf_file: Path, out: Path, *, dtype: str = "bf16", tokenizer: Path | None) -> None:
    """Write the package's files into the folder `out`, which is made."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    _check_places(out, tokenizer)
    reader = GGUFReader(gguf_file)
    config = hf_config(reader, dtype)
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name, _, suffix = tensor.name.rpartition(".")
        heads = {
            "attn_q": config["num_attention_heads"],
            "attn_k": config["num_key_value_heads"],
        }.get(name.rpartition(".")[2])
        if heads is not None:
            values = halves_of_pairs(values, heads)
        tensors[f"{hf_name(name)}.{suffix}"] = torch.from_numpy(values.copy()).to(DTYPES[dtype])
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2))
    if tokenizer is not None:
        (out / "tokenizer.json").write_bytes(tokenizer.read_bytes())


def _check_places(out: Path, tokenizer: Path | None) -> None:
    """Refuse before the work what would end it half done."""
    if tokenizer is not None and not tokenizer.is_file():
        raise SystemExit(f"error: --tokenizer {tokenizer}: not a file; give a tokenizer.json")
    if out.exists():
        raise SystemExit(f"error: --out {out}: exists; give the name of a folder to be made")


def hf_config(reader: Any, dtype: str) -> dict[str, Any]:
    """Translate the file's description of itself."""

    def value(name: str, default: Any = None) -> Any:
        field = reader.fields.get(name)
        return default if field is None else field.contents()

    architecture = value("general.architecture")
    if architecture != "llama":
        raise SystemExit(f"error: the architecture is {architecture!r}: only llama is converted")
    heads = value("llama.attention.head_count")
    width = value("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": value("llama.vocab_size"),
        "hidden_size": width,
        "num_hidden_layers": value("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": value("llama.attention.head_count_kv", heads),
        "head_dim": value("llama.rope.dimension_count", width // heads),
        "intermediate_size": value("llama.feed_forward_length"),
        "max_position_embeddings": value("llama.context_length"),
        "rope_theta": value("llama.rope.freq_base", 10000.0),
        # Stored in fp32, meant as written: 1e-05 and not 9.999999747378752e-06.
        "rms_norm_eps": float(f"{value('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": value("tokenizer.ggml.padding_token_id"),
        "torch_dtype": {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[dtype],
    }


def hf_name(name: str) -> str:
    """Give a tensor's name, without its last part, in a Hugging Face package."""
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", name)
    if block is None:
        return OUTER_NAMES[name]
    return f"model.layers.{block[1]}.{BLOCK_NAMES[block[2]]}"


def halves_of_pairs(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder each head's rows from pairs (0, 1), (2, 3) to halves: even ones, then odd ones."""
    width = rows.shape[0] // heads
    return rows.reshape(heads, width // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


if __name__ == "__main__":
    main()
