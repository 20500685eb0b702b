"""Are flags checked before anything is opened?"""

from __future__ import annotations

import json
import re
import socket
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardb
from serve.catalogue import Catalogue, StoreSource
from serve.chat_template import adapter
from serve.start import (
    StartOptions,
    api_keys_of,
    check_served,
    is_loopback,
    limits_of,
    listening_socket,
    scheduler_options_of,
    serve,
    sources_of,
    template_of_flag,
    tokenizer_files_of,
)
from tests.support.byte_model import MODEL, byte_tokenizer, small_store
from trainer.errors import InputError


def options(**more: Any) -> StartOptions:
    return StartOptions(store="run", **more)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("port", -1), ("port", 65536), ("max_queue", -1), ("max_running", 0)),
        *(("request_seconds", 0.0), ("reader_seconds", float("nan")), ("prefill_chunk", 0)),
    ],
)
def test_are_numbers_checked(field: str, value: float) -> None:
    with pytest.raises(InputError, match="--" + field.replace("_", "-")):
        options(**{field: value})


def test_do_flags_become_limits_and_options() -> None:
    given = options(max_running=3, max_queue=5, max_body_bytes="1KB", max_resident_bytes="0")
    limits = limits_of(given)
    assert (limits.answers_running, limits.answers_queued, limits.body_bytes) == (3, 5, 1000)
    assert scheduler_options_of(given).max_resident_bytes == 0
    assert scheduler_options_of(given).max_requests_per_sweep == 3
    assert scheduler_options_of(options()).max_resident_bytes is None


def test_which_stores_are_served() -> None:
    def roles(**more: Any) -> list[tuple[str, str, str | None]]:
        return [(source.role, source.path, source.ref) for source in sources_of(options(**more))]

    assert roles() == [("primary", "run", None)]
    assert roles(backup_ref="step-1") == [("primary", "run", None), ("backup", "run", "step-1")]
    assert roles(backup_store="old", ref="a")[1] == ("backup", "old", None)


def test_are_files_of_flags_read(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n\n  two \n")
    assert api_keys_of(options(api_key=["zero"], api_key_file=str(keys))) == (
        "zero",
        "one",
        "two",
    )
    keys.write_text("\n")
    with pytest.raises(InputError, match="no key"):
        api_keys_of(options(api_key_file=str(keys)))
    with pytest.raises(InputError, match="no such file"):
        api_keys_of(options(api_key_file=str(tmp_path / "none")))
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        tokenizer_files_of(options(tokenizer=str(tmp_path)))
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    assert tokenizer_files_of(options(tokenizer=str(tmp_path))) == {"tokenizer.json": b"{}"}
    template = tmp_path / "template"
    template.write_text("{{ messages }}")
    assert template_of_flag(options(chat_template=str(template))) is not None
    assert template_of_flag(options()) is None


def test_which_addresses_are_this_machine_alone() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.0.1", "example.org")))


def test_is_a_taken_port_told_before_anything_slow(tmp_path: Path) -> None:
    run = small_store(tmp_path / "run")
    with listening_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"port {port}"):
            serve(StartOptions(store=str(run), port=port), lambda _: None)
    assert socket.socket().connect_ex(("127.0.0.1", port)) != 0


BYTES = b"\xf1\x80"
BROKEN_FILES = {
    "tokenizer.json": (BYTES, b"{", b"[]", b"{}"),
    "tokenizer_config.json": (BYTES, b"{", b"[]", b"[" * 100_000),
    "generation_config.json": (BYTES, b"{", b"7"),
    "chat_template.jinja": (BYTES,),
}


@pytest.mark.parametrize(
    ("name", "data"),
    [(name, data) for name, contents in BROKEN_FILES.items() for data in contents],
    ids=lambda value: str(value[:6]),
)
def test_is_a_broken_file_of_a_tokenizer_named(tmp_path: Path, name: str, data: bytes) -> None:
    run = small_store(tmp_path / "run")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes(byte_tokenizer())
    (folder / name).write_bytes(data)
    with pytest.raises(InputError, match=f"{re.escape(name)} cannot be read"):
        serve(StartOptions(store=str(run), port=0, tokenizer=str(folder)), lambda _: None)


def test_is_a_template_that_is_no_text_named(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_bytes(BYTES)
    with pytest.raises(InputError, match=r"chat\.jinja cannot be read"):
        template_of_flag(options(chat_template=str(template)))


@pytest.mark.parametrize("role", ["primary", "backup"])
def test_is_a_model_without_a_tokenizer_refused_at_the_start(tmp_path: Path, role: str) -> None:
    bare = tmp_path / "bare"
    with shardb.open(bare, create=True) as store, store.begin() as transaction:
        model = np.frombuffer(json.dumps(MODEL.to_json()).encode(), dtype=np.uint8)
        transaction.write("meta/model", {"json": model}, trainable=False)
        transaction.commit(step=1)
    sources = [StoreSource(role=role, path=str(bare))]
    with (
        closing(Catalogue(sources, follow=False, chat=adapter("plain"))) as catalogue,
        pytest.raises(InputError, match=f"{role}, the store bare: .* --tokenizer DIR"),
    ):
        check_served(catalogue)
