"""Does every path answer in the shape that clients read, errors and unknown routes included?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve.chat_template import TemplateFormat
from serve.limits import Limits
from shardb.errors import ObjectCorruptError
from tests.support.byte_model import BEGIN_ID, SPECIAL, WINDOW, ids_of, small_store
from tests.support.byte_server import ByteServer, byte_server, says
from tests.support.http_client import read_all, wait_for

TEXT = "Hello é 猫 😀, world"
PROMPT = {"model": "primary", "prompt": "hi", "max_tokens": 100}
CHAT = {"model": "primary", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_store(tmp_path_factory.mktemp("serve") / "run", [1, 2])


@pytest.fixture
def server(store: Path) -> Iterator[ByteServer]:
    with byte_server(store, says(TEXT), backup=store) as opened:
        yield opened


ERRORS: list[tuple[str, str, Any, int, str]] = [
    ("GET", "/nope", None, 404, "unknown_url"),
    ("POST", "/v1/nope", {}, 404, "unknown_url"),
    ("GET", "/v1/", None, 404, "unknown_url"),
    ("GET", "/page/../../etc/passwd", None, 404, "unknown_url"),
    ("GET", "/page/%2e%2e/cli.py", None, 404, "unknown_url"),
    ("DELETE", "/v1/models", None, 405, "method_not_supported"),
    ("GET", "/v1/completions", None, 405, "method_not_supported"),
    ("GET", "/v1/models/nope", None, 404, "model_not_found"),
    ("GET", "/v1/models/..%2f..%2fetc%2fpasswd", None, 404, "model_not_found"),
    ("POST", "/v1/completions", b"{", 400, "invalid_json"),
    ("POST", "/v1/completions", {**PROMPT, "model": "nope"}, 404, "model_not_found"),
    ("POST", "/v1/completions", {**PROMPT, "prompt": ""}, 400, "empty_prompt"),
    ("POST", "/v1/completions", {**PROMPT, "prompt": []}, 400, "invalid_value"),
    ("POST", "/v1/completions", {**PROMPT, "prompt": [[]]}, 400, "empty_prompt"),
    ("POST", "/v1/completions", {**PROMPT, "prompt": [5, 9999]}, 400, "invalid_value"),
    ("POST", "/v1/completions", {**PROMPT, "prompt": "x" * 999}, 400, "context_length_exceeded"),
    ("POST", "/v1/completions", {**PROMPT, "max_tokens": 999}, 400, "context_length_exceeded"),
    ("POST", "/v1/completions", {**PROMPT, "stop": "\udfff"}, 400, "invalid_value"),
    ("POST", "/v1/completions", {**PROMPT, "logit_bias": {"9999": 1}}, 400, "invalid_value"),
    (
        "POST",
        "/v1/chat/completions",
        {**CHAT, "messages": [{"role": "king", "content": "x"}]},
        400,
        "invalid_value",
    ),
    ("GET", "/run?store=nope", None, 404, "store_not_found"),
    ("GET", "/run?branch=../../x", None, 404, "branch_not_found"),
    ("POST", "/compare", {"prompt": "x", "models": ["primary", "nope"]}, 404, "model_not_found"),
]


def test_has_every_failure_one_shape(server: ByteServer) -> None:
    for method, path, body, status, code in ERRORS:
        answer = server.ask(path, body, method=method)
        assert (answer.status, answer.error["code"]) == (status, code), (path, answer.data)
        assert answer.headers["x-request-id"].startswith("req_")
    server.wait_until_idle()
    assert server.ask("/v1/completions", PROMPT).json["choices"][0]["text"] == TEXT


def test_does_a_long_prompt_tell_both_counts(server: ByteServer) -> None:
    error = server.ask("/v1/completions", {**PROMPT, "prompt": "x" * 300}).error
    for count in (WINDOW, 401, 301, 100):  # window, all, prompt with its beginning, completion
        assert str(count) in error["message"]


def test_is_the_request_id_given_back(server: ByteServer) -> None:
    mine = {"x-request-id": "trace-42"}
    assert server.ask("/health", headers=mine).headers["x-request-id"] == "trace-42"
    odd = server.ask("/health", headers={"x-request-id": "a b"}).headers["x-request-id"]
    assert odd.startswith("req_")


@pytest.mark.parametrize("extra", [{}, {"stream": True, "stream_options": {"include_usage": True}}])
def test_is_a_whole_answer_that_of_its_events(server: ByteServer, extra: dict[str, Any]) -> None:
    body = {**PROMPT, "prompt": ["hi", ids_of("hi")], "n": 2, "logprobs": 1, "echo": True}
    answer = server.ask("/v1/completions", {**body, **extra})
    rows = answer.events if extra else [answer.json]
    texts, tokens = [""] * 4, [[] for _ in range(4)]
    for row in rows:
        for choice in row["choices"]:
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += choice["logprobs"]["tokens"]
    assert texts == ["hi" + TEXT] * 4
    made = len(ids_of(TEXT))
    assert [len(found) for found in tokens] == [3 + made, 3 + made, 2 + made, 2 + made]
    usage = rows[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3 + 2, 4 * len(ids_of(TEXT)))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert {row["system_fingerprint"] for row in rows} == {rows[0]["system_fingerprint"]}


@pytest.mark.parametrize("stop", ["wor", "é 猫 😀", "猫", ", world!"])
def test_does_a_stop_string_end_both_forms(server: ByteServer, stop: str) -> None:
    expected = TEXT.split(stop)[0]
    whole = server.ask("/v1/chat/completions", {**CHAT, "stop": ["zzz", stop]}).json
    assert whole["choices"][0]["message"]["content"] == expected
    assert whole["choices"][0]["finish_reason"] == "stop"
    events = server.ask("/v1/chat/completions", {**CHAT, "stop": stop, "stream": True}).events
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content") or "" for delta in deltas) == expected
    finishes = [event["choices"][0]["finish_reason"] for event in events]
    assert finishes == [None] * (len(events) - 1) + ["stop"]
    server.wait_until_idle()


def test_is_work_stopped_at_a_stop_string(store: Path) -> None:
    with byte_server(store, says("ab" * 100), sweep_seconds=0.001) as server:
        body = {**PROMPT, "stop": "ba", "max_tokens": 200}
        assert server.ask("/v1/completions", body).json["usage"]["completion_tokens"] == 3
        server.wait_until_idle()
        assert server.scheduler.ended == ["cancelled"]
        assert server.scheduler.sweeps < 50


def test_does_best_of_choose(server: ByteServer) -> None:
    answer = server.ask("/v1/completions", {**PROMPT, "best_of": 3, "n": 1, "seed": 5}).json
    assert len(answer["choices"]) == 1
    assert answer["usage"]["completion_tokens"] == 3 * len(ids_of(TEXT))
    assert [asked.parameters.seed for asked in server.scheduler.asked] == [5, 6, 7]


def test_may_a_prompt_alone_be_scored(server: ByteServer) -> None:
    body = {**PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0}
    choice = server.ask("/v1/completions", body).json["choices"][0]
    assert choice["text"] == "hi"
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]


def test_is_a_typed_control_token_text(store: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    with byte_server(store, says("x"), chat=TemplateFormat(template, {})) as server:
        typed = f"a{SPECIAL[2]}{SPECIAL[0]}"
        body = {**CHAT, "messages": [{"role": "user", "content": typed}]}
        assert server.ask("/v1/chat/completions", body).status == 200
        assert server.ask("/v1/completions", {**PROMPT, "prompt": typed}).status == 200
        marked = {**PROMPT, "prompt": typed, "parse_special_tokens": True}
        assert server.ask("/v1/completions", marked).status == 200
        chat, plain, meant = [list(asked.prompt_ids) for asked in server.scheduler.asked]
        assert chat == [1, *ids_of(typed), 2]
        assert plain == [BEGIN_ID, *ids_of(typed)]
        assert meant == [*ids_of("a"), 2, 0]


def test_does_the_plain_adapter_end_where_the_user_speaks(store: Path) -> None:
    with byte_server(store, says(" Fine.\nUser: and you?")) as server:
        choice = server.ask("/v1/chat/completions", CHAT).json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (" Fine.", "stop")


def test_are_two_commits_compared(server: ByteServer) -> None:
    server.scheduler.script = lambda asked: ids_of("same " + "ab"[asked.pinned.commit.step - 1])
    found = server.ask("/compare", {"prompt": "hi", "models": ["run@step-1", "primary"]}).json
    assert [(side["step"], side["text"]) for side in found["results"]] == [
        (1, "same a"),
        (2, "same b"),
    ]
    parted = found["first_difference"]
    assert (found["common_tokens"], parted["index"]) == (5, 5)
    assert [side["token"] for side in parted["sides"]] == ["a", "b"]
    assert parted["sides"][0]["logprobs"] == [-0.5, -1.5]  # b was the second likeliest there
    assert found["logprob_difference"] == 0


def test_is_the_native_route_streamed_too(server: ByteServer) -> None:
    whole = server.ask("/generate", {"prompt": "hi", "max_new_tokens": 3}).json
    assert (whole["text"], whole["finish_reason"], whole["step"]) == ("Hel", "length", 2)
    events = server.ask("/generate", {"prompt": "hi", "stream": True}).events
    assert "".join(event["text"] for event in events) == TEXT
    assert events[-1]["usage"]["completion_tokens"] == len(ids_of(TEXT))


def test_what_is_told_of_the_server(server: ByteServer) -> None:
    health = server.ask("/health").json
    assert health["status"] == "ok"
    assert health["models"]["backup"]["verified_shard"] == "params/block_000"
    listed = [row["id"] for row in server.ask("/v1/models").json["data"]]
    assert listed[:2] == ["primary", "backup"]
    assert {"primary@main", "primary@step-1", "backup@step-2"} <= set(listed)
    for name in [*listed, "run@step-1", "step-1", health["models"]["primary"]["commit"]]:
        assert server.ask(f"/v1/models/{name}").json["id"] == name
    [first, _] = server.ask("/models").json["models"]
    assert (first["snapshots"], first["retained_steps"]) == ({"step-1": 1, "step-2": 2}, [1, 2])
    run = server.ask("/run").json
    assert (run["step"], run["series"]["loss"]) == ([1, 2], [3.9, 3.8])
    assert 'model_step{role="primary",store="run"} 2' in server.ask("/metrics").data.decode()


def test_is_a_key_asked_for_everywhere_but_where_it_must_not_be(store: Path) -> None:
    with byte_server(store, says("x"), api_keys=["secret"]) as server:
        right = {"authorization": "Bearer secret"}
        for path in ("/v1/models", "/models", "/run", "/metrics", "/nope", "/v1/models/primary"):
            answer = server.ask(path)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key"), path
            assert answer.headers["www-authenticate"] == "Bearer"
        assert server.ask("/v1/completions", PROMPT).status == 401
        assert server.ask("/v1/completions", PROMPT, headers=right).status == 200
        assert server.ask("/health").status == server.ask("/").status == 200


def test_is_a_damaged_commit_told_and_the_others_served(server: ByteServer) -> None:
    whole = {"model": "step-1", "prompt": "hi", "max_tokens": 4}
    server.scheduler.fault = ObjectCorruptError("/data/objects/x: bad digest")
    for body in (whole, {**whole, "stream": True}):
        answer = server.ask("/v1/completions", body)
        assert (answer.status, answer.error["code"]) == (503, "object_corrupt")
        assert "/data" not in answer.error["message"]
    server.scheduler.fault = None
    assert server.ask("/v1/completions", whole).status == 200


def test_does_a_late_failure_end_the_stream_with_an_error(store: Path) -> None:
    with byte_server(store, says(TEXT)) as server:
        server.scheduler.held.set()
        opened = server.open("/v1/completions", {**PROMPT, "stream": True})
        opened.settimeout(10)
        head = b""
        while b"\r\n\r\n:" not in head.replace(b"\r\n24\r\n", b"\r\n"):  # headers and a comment
            head += opened.recv(4096)
            if b"sweep" in head:
                break
        server.scheduler.fault = ObjectCorruptError("bad")
        server.scheduler.held.clear()
        wait_for(lambda: server.scheduler.ended == ["error"])
        opened.shutdown(1)
        rest = head + read_all(opened)
    assert rest.startswith(b"HTTP/1.1 200")
    assert b'"code":"object_corrupt"' in rest
    assert b"[DONE]" not in rest
    assert b"\n\n\r\n0\r\n\r\n" in rest


def test_do_comments_keep_a_silent_stream_alive(store: Path) -> None:
    limits = Limits(keep_alive_seconds=0.05)
    with byte_server(store, says("x"), limits=limits) as server:
        server.scheduler.held.set()
        opened = server.open("/v1/chat/completions", {**CHAT, "stream": True})
        heard = b""
        while heard.count(b": sweep") < 4:
            heard += opened.recv(4096)
        assert b"content-type: text/event-stream" in heard
        assert b"x-request-id" in heard
        assert b"1 running" in heard
        opened.close()
        server.wait_until_idle()
        assert server.scheduler.ended == ["cancelled"]
