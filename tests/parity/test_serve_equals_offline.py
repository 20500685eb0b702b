"""Does the server say what the trainer's own forward pass says, and transformers' too?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shardb
from serve.pinned import PinnedModel
from serve.requests import TokenEvent
from shardb import torch_adaptor
from tests.support.llama import llama_of
from tests.support.served import ask, prompts, scheduler, write_model
from tests.support.tiny_model import TINY, TINY_QWEN, TINY_TIED
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.model.config import ModelConfig
from trainer.model.stages import build_stages

SCALED = replace(
    TINY,
    rope_scaling_type="llama3",
    rope_scaling_factor=4.0,
    rope_scaling_original_max_position_embeddings=16,
)
MODELS = {"gqa": TINY, "tied": TINY_TIED, "qwen": TINY_QWEN, "scaled": SCALED}
ASKED = prompts(5, TINY.vocab_size)
NEW_TOKENS = 12


def offline(root: Path, config: ModelConfig, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens by whole forward passes, and the log-probabilities of the last."""
    engine = Engine(config, EngineOptions(), Device.from_name("cpu"))
    ids = list(prompt)
    with shardb.open(root) as store, store.at() as view:
        for _ in range(NEW_TOKENS):
            logits = engine.logits(view, torch.tensor([ids]), last_only=True)[0, -1]
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :], torch.log_softmax(logits, -1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("resident", [None, 0])
def test_greedy_tokens_are_those_of_whole_forward_passes(
    tmp_path: Path, name: str, resident: int | None
) -> None:
    config = MODELS[name]
    write_model(tmp_path / "run", config, seed=5)
    pinned = PinnedModel.open(tmp_path / "run")
    with scheduler(max_resident_bytes=resident, prefill_chunk=7) as to:
        answers = [
            ask(to, pinned, prompt, NEW_TOKENS, top_logprobs=config.vocab_size) for prompt in ASKED
        ]
        for prompt, answer in zip(ASKED, answers, strict=True):
            tokens, logprobs = offline(tmp_path / "run", config, prompt)
            assert answer.wait().tokens == tokens
            last = answer.events[-2]
            assert isinstance(last, TokenEvent)
            served = torch.tensor([value for _, value in sorted(last.top)])
            assert torch.allclose(served, logprobs, atol=2e-5)
    pinned.release()


def test_transformers_gives_the_same_log_probabilities(tmp_path: Path) -> None:
    write_model(tmp_path / "run", TINY, seed=5)
    with shardb.open(tmp_path / "run") as store, store.at() as view:
        params = {
            stage.name: {
                name: tensor.clone()
                for name, tensor in torch_adaptor.tensors(view.read(f"params/{stage.name}")).items()
            }
            for stage in build_stages(TINY)
        }
    model = llama_of(TINY, params, torch.float32).eval()
    prompt = prompts(9, TINY.vocab_size)[0] + [3, 1, 4, 1, 5, 9, 2, 6]
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)
    pinned = PinnedModel.open(tmp_path / "run")
    with scheduler() as to:
        told = ask(to, pinned, prompt, 0, prompt_logprobs=True).wait().prompt
    pinned.release()
    for position, value in enumerate(told.logprobs[1:]):
        assert value == pytest.approx(float(expected[position, prompt[position + 1]]), abs=2e-5)
