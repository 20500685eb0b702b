"""Has every way in which packages are known to go wrong a test that is still there?

Owns the list: what goes wrong, and the tests that hold us to its absence. The first of each is on
the way out or in, the doctor's comes last. A test that is renamed has to be renamed here.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from export.hf_weights import split_into_files, write_weights
from export.package_tensors import native_tensors
from export.package_weights import open_weights
from tests.support.exports import make_store
from tests.support.tiny_model import TINY

UNIT, WHOLE = "tests/unit/export", "tests/integration"
IMPORTED = f"{UNIT}/test_import_names.py"
EXPORTED = f"{UNIT}/test_hf_export.py"
ADAPTOR = "tests/unit/shardb/test_torch_adaptor.py"
DOCTOR = f"{UNIT}/test_doctor.py::test_is_it_found_with_its_place"
CASES: Mapping[str, tuple[str, ...]] = {
    "weights are written with mode 0600 whatever the umask": (
        f"{UNIT}/test_package_publish.py::test_is_a_package_made_whole", DOCTOR,
    ),
    "arrays that are not in C order are written scrambled": (
        f"{UNIT}/test_interchange_cases.py::test_are_weights_in_another_order_written_right",
        f"{ADAPTOR}::test_is_a_tensor_written_whatever_its_strides_and_gradient",
    ),
    "theta is read at another place than it was written": (
        f"{EXPORTED}::test_is_configuration_written_in_every_form",
        f"{UNIT}/test_import_config.py::test_old_and_new_rope_are_one_model",
        f"{UNIT}/test_import_config.py::test_a_bad_field_is_refused_by_name", DOCTOR,
    ),
    "a head is dropped or random, for the tie flag lies": (
        f"{IMPORTED}::test_a_head_that_is_said_to_be_tied_and_is_not_is_refused",
        f"{IMPORTED}::test_a_head_that_is_said_to_be_apart_and_is_missing_is_refused",
        f"{UNIT}/test_hf_weights.py::test_is_the_header_what_readers_need", DOCTOR,
    ),
    "head_dim or key heads are left out and derived wrongly": (
        f"{UNIT}/test_hf_geometries.py::test_are_the_logits_bit_equal",
        f"{UNIT}/test_import_config.py::test_head_sizes_are_taken_as_written", DOCTOR,
    ),
    "the rotary layout is wrong, which shows after many positions": (
        f"{UNIT}/test_verify.py::test_is_a_package_of_another_model_found",
        f"{UNIT}/test_gguf.py::test_control_swapped_rotary_rows_are_noticed",
        f"{UNIT}/test_doctor_against.py::test_is_a_wrong_rotary_layout_found_by_name",
    ),
    "class, template or dtype are written for one version": (
        f"{EXPORTED}::test_is_configuration_written_in_every_form",
        f"{EXPORTED}::test_is_a_broken_template_refused_and_a_good_one_at_both_places",
        f"{UNIT}/test_import_config.py::test_new_and_old_dtype_are_one_model", DOCTOR,
    ),
    "bos, eos and pad differ between files": (
        (f"{UNIT}/test_package_tokenizer.py::"
        "test_are_the_models_ids_special_only_where_the_tokenizer_says_so"),
        f"{EXPORTED}::test_is_configuration_written_in_every_form", DOCTOR,
    ),
    "fp16 overflows or vanishes": (
        f"{EXPORTED}::test_is_fp16_overflow_refused_before_anything_is_made",
        f"{UNIT}/test_hf_weights.py::test_are_weights_that_become_zero_counted",
        (f"{WHOLE}/test_import_run.py::"
        "test_another_form_is_rounded_once_and_what_it_cannot_hold_is_refused"), DOCTOR,
    ),
    "metadata, total size or leftovers are wrong": (
        f"{UNIT}/test_hf_weights.py::test_is_every_tensor_there_once_with_its_bytes",
        f"{UNIT}/test_package_publish.py::test_is_an_old_package_replaced_as_a_whole",
        f"{UNIT}/test_import_files.py::test_a_wrong_total_is_told",
        f"{UNIT}/test_doctor.py::test_is_it_found_in_a_split_package",
    ),
    "it cannot be loaded offline without copying files by hand": (
        f"{WHOLE}/test_export.py::test_is_a_trained_store_loaded_by_a_stranger",
        f"{EXPORTED}::test_are_logits_beyond_the_bound_never_published",
    ),
    "names have a wrapper's prefix, or one is renamed": (
        f"{IMPORTED}::test_the_prefix_of_a_wrapper_is_named",
        f"{IMPORTED}::test_a_renamed_key_is_named_with_its_nearest_match", DOCTOR,
    ),
    "it is larger than memory, or the import is killed half-way": (
        f"{WHOLE}/test_import_run.py::test_is_memory_one_shard_however_large_the_package_is",
        (f"{WHOLE}/test_import_run.py::"
        "test_killed_at_any_moment_and_run_again_is_never_having_been_killed"),
        f"{WHOLE}/test_export.py::test_does_memory_stay_when_the_model_grows",
    ),
}  # fmt: skip


def names_of(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if hasattr(node, "name")}


@pytest.mark.parametrize("case", CASES)
def test_is_it_tested(case: str, repository: Path) -> None:
    for named in CASES[case]:
        path, _, test = named.partition("::")
        there = names_of(repository / path)
        assert test in there, f"{named} is not there: {case}"


def test_would_a_test_that_went_be_missed(repository: Path) -> None:
    assert "test_is_a_test_that_went" not in names_of(repository / UNIT / "test_doctor.py")


def test_are_weights_in_another_order_written_right(tmp_path: Path) -> None:
    """Matrices that lie column by column in memory come out row by row, with the same values."""
    store = make_store(tmp_path / "store", TINY)
    [file] = split_into_files(native_tensors(TINY, "llama", "F32"), 1 << 30)
    with open_weights(str(store), ref=None) as weights:

        class Turned:
            def read(self, shard: str) -> dict[str, torch.Tensor]:
                found = weights.read(shard)
                return {n: t.T.contiguous().T if t.ndim == 2 else t for n, t in found.items()}

        assert not Turned().read("params/embeddings")["weight"].is_contiguous()
        write_weights(weights, [file], tmp_path)
        expected = load_file(tmp_path / "model.safetensors")
        (tmp_path / "turned").mkdir()
        write_weights(Turned(), [file], tmp_path / "turned")  # type: ignore[arg-type]
    found = load_file(tmp_path / "turned" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
