"""`export-gguf` from beginning to end: read, check, write beside, read back, publish.

Owns the settings that the file carries and the order of the work. The file is written beside its
target, read back and compared with the store tensor by tensor, and renamed. Where llama.cpp is
installed (the package `llama_cpp`), a fresh process loads it too and has to give the store's
logits.
"""

from __future__ import annotations

import importlib.util
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import shardb
from export.gguf_layout import TYPES, GgufTensor, architecture_of, gguf_tensors, rope_factors
from export.gguf_tokenizer import GgufTokenizer, gguf_tokenizer
from export.hf_weights import check_values
from export.package_memory import peak_bytes
from export.package_publish import Draft, check_apart
from export.package_tensors import PackageTensor
from export.package_tokenizer import (
    PackageTokenizer,
    check_vocabulary,
    tokenizer_of_folder,
    tokenizer_of_store,
)
from export.package_weights import Weights, open_weights
from export.reference_logits import check_ids, stage_logits
from export.verify import BY_LLAMA_CPP, Check, check_verdict, compare, load_afresh
from shardb.extras import install
from trainer.errors import InputError
from trainer.model.config import ModelConfig

if TYPE_CHECKING:
    import gguf

# What bounds the values: norms stay f32, and q8_0 has scales in f16.
_RANGES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "F16"}
# Largest difference of logits, as a part of the largest one: llama.cpp rounds activations to 8 bits
# before a product with q8_0, and to the weights' form else.
_BOUND_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "bfloat16"}
SETTINGS_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufRequest:
    """What is asked for; `pre` names the way of cutting texts where it is not recognised."""

    store: str
    out: Path
    ref: str | None = None
    average: tuple[str, ...] = ()
    form: str = "f16"
    tokenizer: Path | None = None
    pre: str | None = None
    overwrite: bool = False
    allow_padded_vocabulary: bool = False
    allow_network: bool = False
    merge_into: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufReport:
    """What was made; `check` is llama.cpp's, None where it is not installed."""

    out: str
    step: int
    architecture: str
    form: str
    file_bytes: int
    sha256: str
    tokenizer: str
    peak_memory_bytes: int
    tensors_compared: int
    check: Check | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Give every field by name."""
        return asdict(self)


def export_gguf(request: GgufRequest) -> GgufReport:
    """Write the file; raises a ShardbError or OSError and leaves nothing behind."""
    if importlib.util.find_spec("gguf") is None:
        raise InputError(f"the package gguf is not installed: {install('gguf')}")
    from export.gguf_file import check_file, tensor_bytes, write_file

    if request.form not in TYPES:
        raise InputError(f"--type is {request.form!r}: choose from {', '.join(TYPES)}")
    check_apart(request.out, Path(request.store))
    with ExitStack() as stack:
        weights = stack.enter_context(
            open_weights(
                request.store,
                ref=request.ref,
                average=request.average,
                allow_network=request.allow_network,
                merge_into=request.merge_into,
            )
        )
        _check_native(weights)
        draft = Draft(request.out, is_directory=False, overwrite=request.overwrite)
        found, tokenizer = _tokenizer(request, weights)
        tensors = gguf_tensors(weights.model, request.form)
        check_values(weights, [_as_packaged(tensor) for tensor in tensors])
        stack.push(draft)
        draft.begin()
        size = sum(tensor_bytes(tensor) for tensor in tensors) + len(found.json_bytes) * 2
        draft.check_space(size + SETTINGS_BYTES)
        digest = write_file(
            draft.path,
            architecture_of(weights.model),
            lambda writer: _settle(writer, request, weights, found, tokenizer),
            tensors,
            _extras(weights.model),
            weights.read,
        )
        check_file(draft.path, tensors, weights.read)
        check = _check_by_llama_cpp(request, weights, found, draft.path)
        file_bytes = draft.path.stat().st_size
        draft.publish()
    return GgufReport(
        out=str(request.out),
        step=weights.commit.step,
        architecture=architecture_of(weights.model),
        form=request.form,
        file_bytes=file_bytes,
        sha256=digest,
        tokenizer=f"{tokenizer.model}, {tokenizer.pre}",
        peak_memory_bytes=peak_bytes(),
        tensors_compared=len(tensors),
        check=check,
        notes=found.notes,
    )


def _check_native(weights: Weights) -> None:
    # Its blocks are those of another project: their names and rotations would need a table each.
    if weights.model.hf_config:
        family = weights.source.model_type if weights.source is not None else "borrowed model"
        raise InputError(
            f"a {family} cannot be written as GGUF here: export-hf it, then use"
            " llama.cpp's own converter"
        )


def _tokenizer(request: GgufRequest, weights: Weights) -> tuple[PackageTokenizer, GgufTokenizer]:
    if request.tokenizer is not None:
        found = tokenizer_of_folder(request.tokenizer, weights.model)
    else:
        stored = tokenizer_of_store(weights.view, weights.model)
        if stored is None:
            raise InputError(
                "the store holds no tokenizer, and a GGUF file needs one: give --tokenizer DIR"
            )
        found = stored
    allow = request.allow_padded_vocabulary or weights.source is not None
    check_vocabulary(found, weights.model, allow_padded=allow)
    return found, gguf_tokenizer(found, weights.model.vocab_size, request.pre)


def _as_packaged(tensor: GgufTensor) -> PackageTensor:
    return PackageTensor(
        name=tensor.name,
        shard=tensor.shard,
        tensor=tensor.tensor,
        shape=tensor.shape,
        dtype=_RANGES[tensor.form],
    )


def _extras(model: ModelConfig) -> list[Any]:
    from export.gguf_file import Extra

    scaling = model.rope_scaling
    if scaling is None or scaling.kind != "llama3":
        return []
    return [Extra(name="rope_freqs.weight", values=rope_factors(model, scaling))]


def _settle(
    writer: gguf.GGUFWriter,
    request: GgufRequest,
    weights: Weights,
    found: PackageTokenizer,
    tokenizer: GgufTokenizer,
) -> None:
    from export.gguf_file import QUANTIZATION_VERSION, file_type, setting

    model, commit = weights.model, weights.commit
    writer.add_type("model")
    writer.add_name(request.out.stem)
    writer.add_file_type(file_type(request.form))
    writer.add_quantization_version(QUANTIZATION_VERSION)
    setting(writer, "shardb.version", shardb.__version__)
    setting(writer, "shardb.store", weights.store.format.store_id)
    setting(writer, "shardb.commits", ",".join(each.id for each in weights.commits))
    setting(writer, "shardb.step", commit.step)
    writer.add_vocab_size(model.vocab_size)
    writer.add_context_length(model.max_position_embeddings)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.num_layers)
    writer.add_feed_forward_length(model.intermediate_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(model.num_kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(model.rms_norm_eps)
    writer.add_rope_dimension_count(model.head_dim)
    writer.add_rope_freq_base(model.rope_theta)
    if model.rope_scaling_type == "linear":
        setting(writer, f"{architecture_of(model)}.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(model.rope_scaling_factor)
    _settle_tokenizer(writer, found, tokenizer)


def _settle_tokenizer(
    writer: gguf.GGUFWriter, found: PackageTokenizer, tokenizer: GgufTokenizer
) -> None:
    writer.add_tokenizer_model(tokenizer.model)
    writer.add_tokenizer_pre(tokenizer.pre)
    writer.add_token_list(list(tokenizer.tokens))
    writer.add_token_types(list(tokenizer.types))
    if tokenizer.scores:
        writer.add_token_scores(list(tokenizer.scores))
    if tokenizer.merges:
        writer.add_token_merges(list(tokenizer.merges))
    if found.special.bos is not None:
        writer.add_bos_token_id(found.special.bos)
    if found.special.eos is not None:
        writer.add_eos_token_id(found.special.eos)
    if found.special.pad is not None:
        writer.add_pad_token_id(found.special.pad)
    if tokenizer.unknown is not None:
        writer.add_unk_token_id(tokenizer.unknown)
    writer.add_add_bos_token(tokenizer.adds_bos)
    writer.add_add_eos_token(tokenizer.adds_eos)
    writer.add_add_space_prefix(tokenizer.adds_space)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)


def _check_by_llama_cpp(
    request: GgufRequest, weights: Weights, found: PackageTokenizer, path: Path
) -> Check | None:
    """Load the file with llama.cpp in a fresh process; VerificationError when it is another model.

    The difference is to the store's fp32 logits: llama.cpp's kernels at a form are its own.
    """
    if importlib.util.find_spec("llama_cpp") is None:
        return None
    ids_T = check_ids(weights.model, weights.commit.id, found.size)
    plan = {"tokenizer": found.json_bytes.decode()}
    loaded = load_afresh(path, ids_T, BY_LLAMA_CPP, plan)
    ours_TV = stage_logits(weights.model, weights.read, ids_T, torch.float32)
    dtype = _BOUND_DTYPES[request.form]
    verdict = compare(ours_TV, loaded.logits_TV, dtype)
    check_verdict(verdict, loaded, request.form)
    return Check(
        loader=loaded.loader,
        versions=loaded.versions,
        dtype=request.form,
        positions=verdict.positions,
        difference_max=verdict.difference_max,
        bit_equal=verdict.bit_equal,
        rounding_max=verdict.difference_max,
    )
