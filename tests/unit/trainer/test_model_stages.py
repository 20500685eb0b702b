"""Stages: names, shapes, first values, and what a decoder must not do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.resident import first_values
from tests.support.tiny_model import TINY, TINY_QWEN, TINY_TIED
from trainer.model.config import ModelConfig
from trainer.model.initialise import fill_initial
from trainer.model.layers import causal_attention, rotary_angles, rotate
from trainer.model.stages import Block, LmHead, build_stages, build_trunk, parameter_count


def forward(config: ModelConfig, ids: Tensor, seed: int = 1) -> Tensor:
    x = ids
    with torch.no_grad():
        for stage in (*build_trunk(config), LmHead(config)):
            x = stage.forward(first_values(stage, seed), x)
    return x


def test_stage_names() -> None:
    names = [stage.name for stage in build_stages(TINY)]
    assert names == [
        "embeddings", "block_000", "block_001", "block_002", "final_norm", "lm_head"
    ]  # fmt: skip


def test_tied_head_owns_no_shard() -> None:
    assert [stage.name for stage in build_stages(TINY_TIED)][-1] == "final_norm"
    assert LmHead(TINY_TIED).name == "embeddings"
    saved = TINY.vocab_size * TINY.hidden_size
    assert parameter_count(TINY) - parameter_count(TINY_TIED) == saved


def test_block_parameters_have_llama_names_and_shapes() -> None:
    shapes = {name: each.shape for name, each in Block(TINY, 0).parameters.items()}
    assert shapes == {
        "input_layernorm.weight": (48,),
        "self_attn.q_proj.weight": (64, 48),
        "self_attn.k_proj.weight": (32, 48),
        "self_attn.v_proj.weight": (32, 48),
        "self_attn.o_proj.weight": (48, 64),
        "post_attention_layernorm.weight": (48,),
        "mlp.gate_proj.weight": (112, 48),
        "mlp.up_proj.weight": (112, 48),
        "mlp.down_proj.weight": (48, 112),
    }


def test_biases_and_norms_when_asked() -> None:
    extra = set(Block(TINY_QWEN, 0).parameters) - set(Block(TINY, 0).parameters)
    assert extra == {
        *(f"self_attn.{letter}_proj.bias" for letter in "qkvo"),
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    }


def test_specs_are_fp32_masters() -> None:
    assert {spec.dtype for stage in build_stages(TINY) for spec in stage.specs.values()} == {"F32"}


@pytest.mark.parametrize("config", [TINY, TINY_QWEN], ids=["plain", "qwen-like"])
def test_no_position_sees_the_future(config: ModelConfig) -> None:
    ids = torch.arange(40)[None] % config.vocab_size
    changed = ids.clone()
    changed[0, 25] = 99
    before, after = forward(config, ids), forward(config, changed)
    assert torch.equal(before[:, :25], after[:, :25])
    assert not torch.equal(before[:, 25], after[:, 25])


def test_rows_do_not_see_each_other() -> None:
    ids = torch.stack([torch.arange(20), torch.arange(20, 40)])
    both = forward(TINY, ids)
    assert torch.allclose(both[1:], forward(TINY, ids[1:]), atol=1e-6)


def test_rotation_depends_on_distance_alone() -> None:
    cos, sin = rotary_angles(50, 16, 10000.0, torch.float32, torch.device("cpu"))
    q, k = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0))
    turned_q, turned_k = rotate(q, cos, sin), rotate(k, cos, sin)
    near = (turned_q[0, 0, 7] @ turned_k[0, 0, 3], turned_q[0, 0, 45] @ turned_k[0, 0, 41])
    assert torch.allclose(*near, atol=1e-5)
    assert not torch.allclose(near[0], turned_q[0, 0, 8] @ turned_k[0, 0, 3], atol=1e-3)


def test_query_heads_share_key_heads_in_groups() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 9, 8, generator=generator)
    k, v = (torch.randn(1, 2, 9, 8, generator=generator) for _ in range(2))
    repeated = causal_attention(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1))
    assert torch.allclose(causal_attention(q, k, v), repeated, atol=1e-6)


def test_first_values_depend_on_seed_and_names_only() -> None:
    first = {stage.name: first_values(stage, 5) for stage in build_stages(TINY)}
    again = {stage.name: first_values(stage, 5) for stage in reversed(build_stages(TINY))}
    for name, shard in first.items():
        assert all(torch.equal(shard[key], again[name][key]) for key in shard)
    name = "self_attn.q_proj.weight"
    assert not torch.equal(first["block_000"][name], first["block_001"][name])
    assert not torch.equal(first["block_000"][name], first_values(Block(TINY, 0), 6)[name])


def test_first_values_do_not_depend_on_threads() -> None:
    stage = LmHead(replace(TINY, vocab_size=4000))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = first_values(stage, 5)["weight"]
        torch.set_num_threads(2)
        assert torch.equal(one, first_values(stage, 5)["weight"])
    finally:
        torch.set_num_threads(threads)


def test_first_values_have_the_configured_spread() -> None:
    stage = Block(replace(TINY_QWEN, initializer_range=0.02, intermediate_size=4000), 0)
    values = {name: torch.empty(each.shape) for name, each in stage.parameters.items()}
    fill_initial(stage, 1, values)
    assert float(values["mlp.up_proj.weight"].std()) == pytest.approx(0.02, rel=0.02)
    assert float(values["mlp.up_proj.weight"].mean()) == pytest.approx(0.0, abs=2e-4)
    assert bool((values["input_layernorm.weight"] == 1).all())
    assert bool((values["self_attn.q_norm.weight"] == 1).all())
    assert bool((values["self_attn.q_proj.bias"] == 0).all())


def test_do_tables_made_while_inferring_serve_a_backward_pass() -> None:
    """A process that served or evaluated first may train after: the tables are kept for both."""
    rotary_angles.cache_clear()
    arguments = (7, 8, 123.0, torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        rotary_angles(*arguments)
    cos_TK, _ = rotary_angles(*arguments)
    x_TK = torch.ones(7, 8, requires_grad=True)
    (x_TK * cos_TK).sum().backward()
    assert x_TK.grad is not None
    assert torch.equal(x_TK.grad, cos_TK)
