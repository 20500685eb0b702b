"""What an export will make, known before a byte is written.

Owns the request, the choice of tokenizer and configuration, and the order of the checks: each of
them raises with the flag to change. Knows nothing of directories or processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export.hf_config import SpecialIds, build_config, build_generation_config, family_name
from export.hf_weights import Rounding, WeightFile, check_values, split_into_files
from export.package_tensors import (
    TORCH_NAMES,
    PackageTensor,
    package_tensors,
    prevailing_dtype,
)
from export.package_tokenizer import (
    PackageTokenizer,
    check_vocabulary,
    is_of_qwen2,
    tokenizer_of_folder,
    tokenizer_of_store,
    with_chat_template,
)
from export.package_weights import PACKED, Weights
from trainer.errors import InputError

# Configuration, card and manifest; the tokenizer is counted apart.
SMALL_FILES_BYTES = 1 << 20
MANIFEST_BYTES_A_TENSOR = 1 << 10
MERGED_INTO_PACKED = (
    "the adapters are merged into the base as it was packed in nf4, which they were trained on"
)
NO_TOKENIZER = "neither the store nor --tokenizer DIR gave a tokenizer, so the package has none"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportRequest:
    """What is asked for; `dtype` None keeps the form of an import, and is fp32 else."""

    store: str
    out: Path
    ref: str | None = None
    average: tuple[str, ...] = ()
    dtype: str | None = None
    tokenizer: Path | None = None
    max_file_bytes: int = 5_000_000_000
    overwrite: bool = False
    reference_logits: Path | None = None
    chat_template: Path | None = None
    allow_padded_vocabulary: bool = False
    allow_network: bool = False
    merge: bool = False
    merge_into: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportPlan:
    """Everything that is known before a byte is written; `dtype` is what readers compute in."""

    tensors: list[PackageTensor]
    files: list[WeightFile]
    tokenizer: PackageTokenizer | None
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any] | None
    dtype: str
    rounding: Rounding
    notes: tuple[str, ...]

    @property
    def weight_bytes(self) -> int:
        """Give the size of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors)

    @property
    def needed_bytes(self) -> int:
        """Give what the package needs on the disk, rounded up."""
        tokenizer = self.tokenizer.files.values() if self.tokenizer is not None else ()
        small = SMALL_FILES_BYTES + MANIFEST_BYTES_A_TENSOR * len(self.tensors)
        return self.weight_bytes + small + sum(map(len, tokenizer))


def make_plan(request: ExportRequest, weights: Weights) -> ExportPlan:
    """Look at every input; InputError says which one cannot be used."""
    _check_merge(request, weights)
    tokenizer = _tokenizer(request, weights)
    as_qwen2 = tokenizer is None or is_of_qwen2(tokenizer)
    family = family_name(weights.model, as_qwen2=as_qwen2)
    tensors = package_tensors(weights, family, request.dtype)
    dtype = prevailing_dtype(tensors)
    config, generation_config = _configs(request, weights, tokenizer, family, TORCH_NAMES[dtype])
    notes = tokenizer.notes if tokenizer is not None else ()
    if tokenizer is None:
        notes = (NO_TOKENIZER,)
    if weights.merged_into == PACKED:
        notes = (*notes, MERGED_INTO_PACKED)
    return ExportPlan(
        tensors=tensors,
        files=split_into_files(tensors, request.max_file_bytes),
        tokenizer=tokenizer,
        config=config,
        generation_config=generation_config,
        dtype=_told_dtype(config) or dtype,
        rounding=check_values(weights, tensors),
        notes=notes,
    )


def _check_merge(request: ExportRequest, weights: Weights) -> None:
    """Merging changes a base's weights, so it is asked for."""
    has_adapters = any(lora is not None for lora in weights.adapters)
    if has_adapters and not request.merge:
        raise InputError(
            f"step {weights.commit.step} holds adapters beside a frozen base: give --merge for the"
            " whole model with them, or --adapter for the adapters alone"
        )
    if request.merge and not has_adapters:
        raise InputError(
            f"--merge: step {weights.commit.step} holds no adapters: leave the flag out"
        )


def _told_dtype(config: Mapping[str, Any]) -> str | None:
    """Give the form that readers of the configuration compute in: an import's may be another."""
    told = config.get("dtype") or config.get("torch_dtype")
    return {name: form for form, name in TORCH_NAMES.items()}.get(str(told))


def _tokenizer(request: ExportRequest, weights: Weights) -> PackageTokenizer | None:
    if request.tokenizer is not None:
        tokenizer = tokenizer_of_folder(request.tokenizer, weights.model)
    else:
        found = tokenizer_of_store(weights.view, weights.model)
        if found is None:
            if request.chat_template is not None:
                raise InputError("--chat-template belongs to a tokenizer: give --tokenizer too")
            return None
        tokenizer = found
    # An imported vocabulary was padded by its maker, who had their reasons.
    allow = request.allow_padded_vocabulary or weights.source is not None
    check_vocabulary(tokenizer, weights.model, allow_padded=allow)
    if request.chat_template is not None:
        tokenizer = with_chat_template(tokenizer, _template(request.chat_template))
    return tokenizer


def _template(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--chat-template {path}: cannot be read ({error})") from error
    try:
        import jinja2
    except ImportError:
        return text
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
    except jinja2.TemplateSyntaxError as error:
        raise InputError(
            f"--chat-template {path}: line {error.lineno}: {error.message}: mend the template"
        ) from error
    return text


def _configs(
    request: ExportRequest,
    weights: Weights,
    tokenizer: PackageTokenizer | None,
    family: str,
    dtype: str,
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """Give both configurations: as they were imported, but for the dtype; else built."""
    if weights.source is not None:
        config = dict(weights.source.config)
        told = {config.get("dtype"), config.get("torch_dtype")} - {None}
        # A form that is not that of the weights would have readers round them.
        if request.dtype is not None or told - {dtype}:
            config |= {"torch_dtype": dtype, "dtype": dtype}
        return config, weights.source.generation_config
    model = weights.model
    if tokenizer is not None:
        special = tokenizer.special
    else:
        special = SpecialIds(bos=model.bos_token_id, eos=model.eos_token_id, pad=model.pad_token_id)
    return build_config(model, family, special, dtype), build_generation_config(special)
