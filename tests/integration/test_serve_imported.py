"""Is an imported model served as its own package would have it?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from export.import_run import plan_import, run_import
from tests.support.http_client import HttpClient
from tests.support.live_serving import following_server


@pytest.fixture(scope="module")
def package(shared_data: Path) -> Path:
    return shared_data / "models" / "stories260K"


@pytest.fixture(scope="module")
def server(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpClient]:
    store = tmp_path_factory.mktemp("imported") / "run"
    run_import(plan_import(package), store)
    with following_server(store) as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(package: Path) -> Any:
    return json.loads((package / "reference.json").read_text())["greedy"]


def test_are_the_reference_texts_said(server: HttpClient, reference: Any) -> None:
    for row in reference:
        count = len(row["new_ids"])
        body = {"prompt": row["prompt"], "models": ["primary", "run@imported"]}
        found = server.ask("/compare", {**body, "max_new_tokens": count}).json
        first = found["results"][0]
        assert first["tokens"] == row["new_ids"]
        assert row["prompt"] + first["text"] == row["text"]
        assert first["usage"]["prompt_tokens"] == len(row["prompt_ids"])  # begun once
        assert found["first_difference"] is None
        assert found["logprob_difference"] == 0


def test_does_a_prompt_in_tokens_say_the_same(server: HttpClient, reference: Any) -> None:
    row = reference[0]
    body = {"model": "primary", "temperature": 0, "max_tokens": 20}
    texts = [
        server.ask("/v1/completions", {**body, "prompt": prompt}).json["choices"][0]["text"]
        for prompt in (row["prompt"], row["prompt_ids"])
    ]
    assert texts[0] == texts[1]
    assert row["text"].startswith(row["prompt"] + texts[0])
