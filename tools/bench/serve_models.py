"""Random Llama-shaped models for the serving benchmarks, in a store and as a peer loads them.

Owns the geometry, the prompts and the way to drive our scheduler. Knows nothing of peers.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import shardb
from serve.pinned import PinnedModel
from serve.requests import Event, Finished, SamplingParameters, TokenEvent
from serve.scheduler import Scheduler
from shardb import torch_adaptor
from shardb.errors import ShardbError
from trainer.model.config import ModelConfig
from trainer.model.stages import build_stages
from trainer.model.stored import MODEL_SHARD

SEED = 7
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Weights = dict[str, dict[str, Tensor]]


def geometry(hidden: int, layers: int, vocab_size: int) -> ModelConfig:
    """Give a Llama geometry with the usual ratios, heads 64 wide, four queries a key head."""
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=hidden // 64,
        num_kv_heads=max(1, hidden // 256),
        intermediate_size=hidden * 11 // 4,
        max_position_embeddings=2048,
        initializer_range=0.03,
    )


def random_weights(config: ModelConfig, dtype: torch.dtype) -> Weights:
    """Give values of every stage."""
    generator = torch.Generator().manual_seed(SEED)
    found: Weights = {}
    for stage in build_stages(config):
        found[stage.name] = {
            name: (
                torch.ones(each.shape)
                if each.initial == "ones"
                else torch.randn(each.shape, generator=generator) * config.initializer_range
            ).to(dtype)
            for name, each in stage.parameters.items()
        }
    return found


def write_store(root: Path, config: ModelConfig, weights: Weights) -> None:
    """Commit the weights as they are, in their own dtype."""
    with shardb.open(root, create=True) as store, store.begin() as txn:
        for name, tensors in weights.items():
            torch_adaptor.write(txn, f"params/{name}", tensors)
        data = json.dumps(config.to_json(), sort_keys=True).encode()
        txn.write(MODEL_SHARD, {"json": np.frombuffer(data, dtype=np.uint8)}, trainable=False)
        txn.commit(step=0)


def prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Give prompts of one length, no two alike."""
    draw = np.random.default_rng(SEED)
    return [draw.integers(3, vocab_size, length).tolist() for _ in range(count)]


@dataclass
class Receiver:
    """Collects one request's tokens, and when each came."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    error: ShardbError | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self.tokens.append(event.token_id)
            self.times.append(time.perf_counter())
        elif isinstance(event, Finished):
            self.error = event.error
            self.ended.set()


def serve_all(
    scheduler: Scheduler,
    pinned: PinnedModel,
    asked: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    gap_seconds: float = 0.0,
) -> list[Receiver]:
    """Submit requests, `gap_seconds` apart, and wait for all of them."""
    parameters = SamplingParameters(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
    receivers = []
    for prompt in asked:
        receivers.append(Receiver())
        scheduler.submit(pinned, prompt, parameters, receivers[-1])
        if gap_seconds:
            time.sleep(gap_seconds)
    for receiver in receivers:
        receiver.ended.wait()
        if receiver.error is not None:
            raise receiver.error
    return receivers
