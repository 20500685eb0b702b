"""Does a block with adapters turn by the tables that transformers makes where it computes?

Kernels of devices round cosines otherwise in last bits, and a position in some hundred thousand
then falls to the other side in bf16: a model in transformers takes them on its own device.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from export.hf_config import SpecialIds, build_config
from tests.support.adapters import settings_of
from tests.support.tiny_model import TINY
from trainer.lora.stages import adapted
from trainer.model import layers
from trainer.model.config import ModelConfig
from trainer.model.stages import Block

POSITIONS = 8192
LONG = replace(
    TINY,
    rope_theta=500_000.0,
    rope_scaling_type="llama3",
    rope_scaling_factor=8.0,
    rope_scaling_low_freq_factor=1.0,
    rope_scaling_high_freq_factor=4.0,
    rope_scaling_original_max_position_embeddings=1024,
)
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("config", [TINY, LONG], ids=["plain", "llama3"])
def test_are_the_tables_those_of_transformers_on_the_device(
    config: ModelConfig, device: str
) -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    package = build_config(config, "llama", SpecialIds(bos=None, eos=None, pad=None), "bfloat16")
    theirs = modeling.LlamaConfig(
        hidden_size=config.num_heads * config.head_dim,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=POSITIONS,
        rope_parameters=package["rope_parameters"],
    )
    x = torch.zeros(1, POSITIONS, config.hidden_size, dtype=torch.bfloat16, device=device)
    positions = torch.arange(POSITIONS, device=device)[None]
    expected = modeling.LlamaRotaryEmbedding(theirs).to(device)(x, positions)
    block = adapted(Block(config, 0), settings_of("llama")).inner
    assert isinstance(block, Block)
    for own, other in zip(block.angles(x), expected, strict=True):
        assert torch.equal(own, other[0])


def test_a_block_with_adapters_takes_cosines_where_it_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places: list[torch.device | None] = []

    def noted(*_arguments: object, made_on: torch.device | None = None) -> tuple[()]:
        places.append(made_on)
        return ()

    monkeypatch.setattr(layers, "rotary_angles", noted)
    x = torch.zeros(1, 4, TINY.hidden_size, device="meta")
    block = Block(TINY, 0)
    inner = adapted(block, settings_of("llama")).inner
    assert isinstance(inner, Block)
    inner.angles(x)
    block.angles(x)
    assert places == [x.device, None]
