"""Is every imported family served as transformers generates, whatever runs beside it?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import shardb
from serve.pinned import PinnedModel
from serve.requests import SamplingParameters
from serve.scheduler import Scheduler
from shardb.errors import ObjectCorruptError, UsageError
from tests.support.packages import (
    FAMILY_NAMES,
    config_of,
    import_here,
    random_tensors,
    resident,
    write_package,
)
from tests.support.served import Answer, ask, scheduler
from tests.support.small_stores import flip_bit, object_of
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.model.config import ModelConfig

NEW = 20
PROMPTS = [[5], list(range(3, 24)), [7, 7, 9], list(range(40, 12, -1)), [11, 60, 4, 33, 8]]
LONGROPE = {
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
    },
    "original_max_position_embeddings": 32,
    "max_position_embeddings": 128,
    "sliding_window": None,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in FAMILY_NAMES},
    "mistral with a window": ("mistral", {"sliding_window": 8}),
    "phi3 past its turn": ("phi3", LONGROPE),
}


@pytest.fixture(scope="module", params=CASES)
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, changes = CASES[request.param]
    root = tmp_path_factory.mktemp("package")
    write_package(root / "package", config_of(name, **changes))
    import_here(root / "package", root / "store")
    return root


@pytest.fixture(scope="module")
def pinned(package: Path) -> Iterator[PinnedModel]:
    opened = PinnedModel.open(package / "store")
    yield opened
    opened.release()


def generated(model: Any, prompt: Sequence[int]) -> tuple[list[int], list[float]]:
    """Give what transformers generates greedily, with log-probabilities."""
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = found.sequences[0, len(prompt) :].tolist()
    rows = [torch.log_softmax(each[0].float(), dim=-1) for each in found.logits]
    return tokens, [float(row[token]) for row, token in zip(rows, tokens, strict=True)]


def recomputed(store: Path, config: ModelConfig, prompt: Sequence[int], count: int) -> list[int]:
    """Give the likeliest tokens, every time from the whole text, as `train-generate` does."""
    ids = list(prompt)
    with shardb.open(store) as opened, opened.at() as view:
        engine = Engine(config, EngineOptions(), Device.from_name("cpu"))
        for _ in range(count):
            ids.append(
                int(engine.logits(view, torch.tensor([ids]), last_only=True)[0, -1].argmax())
            )
    return ids[len(prompt) :]


def alone(to: Scheduler, pinned: PinnedModel) -> list[Answer]:
    return [ask(to, pinned, prompt, NEW).wait() for prompt in PROMPTS]


def together(to: Scheduler, pinned: PinnedModel) -> list[Answer]:
    with to._changed:
        answers = [ask(to, pinned, prompt, NEW) for prompt in PROMPTS]
    return [answer.wait() for answer in answers]


def test_is_it_what_transformers_generates(package: Path, pinned: PinnedModel) -> None:
    model = resident(package / "package")
    with scheduler() as to:
        answers = together(to, pinned)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        tokens, logprobs = generated(model, prompt)
        assert answer.tokens == tokens
        if pinned.config.hf_config:
            assert [logprob for _, logprob in answer.scored] == logprobs, "the same bits"
    assert answers[1].tokens[:4] == recomputed(package / "store", pinned.config, PROMPTS[1], 4)


def test_does_nothing_beside_a_request_change_its_bits(pinned: PinnedModel) -> None:
    with scheduler() as to:
        expected = [answer.scored for answer in alone(to, pinned)]
        again = [answer.scored for answer in alone(to, pinned)]
    pages = 2 * pinned.config.num_layers * 16 * pinned.config.key_value_size * 4
    with scheduler(prefill_chunk=3, kv_cache_bytes=6 * pages, ngram_speculation=3) as to:
        crowded = [answer.scored for answer in together(to, pinned)]
        assert to.statistics().preemptions > 0
        assert to.statistics().kv_bytes_used == 0
    with scheduler(max_resident_bytes=0) as to:
        streamed = [answer.scored for answer in together(to, pinned)]
    assert expected == again == crowded == streamed


@pytest.mark.parametrize("name", ["gemma3_text", "phi"])
def test_would_other_weights_be_noticed(name: str, tmp_path: Path) -> None:
    found = []
    for seed in range(2):
        config = config_of(name)
        write_package(tmp_path / f"{seed}", config, random_tensors(config, seed=seed))
        import_here(tmp_path / f"{seed}", tmp_path / f"store{seed}")
        opened = PinnedModel.open(tmp_path / f"store{seed}")
        with scheduler() as to:
            found.append([answer.tokens for answer in together(to, opened)])
        opened.release()
    model = resident(tmp_path / "0")
    assert [generated(model, prompt)[0] for prompt in PROMPTS] == found[0] != found[1]


def test_is_a_prompt_scored_where_its_logits_have_room(package: Path, pinned: PinnedModel) -> None:
    prompt = PROMPTS[1]
    with scheduler(prefill_chunk=len(prompt)) as to:
        told = ask(to, pinned, prompt, 0, prompt_logprobs=True).wait().prompt
        if pinned.config.hf_config:
            with pytest.raises(UsageError, match="prefill_chunk"):
                ask(to, pinned, [*prompt, 5], 0, prompt_logprobs=True)
    with torch.inference_mode():
        logits = resident(package / "package")(torch.tensor([prompt])).logits[0]
    scores = torch.log_softmax(logits, dim=-1)[:-1].gather(1, torch.tensor(prompt[1:])[:, None])
    assert told.logprobs[1:] == pytest.approx(scores[:, 0].tolist(), abs=1e-4)


@pytest.mark.parametrize("name", ["gemma2"])
def test_does_a_request_end_alone(name: str, tmp_path: Path) -> None:
    write_package(tmp_path / "package", config_of(name))
    import_here(tmp_path / "package", tmp_path / "store")
    opened = PinnedModel.open(tmp_path / "store")
    left = Answer()

    def leave(event: Any) -> None:
        left(event)
        if len(left.tokens) == 3 and left.job is not None:
            left.job.cancel()

    with scheduler() as to:
        with to._changed:
            parameters = SamplingParameters(max_tokens=NEW, temperature=0.0, ignore_eos=True)
            left.job = to.submit(opened, PROMPTS[0], parameters, leave)
            other = ask(to, opened, PROMPTS[1], NEW)
        assert (left.wait().finished.reason, len(left.tokens)) == ("cancelled", 3)
        assert len(other.wait().tokens) == NEW
        block = object_of(tmp_path / "store", 0, "params/block_001")
        to.forget_prefixes()
    opened.release()
    flip_bit(block, block.stat().st_size // 2)
    damaged = PinnedModel.open(tmp_path / "store")
    with scheduler() as to:
        error = ask(to, damaged, PROMPTS[0], 3).wait().finished.error
        assert isinstance(error, ObjectCorruptError)
        assert to.statistics().kv_bytes_used == 0
    damaged.release()
