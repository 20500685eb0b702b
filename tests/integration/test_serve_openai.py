"""Does the openai client work end to end, against a real model whose words are known?

The scripted model says `uó猫y😀z!` after a `Q`, one byte a token, and then ends; everything that
the API tells of that is exact.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk

from tests.support.byte_model import BEGIN_ID, END_ID, ids_of
from tests.support.http_client import HttpClient
from tests.support.spoken_server import API_KEY, SAID, spoken_server, write_spoken_store

EVENT_KEYS = {"id", "object", "created", "model", "system_fingerprint", "choices"}
USER_ENDS_WITH_Q: Any = [{"role": "user", "content": "say Q"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpClient]:
    store = write_spoken_store(tmp_path_factory.mktemp("openai") / "run")
    with spoken_server(store) as opened:
        yield opened


@pytest.fixture
def client(server: HttpClient) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0) as opened:
        yield opened


def test_models(client: openai.OpenAI) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert {"primary", "primary@main", "primary@step-1"} <= set(listed)
    found = client.models.retrieve("run@step-1")
    assert (found.object, found.owned_by) == ("model", "shardb")
    assert found.to_dict()["step"] == 1
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nope")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="run@step-2", prompt="Q", max_tokens=50, temperature=0, logprobs=2, echo=True
    )
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == ("Q" + SAID, "stop")
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (2, len(ids_of(SAID)))
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.tokens[:4] == ["<|im_start|>", "Q", "u", "bytes:\\xc3"]
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(p is not None and -0.01 < p <= 0 for p in logprobs.token_logprobs[2:])
    assert logprobs.text_offset == [0, 0, 1, 2, 2, 3, 3, 3, 4, 5, 5, 5, 5, 6, 7]
    commit = client.models.retrieve("step-2").to_dict()["commit"]
    assert answer.system_fingerprint == commit
    assert answer._request_id is not None
    assert answer._request_id.startswith("req_")


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="primary", messages=USER_ENDS_WITH_Q, temperature=0, logprobs=True, top_logprobs=1
    )
    [choice] = answer.choices
    assert (choice.message.content, choice.message.role) == (SAID, "assistant")
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert bytes(byte for token in content for byte in token.bytes or ()) == SAID.encode()
    assert all(token.top_logprobs[0].token == token.token for token in content)


@pytest.mark.parametrize("stop", [None, "y", "猫y", ["zzz", "😀z"]])
@pytest.mark.parametrize("n", [1, 3])
def test_streamed_chat_is_the_whole_one(client: openai.OpenAI, stop: Any, n: int) -> None:
    asked: Any = {"model": "primary", "messages": USER_ENDS_WITH_Q, "temperature": 0, "n": n}
    whole = client.chat.completions.create(**asked, stop=stop)
    stream = client.chat.completions.create(
        **asked, stop=stop, stream=True, stream_options={"include_usage": True}
    )
    texts, finishes, events = [""] * n, [None] * n, list(stream)
    for event in events:
        check_event(event.to_dict(), ChatCompletionChunk, "chat.completion.chunk")
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] == SAID.split(stop[-1] if isinstance(stop, list) else stop or "\0")[0]
    assert finishes == ["stop"] * n
    assert [event.choices == [] for event in events] == [False] * (len(events) - 1) + [True]
    assert events[-1].usage is not None
    assert whole.usage is not None
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({event.id for event in events}) == 1


def check_event(event: dict[str, Any], kind: Any, name: str) -> None:
    """Hold one event to the client's own schema, strictly, and to the keys of the API."""
    # The client's type of a completion knows the last event alone; before it the reason is null.
    ended = [{**c, "finish_reason": c["finish_reason"] or "stop"} for c in event["choices"]]
    is_text = kind is Completion
    kind.model_validate({**event, "choices": ended} if is_text else event, strict=True)
    assert set(event) - {"usage"} == EVENT_KEYS
    assert event["object"] == name
    assert len(event["choices"]) <= 1
    for choice in event["choices"]:
        inner = "delta" if name.startswith("chat") else "text"
        assert set(choice) == {"index", inner, "logprobs", "finish_reason"}


def test_streamed_completion(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="primary", prompt=["Q", "xQ"], max_tokens=4, top_p=0, stream=True, logprobs=1
    )
    texts = ["", ""]
    for event in stream:
        check_event(event.to_dict(), Completion, "text_completion")
        texts[event.choices[0].index] += event.choices[0].text
    assert texts == ["uó\ufffd"] * 2  # four tokens end inside a character


def test_control_an_event_out_of_shape_is_noticed() -> None:
    good = dict.fromkeys(EVENT_KEYS, "") | {"created": 1, "choices": []}
    good["object"] = "chat.completion.chunk"
    check_event(good, ChatCompletionChunk, "chat.completion.chunk")
    for change in ({"created": "1"}, {"choices": None}, {"more": 1}, {"object": "x"}):
        with pytest.raises((ValueError, AssertionError, TypeError)):
            check_event({**good, **change}, ChatCompletionChunk, "chat.completion.chunk")


def test_extra_fields(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="primary",
        prompt=[BEGIN_ID, *ids_of("Q")],
        max_tokens=20,
        extra_body={"top_k": 1, "ignore_eos": True, "skip_special_tokens": False},
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].text.startswith(SAID + "<|endoftext|>")


def test_seeds(client: openai.OpenAI) -> None:
    def texts(**more: Any) -> list[str]:
        flat = {"logit_bias": {str(token): -100 for token in [END_ID, *ids_of(SAID)]}}
        answer = client.completions.create(
            model="primary", prompt="Q", max_tokens=12, n=2, **flat, **more
        )
        return [choice.text for choice in answer.choices]

    same = texts(seed=5)
    assert same == texts(seed=5)
    assert same[0] != same[1]
    assert same != texts(seed=6)
    assert texts() != texts()


def test_errors(server: HttpClient, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="primary", prompt="x" * 500)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    assert long.value.type == "invalid_request_error"
    with pytest.raises(openai.AuthenticationError) as key:
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="no").models.list()
    assert key.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as path:
        client.images.generate(prompt="a cat")
    assert path.value.code == "unknown_url"
    king: Any = [{"role": "king", "content": "x"}]
    with pytest.raises(openai.BadRequestError) as role:
        client.chat.completions.create(model="primary", messages=king)
    assert role.value.param == "messages[0].role"
    assert client.completions.create(model="primary", prompt="Q", top_p=0).choices[0].text == SAID


def test_async_client_and_a_stream_left_early(server: HttpClient) -> None:
    async def work() -> tuple[str, list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=API_KEY) as client:
            stream = await client.completions.create(
                model="primary", prompt="Q", max_tokens=200, stream=True, temperature=0
            )
            first = await anext(aiter(stream))
            await stream.close()
            together = await asyncio.gather(
                *(
                    client.completions.create(model="primary", prompt="Q", temperature=0)
                    for _ in range(8)
                )
            )
            return first.choices[0].text, [answer.choices[0].text for answer in together]

    first, texts = asyncio.run(work())
    assert first == "u"
    assert texts == [SAID] * 8
