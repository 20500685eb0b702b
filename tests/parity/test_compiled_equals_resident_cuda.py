"""Do compiled blocks, streamed to a GPU, give what resident training with them gives, bit for bit?

They round otherwise than PyTorch's own kernels, so the resident side compiles them as well: its
forward and backward passes are those of ordinary autograd over the compiled functions.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.parity.test_streamed_equals_resident import SEED, Comparison, options_of
from tests.support.resident import ResidentTrainer
from tests.support.tiny_model import TINY, TINY_QWEN
from trainer.engine import StepResult
from trainer.model.compiled import CompiledBlocks
from trainer.model.config import ModelConfig
from trainer.model.stages import Block, Stage
from trainer.options import EngineOptions
from trainer.pipeline.pipeline import PipelineSettings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = "cuda"


class ResidentCompiled(ResidentTrainer):
    """Runs blocks through compiled functions of its own."""

    def __init__(self, config: ModelConfig, options: EngineOptions) -> None:
        super().__init__(config, options, SEED, DEVICE)
        self.blocks = CompiledBlocks()

    def _run(self, stage: Stage, x: Tensor) -> Tensor:
        if isinstance(stage, Block):
            return self.blocks.run(stage, self._active(stage), x).to(self.dtype)
        return super()._run(stage, x)


class CompiledComparison(Comparison):
    """The streamed side compiles; the resident side too, unless told otherwise."""

    def __init__(
        self, config: ModelConfig, dtype: str, *, pipelined: bool, resident: bool = True
    ) -> None:
        options = replace(options_of(dtype, "global"), compile_blocks=True)
        super().__init__(config, options, 2, DEVICE)
        if resident:
            self.resident = ResidentCompiled(config, options)
        if pipelined:
            self.engine.use_pipeline(PipelineSettings(poison=True))

    def check_counts(self, streamed: StepResult) -> None:
        assert streamed.updated_shards == len(self.engine.stages)


@pytest.mark.parametrize("pipelined", [False, True], ids=["plain", "pipeline"])
@pytest.mark.parametrize(
    ("config", "dtype"), [(TINY, "bf16"), (TINY_QWEN, "fp32")], ids=["bf16", "qwen fp32"]
)
def test_compiled_streamed_equals_resident(
    config: ModelConfig, dtype: str, pipelined: bool
) -> None:
    assert CompiledComparison(config, dtype, pipelined=pipelined).differences() == []


def test_control_a_side_that_does_not_compile_is_noticed() -> None:
    comparison = CompiledComparison(TINY, "bf16", pipelined=False, resident=False)
    assert comparison.differences() != []
