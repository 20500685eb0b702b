"""Does streaming to a GPU give what resident training on it gives, bit for bit?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

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


def test_control_a_skipped_update_is_noticed() -> None:
    assert SkippedUpdate(TINY, options_of("fp32", "global"), 1, "cuda").differences() != []
