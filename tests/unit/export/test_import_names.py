"""Does an import read exactly the tensors that the configuration asks for, tied or not?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from export.import_names import EMBEDDINGS, HEAD
from export.import_run import ImportPlan, plan_import
from tests.support.packages import Tensors, config_of, random_tensors, write_package
from trainer.errors import InputError

UNTIED = config_of("llama", tie_word_embeddings=False)
TIED = config_of("llama", tie_word_embeddings=True)
Q = "model.layers.1.self_attn.q_proj.weight"


def planned(folder: Path, config: dict[str, Any], tensors: Tensors) -> ImportPlan:
    return plan_import(write_package(folder, config, tensors))


def refusal(folder: Path, config: dict[str, Any], tensors: Tensors) -> str:
    with pytest.raises(InputError) as refused:
        planned(folder, config, tensors)
    assert str(folder) in str(refused.value)
    return str(refused.value)


def test_a_renamed_key_is_named_with_its_nearest_match(tmp_path: Path) -> None:
    tensors = random_tensors(UNTIED)
    tensors["model.layers.1.self_attn.qproj.weight"] = tensors.pop(Q)
    told = refusal(tmp_path, UNTIED, tensors)
    assert f"1 tensors are missing: {Q} (nearest: model.layers.1.self_attn.qproj.weight)" in told


def test_a_missing_and_an_extra_tensor_are_named(tmp_path: Path) -> None:
    tensors = random_tensors(UNTIED)
    del tensors[Q]
    assert Q in refusal(tmp_path / "a", UNTIED, tensors)
    tensors = random_tensors(UNTIED) | {"model.layers.3.mlp.up_proj.weight": torch.zeros(48, 32)}
    told = refusal(tmp_path / "b", UNTIED, tensors)
    assert "1 are not of this model: model.layers.3.mlp.up_proj.weight" in told
    assert "missing:" not in told


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_the_prefix_of_a_wrapper_is_named(prefix: str, tmp_path: Path) -> None:
    tensors = {prefix + name: tensor for name, tensor in random_tensors(UNTIED).items()}
    told = refusal(tmp_path, UNTIED, tensors)
    assert repr(prefix) in told
    assert "take the prefix away" in told


def test_another_shape_is_named_with_both(tmp_path: Path) -> None:
    tensors = random_tensors(UNTIED)
    tensors[Q] = tensors[Q][:16].clone()
    told = refusal(tmp_path, UNTIED, tensors)
    assert f"{Q} has [16, 32], config.json asks for [32, 32]" in told


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64])
def test_another_form_is_named(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = random_tensors(UNTIED)
    tensors[Q] = tensors[Q].to(dtype)
    assert f"{Q} is" in refusal(tmp_path, UNTIED, tensors)


def test_a_head_that_is_said_to_be_tied_and_is_not_is_refused(tmp_path: Path) -> None:
    told = refusal(tmp_path, TIED, random_tensors(UNTIED))
    assert "tie_word_embeddings is true" in told
    assert HEAD in told


def test_a_head_that_is_said_to_be_apart_and_is_missing_is_refused(tmp_path: Path) -> None:
    told = refusal(tmp_path, UNTIED, random_tensors(TIED))
    assert "tie_word_embeddings is false" in told
    assert "random" in told


def test_the_familys_default_counts_where_the_flag_is_left_out(tmp_path: Path) -> None:
    untold = config_of("llama", tie_word_embeddings=None)
    assert "random" in refusal(tmp_path / "a", untold, random_tensors(TIED))
    gemma = config_of("gemma")
    assert not planned(tmp_path / "b", gemma, random_tensors(gemma)).source.aliases


def test_a_tied_head_that_is_stored_once_more_is_an_alias(tmp_path: Path) -> None:
    tensors = random_tensors(TIED)
    tensors[HEAD] = tensors[EMBEDDINGS].clone()
    plan = planned(tmp_path, TIED, tensors)
    assert plan.source.aliases == {HEAD: EMBEDDINGS}
    assert HEAD not in plan.places


def test_a_head_apart_that_equals_the_embeddings_is_told(tmp_path: Path) -> None:
    tensors = random_tensors(UNTIED)
    tensors[HEAD] = tensors[EMBEDDINGS].clone()
    plan = planned(tmp_path / "a", UNTIED, tensors)
    assert any("trained apart" in note for note in plan.notes)
    tensors[HEAD].view(-1)[-1] += 1
    assert plan_notes(tmp_path / "b", tensors) == ()


def plan_notes(folder: Path, tensors: Tensors) -> tuple[str, ...]:
    notes = planned(folder, UNTIED, tensors).notes
    return tuple(note for note in notes if "tokenizer" not in note)


def test_stored_angles_are_left_out_with_a_word(tmp_path: Path) -> None:
    angles = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    plan = planned(tmp_path, UNTIED, random_tensors(UNTIED) | angles)
    assert "1 stored tables of angles" in plan.notes[0]
    assert len(plan.places) == len(random_tensors(UNTIED))


def test_a_dtype_that_is_not_the_tensors_is_told(tmp_path: Path) -> None:
    plan = planned(tmp_path / "a", UNTIED, random_tensors(UNTIED, dtype=torch.float32))
    assert plan.notes[0] == "config.json says bfloat16, the tensors are F32: they are kept"
    assert plan_notes(tmp_path / "b", random_tensors(UNTIED)) == ()
