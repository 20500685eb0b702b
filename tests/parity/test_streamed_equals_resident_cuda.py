"""Does streaming to a GPU give what resident training on it gives, bit for bit?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.parity.test_encodings import EncodedComparison, encoded_options
from tests.parity.test_fp16 import Fp16Comparison
from tests.parity.test_normaliser import NormalisedComparison
from tests.parity.test_streamed_equals_resident import Comparison, SkippedUpdate, options_of
from tests.support.tiny_model import TINY, TINY_QWEN, TINY_TIED
from trainer.model.config import ModelConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def same_kernels_in_the_same_order() -> Iterator[None]:
    """Some attention kernels sum gradients in the order in which threads arrive."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("clip", ["global", "shard"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("config", [TINY, TINY_TIED, TINY_QWEN], ids=["untied", "tied", "qwen"])
def test_streamed_equals_resident_on_a_gpu(
    config: ModelConfig, dtype: str, clip: str, activations: str
) -> None:
    options = replace(options_of(dtype, clip), activations=activations)
    assert Comparison(config, options, 2, "cuda").differences() == []


@pytest.mark.parametrize(("config", "clip"), [(TINY, "global"), (TINY_TIED, "shard")])
def test_fp16_with_a_loss_scale(config: ModelConfig, clip: str) -> None:
    comparison = Fp16Comparison(config, clip, 3, "cuda")
    assert comparison.differences() == []
    assert len(comparison.skipped) >= 2


def test_the_periodic_normaliser() -> None:
    assert NormalisedComparison(TINY, "shard", "bf16", 2, "cuda").differences() == []


@pytest.mark.parametrize("state", ["fp32", "bf16", "int8"])
def test_smaller_state_and_weights(state: str) -> None:
    options = encoded_options(
        "bf16", "global", optimizer_state_dtype=state, master_weight_dtype="bf16"
    )
    assert EncodedComparison(TINY, options, 2, device="cuda").differences() == []


def test_control_a_skipped_update_is_noticed() -> None:
    assert SkippedUpdate(TINY, options_of("fp32", "global"), 1, "cuda").differences() != []
