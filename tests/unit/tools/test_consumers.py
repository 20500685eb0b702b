"""Does the comparison with other programs notice what it is there for?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.support.ailing import MODEL
from tests.support.exports import byte_tokenizer
from tools import consumers, consumers_venvs
from tools.consumers import Row, ask, judge, markdown
from tools.consumers_models import TEXTS, Shown
from tools.consumers_venvs import CONSUMERS, Consumer, NotBuiltError, python_of

TOKENIZER = Tokenizer.from_str(byte_tokenizer(300).decode())


def shown(**changes: Any) -> Shown:
    generator = torch.Generator().manual_seed(0)
    values: dict[str, Any] = {
        "name": "x",
        "package": Path("p"),
        "gguf": Path("g"),
        "model": MODEL,
        "ids": list(range(70)),
        "logits_TV": torch.randn(70, 300, generator=generator).numpy(),
        "prompts": [[1, 2]],
        "greedy": [[5, 6, 7]],
        "rows": [],
        "perplexity": 3.0,
        "tokenizer": TOKENIZER,
    }
    return Shown(**(values | changes))


def answer_of(kind: str, **changes: Any) -> dict[str, Any]:
    """Give the answer of a consumer that makes of the model what we do, with changes."""
    model = shown()
    ids = [TOKENIZER.encode(text, add_special_tokens=False).ids for text in TEXTS]
    facts = {
        "versions": {"x": "1"},
        "greedy": [[5, 6, 7, MODEL.eos_token_id]],
        "text_ids": ids,
        "decoded": [TOKENIZER.decode(each) for each in ids],
        "perplexity": 3.0,
        "faults": [],
    }
    arrays: dict[str, Any] = {"logits": model.logits_TV}
    if kind == "vllm":
        logits_TV = torch.from_numpy(model.logits_TV).double()
        logprobs_TV = torch.log_softmax(logits_TV, dim=1).numpy()
        logprobs_TV[-1] = np.nan  # nothing is said of what comes behind the last one
        arrays = {"logprobs": logprobs_TV}
    arrays |= {key: value for key, value in changes.items() if key in arrays}
    facts |= {key: value for key, value in changes.items() if key not in arrays}
    return {**arrays, "facts": np.array(json.dumps(facts))}


KINDS = ("transformers", "llama_cpp", "vllm")


@pytest.mark.parametrize("kind", KINDS)
def test_is_the_same_model_taken_for_the_same(kind: str) -> None:
    told, faults = judge(kind, answer_of(kind), shown())
    assert faults == []
    assert "greedy ids equal (3)" in told


def moved(kind: str, by: float) -> dict[str, Any]:
    name = "logprobs" if kind == "vllm" else "logits"
    values = answer_of(kind)[name].copy()
    values[3, 7] += by
    return {name: values}


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("transformers", moved("transformers", 1e-6), "not bit-equal"),
        ("vllm", moved("vllm", 2e-4), "log-probabilities differ by 0.0002"),
        ("vllm", {"logprobs": answer_of("vllm")["logprobs"][:60]}, "positions"),
        ("llama_cpp", {"perplexity": 3.04}, "perplexity differs by 1.33%"),
        *[(kind, {"greedy": [[5, 6, 8]]}, "greedy ids differ") for kind in KINDS],
        *[(kind, {"text_ids": [[1]] * len(TEXTS)}, "ids of texts differ") for kind in KINDS],
        *[(kind, {"decoded": ["x"] * len(TEXTS)}, "texts of ids differ") for kind in KINDS],
        *[(kind, {"faults": ["missing_keys: a"]}, "missing_keys") for kind in KINDS],
    ],
)
def test_is_another_model_noticed(kind: str, changes: dict[str, Any], words: str) -> None:
    _, faults = judge(kind, answer_of(kind, **changes), shown())
    assert any(words in fault for fault in faults), faults


def test_are_small_differences_of_other_kernels_let_pass() -> None:
    assert judge("vllm", answer_of("vllm", **moved("vllm", 5e-5)), shown())[1] == []
    assert judge("llama_cpp", answer_of("llama_cpp", perplexity=3.02), shown())[1] == []


def test_is_a_control_that_nobody_notices_a_fault() -> None:
    row = Row(consumer="c", model="m", told="logits bit-equal")
    assert consumers.as_control(row).faults == ("a wrong rotary layout was not noticed",)
    noticed = consumers.as_control(Row(consumer="c", model="m", told="", faults=("they differ",)))
    assert (noticed.faults, noticed.told) == ((), "noticed: they differ")
    skipped = Row(consumer="c", model="m", told="", skipped="no room")
    assert consumers.as_control(skipped) == skipped


def test_does_the_table_say_what_fails_and_what_was_skipped() -> None:
    rows = [
        Row(consumer="a", model="m", told="fine"),
        Row(consumer="b", model="m", told="", faults=("one", "two")),
        Row(consumer="c", model="m", told="", skipped="no room"),
    ]
    assert markdown(rows).splitlines()[2:] == [
        "| a | m | fine |",
        "| b | m | **fails**: one; two |",
        "| c | m | skipped: no room |",
    ]


def test_are_the_last_words_of_a_consumer_kept(tmp_path: Path) -> None:
    """This interpreter has no llama.cpp, so it fails as one with a broken library does."""
    question = shown(gguf=tmp_path / "none.gguf").question(1)
    answer, failure = ask(Path(sys.executable), "nobody", question, tmp_path)
    assert answer is None
    assert "KeyError: 'nobody'" in failure


def test_is_an_environment_built_once_and_a_failure_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def run(command: list[str]) -> str:
        calls.append(command)
        (tmp_path / "c").mkdir(exist_ok=True)
        return f"{tmp_path / 'c'}\n"

    monkeypatch.setattr(consumers_venvs, "_run", run)
    consumer = Consumer(
        name="c", kind="vllm", requirements=("a==1",), unwanted=("b",), named={"d": "2"}
    )
    python = python_of(consumer, tmp_path)
    assert python == tmp_path / "c" / "bin" / "python"
    assert [call[-1] for call in calls[1:3]] == ["a==1", "b"]
    assert "Version: 2" in (tmp_path / "c" / "d-2.dist-info" / "METADATA").read_text()
    made = len(calls)
    assert python_of(consumer, tmp_path) == python
    assert len(calls) == made
    python_of(Consumer(name="c", kind="vllm", requirements=("a==2",)), tmp_path)
    assert len(calls) > made
    monkeypatch.undo()
    with pytest.raises(NotBuiltError, match="No such file"):
        consumers_venvs._run([str(tmp_path / "nothing")])
    with pytest.raises(NotBuiltError, match="last words"):
        consumers_venvs._run([sys.executable, "-c", "import sys; sys.exit('last words')"])


def test_is_every_kind_of_consumer_there() -> None:
    assert {each.kind for each in CONSUMERS} == set(KINDS)
