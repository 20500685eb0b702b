"""Is a configuration read in both its forms, and refused where a reader would guess?"""

from __future__ import annotations

import sys
from typing import Any

import pytest

from export.families import FAMILIES
from export.import_config import read_model_config
from tests.support.packages import FAMILY_NAMES, config_of
from trainer.errors import InputError
from trainer.model.config import ModelConfig


def model_of(model_type: str = "llama", **changes: Any) -> ModelConfig:
    return read_model_config(config_of(model_type, **changes)).model


def test_old_and_new_rope_are_one_model() -> None:
    old = model_of(rope_theta=5e5)
    new = model_of(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    both = model_of(rope_theta=5e5, rope_parameters={"rope_theta": 5e5})
    assert old == new == both
    assert old.rope_theta == 5e5
    assert model_of(rope_theta=None).rope_theta == 10000.0


def test_old_and_new_scaling_are_one_model() -> None:
    scaling = {"factor": 4.0}
    old = model_of(rope_scaling={"type": "linear", **scaling})
    renamed = model_of(rope_scaling={"rope_type": "linear", **scaling})
    new = model_of(rope_parameters={"rope_type": "linear", "rope_theta": 500000.0, **scaling})
    assert old == renamed == new
    assert (old.rope_scaling_type, old.rope_scaling_factor) == ("linear", 4.0)


def test_new_and_old_dtype_are_one_model() -> None:
    assert model_of(torch_dtype=None, dtype="bfloat16") == model_of()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}, ("rope_theta", "500000")),
        (
            {
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "llama3"},
            },
            ("rope_scaling", "linear", "llama3"),
        ),
        ({"dtype": "float16"}, ("dtype", "torch_dtype", "bfloat16")),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ("low_freq_factor",)),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantised", "gptq")),
        ({"hidden_size": None}, ("hidden_size", "missing")),
        ({"hidden_size": "32"}, ("hidden_size", "32")),
        ({"num_key_value_heads": 3}, ("num_kv_heads", "3")),
        ({"vocab_size": 0}, ("vocab_size",)),
    ],
)
def test_a_bad_field_is_refused_by_name(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as refused:
        model_of(**changes)
    assert "config.json" in str(refused.value)
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("model_type", ["gpt2", "lama", "mixtral", None, 7])
def test_another_family_is_refused_with_the_list(model_type: Any) -> None:
    with pytest.raises(InputError) as refused:
        read_model_config({"model_type": model_type})
    for name in FAMILY_NAMES:
        assert name in str(refused.value)
    if model_type == "lama":
        assert "did you mean llama" in str(refused.value)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_what_a_package_leaves_out_is_what_transformers_fills_in(name: str) -> None:
    """Defaults differ from family to family: the table here must be that of transformers."""
    import transformers

    theirs = transformers.AutoConfig.for_model(name)
    family = FAMILIES[name]
    assert family.tied_by_default == theirs.tie_word_embeddings
    assert family.native == bool(family.defaults)
    for field, value in family.defaults.items():
        # Mistral and Qwen2 have no such field: their biases do not change.
        assert field == "attention_bias" or getattr(theirs, field) == value, field


def test_head_sizes_are_taken_as_written() -> None:
    model = model_of(hidden_size=48, num_attention_heads=4, head_dim=16, num_key_value_heads=2)
    assert (model.head_dim, model.num_kv_heads) == (16, 2)
    assert model_of("qwen3", head_dim=None).head_dim == 128
    assert model_of(num_key_value_heads=None).num_kv_heads == 4


def test_biases_and_norms_are_the_familys() -> None:
    def flags(model: ModelConfig) -> tuple[bool, bool, bool]:
        return model.attention_bias, model.attention_output_bias, model.qk_norm

    assert flags(model_of()) == (False, False, False)
    assert flags(model_of(attention_bias=True)) == (True, True, False)
    assert flags(model_of("qwen2")) == (True, False, False)
    assert flags(model_of("qwen3")) == (False, False, True)
    assert flags(model_of("mistral", attention_bias=True)) == (False, False, False)


def test_ids_that_begin_end_and_pad() -> None:
    def ids(**changes: Any) -> tuple[int, int, int]:
        model = model_of(**changes)
        return model.bos_token_id, model.eos_token_id, model.pad_token_id

    assert ids() == (1, 2, 2)
    assert ids(eos_token_id=[5, 6], pad_token_id=3) == (1, 5, 3)
    assert ids(bos_token_id=None, eos_token_id=7) == (7, 7, 7)
    assert ids(pad_token_id=-1) == (1, 2, 2)
    assert ids(bos_token_id=None, eos_token_id=None) == (0, 0, 0)


def test_a_window_wider_than_the_positions_changes_nothing() -> None:
    assert not model_of("mistral", sliding_window=128).hf_config
    assert model_of("mistral", sliding_window=127).hf_config
    assert not model_of("mistral", sliding_window=None).hf_config
    assert not model_of("qwen2", sliding_window=8, use_sliding_window=False).hf_config


def test_native_stages_can_be_insisted_on() -> None:
    with pytest.raises(InputError, match="window of 8"):
        read_model_config(config_of("mistral", sliding_window=8), stages="native")
    assert not read_model_config(config_of("llama"), stages="native").model.hf_config
    assert read_model_config(config_of("llama"), stages="transformers").model.hf_config


def test_without_transformers_native_families_are_read_and_others_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert model_of().hidden_size == 32
    with pytest.raises(InputError, match=r"\.\[hf\]"):
        model_of("phi3")


def test_who_wrote_a_package_is_not_part_of_the_model() -> None:
    one = model_of("phi3", transformers_version="4.48.0", _name_or_path="a")
    other = model_of("phi3", transformers_version="5.0.0", _name_or_path="b", torch_dtype=None)
    assert one == other
