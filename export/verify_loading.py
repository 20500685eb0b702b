"""Loading a package as a stranger would: by transformers, or by this project's stages.

Owns what the fresh process does; `verify` starts it. Knows nothing of stores. A loader gives the
logits of some ids, the versions it used, and every fault it can name: tensors that were not found,
ids or texts on which tokenizer and configuration disagree.

Shapes: T positions, V vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from export.package_reading import PackageShards
from export.package_tensors import TORCH_DTYPES, PackageTensor
from export.package_tokenizer import TEMPLATE_FILE, TOKENIZER_FILE
from export.reference_logits import stage_logits
from trainer.model.config import ModelConfig

# What tokenizers disagree on: spaces, line ends, digits, letters outside ASCII, control tokens.
SAMPLES = (
    "Once upon a time, there was a naïve élève named Lily.",
    "  two leading spaces,\n\nan empty line\tand a tab ",
    "1234567890 + 3.14159 = x² → 猫 🙂",
    "<|endoftext|> </s> KING HENRY.\nDon't they'll we've I'm",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Logits [T, V] in fp32, the versions of what computed them, faults.

    disagreements: between tokenizer and configuration; an imported package may have come with them.
    """

    logits_TV: Tensor
    versions: Mapping[str, str]
    faults: Sequence[str] = field(default=())
    disagreements: Sequence[str] = field(default=())


def by_transformers(folder: Path, ids_T: Tensor) -> Outcome:
    """Load model and tokenizer with the Auto classes, from the folder alone."""
    import transformers

    version: str = transformers.__version__
    chosen = "dtype" if int(version.split(".")[0]) >= 5 else "torch_dtype"
    loading: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        local_files_only=True,
        output_loading_info=True,
        **{chosen: "auto"},
    )
    model, info = loading
    model.eval()
    with torch.no_grad():
        logits_TV = model(ids_T[None]).logits[0].float()
    faults = [f"{kind}: {sorted(map(str, info[kind]))}" for kind in info if info[kind]]
    has_tokenizer = (folder / TOKENIZER_FILE).is_file()
    return Outcome(
        logits_TV=logits_TV,
        versions={
            "transformers": version,
            # `sdpa` in every family that knows it; Gemma2 computes attention step by step.
            "attention": str(model.config._attn_implementation),
            "torch": torch.__version__,
        },
        faults=faults,
        disagreements=_disagreements(folder, model) if has_tokenizer else (),
    )


def by_stages(folder: Path, ids_T: Tensor, plan: Mapping[str, Any]) -> Outcome:
    """Read the package's tensors and pass the ids through this project's own stages."""
    tensors = [
        PackageTensor(**{**entry, "shape": tuple(entry["shape"])}) for entry in plan["tensors"]
    ]
    shards = PackageShards(folder, tensors)
    dtype = TORCH_DTYPES[plan["dtype"]]
    logits_TV = stage_logits(ModelConfig.from_json(plan["model"]), shards.read, ids_T, dtype)
    return Outcome(logits_TV=logits_TV, versions={"torch": torch.__version__})


def by_llama_cpp(path: Path, ids_T: Tensor, plan: Mapping[str, Any]) -> Outcome:
    """Load a GGUF file with llama.cpp; its tokenizer must give the ids of the one in `plan`."""
    llama_cpp: Any = importlib.import_module("llama_cpp")
    model = llama_cpp.Llama(
        model_path=str(path),
        n_ctx=len(ids_T),
        n_batch=len(ids_T),
        n_gpu_layers=0,
        n_threads=torch.get_num_threads(),
        logits_all=True,
        # Keys and values are kept in f16 by default.
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )
    model.eval(ids_T.tolist())
    logits_TV = torch.from_numpy(model.scores[: len(ids_T)].copy())
    faults = []
    if plan["tokenizer"] is not None:
        faults = _other_ids(model, Tokenizer.from_str(plan["tokenizer"]))
    return Outcome(
        logits_TV=logits_TV, versions={"llama_cpp": llama_cpp.__version__}, faults=faults
    )


def _other_ids(model: Any, plain: Tokenizer) -> list[str]:
    # What stands in a text as a control token is text to one of them and a token to the other.
    return [
        f"the file's tokenizer gives other ids for {text!r} than tokenizer.json"
        for text in SAMPLES
        if "<|endoftext|>" not in text
        and model.tokenize(text.encode(), add_bos=False, special=False)
        != plain.encode(text, add_special_tokens=False).ids
    ]


def _disagreements(folder: Path, model: Any) -> list[str]:
    import transformers

    loaded = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    plain = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
    found = [
        f"the tokenizer gives other ids for {text!r} than its tokenizer.json"
        for text in SAMPLES
        for special in (False, True)
        if loaded.encode(text, add_special_tokens=special)
        != plain.encode(text, add_special_tokens=special).ids
    ]
    for role in ("bos", "eos", "pad"):
        named = f"{role}_token_id"
        places = {
            "tokenizer": getattr(loaded, named),
            "config.json": getattr(model.config, named, None),
            "generation_config.json": getattr(model.generation_config, named, None),
        }
        if len(set(map(str, places.values()))) > 1:
            found.append(f"{named} differs: {places}")
    if (folder / TEMPLATE_FILE).is_file() and not loaded.chat_template:
        found.append("the chat template is not found by its reader")
    return found
