"""`export-hf` from beginning to end: read, check, build beside, load it afresh, publish.

Owns the order. Nothing is made before every input was looked at; nothing is published before a
fresh process has loaded the package and given the store's logits. The same commit gives the same
bytes: nothing here depends on a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from export.hf_plan import ExportPlan, ExportRequest, make_plan
from export.hf_weights import Written, write_weights
from export.model_card import CardFacts, model_card
from export.package_history import measured
from export.package_manifest import write_json, write_manifest
from export.package_memory import peak_bytes
from export.package_publish import Draft, check_apart
from export.package_tensors import TORCH_DTYPES, TORCH_NAMES, ZEROS, PackageTensor
from export.package_weights import Weights, open_weights
from export.reference_logits import check_ids, stage_logits, write_reference
from export.verify import (
    BY_STAGES,
    Check,
    Load,
    check_verdict,
    choose_loader,
    compare,
    load_afresh,
)
from trainer.errors import InputError

CARD_FILE = "README.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportReport:
    """What was made. Memory in bytes: this process's peak, and that of the fresh one."""

    out: str
    commits: tuple[str, ...]
    step: int
    dtype: str
    files: tuple[str, ...]
    model_bytes: int
    peak_memory_bytes: int
    check_peak_memory_bytes: int
    rounded_to_zero: int
    check: Check
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Give every field by name."""
        return {**asdict(self), "check": self.check.to_json()}


def export_package(request: ExportRequest, load: Load = load_afresh) -> ExportReport:
    """Write the package; raises a ShardbError or OSError and leaves nothing behind.

    `load` gives the logits of the package that was built, before it is published.
    """
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
        draft = Draft(request.out, is_directory=True, overwrite=request.overwrite)
        reference = _reference_draft(request)
        plan = make_plan(request, weights)
        stack.push(draft)
        draft.begin()
        draft.check_space(plan.needed_bytes)
        written = _write_files(plan, weights, draft.path)
        ids_T = _ids(plan, weights)
        exact_TV = stage_logits(weights.model, weights.read, ids_T, torch.float32)
        check, check_peak_bytes = _check(plan, weights, draft.path, ids_T, exact_TV, load)
        _write_card(plan, weights, draft, check)
        write_manifest(plan, weights, draft.path, written, check)
        if reference is not None:
            stack.push(reference)
            reference.begin()
            write_reference(reference.path, ids_T, exact_TV)
            reference.publish()
        draft.publish()
        return _report(request, plan, weights, check, check_peak_bytes)


def _reference_draft(request: ExportRequest) -> Draft | None:
    if request.reference_logits is None:
        return None
    check_apart(request.reference_logits, Path(request.store))
    if request.out.resolve() in request.reference_logits.resolve().parents:
        raise InputError(
            f"--reference-logits {request.reference_logits}: it lies inside the package: give a"
            " place beside it"
        )
    return Draft(request.reference_logits, is_directory=False, overwrite=True)


def _write_files(plan: ExportPlan, weights: Weights, folder: Path) -> Written:
    write_json(folder / "config.json", plan.config)
    if plan.generation_config is not None:
        write_json(folder / "generation_config.json", plan.generation_config)
    for name, data in (plan.tokenizer.files if plan.tokenizer is not None else {}).items():
        (folder / name).write_bytes(data)
    return write_weights(weights, plan.files, folder)


def _ids(plan: ExportPlan, weights: Weights) -> Tensor:
    vocabulary = plan.tokenizer.size if plan.tokenizer is not None else None
    return check_ids(weights.model, weights.commit.id, vocabulary)


def _check(
    plan: ExportPlan, weights: Weights, folder: Path, ids_T: Tensor, exact_TV: Tensor, load: Load
) -> tuple[Check, int]:
    """Load the package in a fresh process and compare; VerificationError when it is another.

    Gives what was found and that process's peak memory, which is no part of a package.
    """
    loader, not_checked = choose_loader(plan.weight_bytes)
    description: Any = {}
    if loader == BY_STAGES:
        tensors = [asdict(tensor) for tensor in plan.tensors]
        description = {
            "model": weights.model.to_json(),
            "tensors": tensors,
            "dtype": plan.dtype,
        }
    loaded = load(folder, ids_T, loader, description)
    if weights.source is None:
        loaded = replace(loaded, faults=(*loaded.faults, *loaded.disagreements))
    dtype = TORCH_NAMES[plan.dtype]
    ours_TV = exact_TV
    if plan.dtype != "F32":
        ours_TV = stage_logits(weights.model, weights.read, ids_T, TORCH_DTYPES[plan.dtype])
    verdict = compare(ours_TV, loaded.logits_TV, dtype)
    check_verdict(verdict, loaded, dtype)
    check = Check(
        loader=loader,
        versions=loaded.versions,
        dtype=dtype,
        positions=verdict.positions,
        difference_max=verdict.difference_max,
        bit_equal=verdict.bit_equal,
        rounding_max=float((exact_TV - loaded.logits_TV).abs().max()),
        not_checked=not_checked,
        disagreements=tuple(loaded.disagreements),
    )
    return check, loaded.peak_memory_bytes


def _write_card(plan: ExportPlan, weights: Weights, draft: Draft, check: Check) -> None:
    tokenizer = plan.tokenizer
    facts = CardFacts(
        name=draft.target.name,
        model=weights.model,
        config=plan.config,
        parameters=sum(t.elements for t in _unshared(plan.tensors)),
        dtype=TORCH_NAMES[plan.dtype],
        commits=weights.commits,
        measured=measured(weights),
        check=check,
        rounding=plan.rounding,
        begins_with=tokenizer.bos_token if tokenizer is not None else None,
        vocabulary=tokenizer.size if tokenizer is not None else None,
        notes=tuple(f"Note: {note}." for note in plan.notes),
    )
    (draft.path / CARD_FILE).write_text(model_card(facts), encoding="utf-8")


def _unshared(tensors: Sequence[PackageTensor]) -> list[PackageTensor]:
    """Leave out second names of a tensor, and biases of 0 that the model does not have."""
    stored = [tensor for tensor in tensors if tensor.tensor != ZEROS]
    return list({(tensor.shard, tensor.tensor): tensor for tensor in stored}.values())


def _report(
    request: ExportRequest, plan: ExportPlan, weights: Weights, check: Check, check_peak_bytes: int
) -> ExportReport:
    return ExportReport(
        out=str(request.out),
        commits=tuple(commit.id for commit in weights.commits),
        step=weights.commit.step,
        dtype=TORCH_NAMES[plan.dtype],
        files=tuple(file.name for file in plan.files),
        model_bytes=plan.weight_bytes,
        peak_memory_bytes=peak_bytes(),
        check_peak_memory_bytes=check_peak_bytes,
        rounded_to_zero=plan.rounding.to_zero,
        check=check,
        notes=plan.notes,
    )
