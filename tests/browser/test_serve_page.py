"""Does the page write, chat, compare and show the run in a real browser, and ask no other host?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve.page import FILES, POLICY
from tests.support.browser import Tab, browser_tab, installed_browser
from tests.support.byte_model import ids_of, small_store
from tests.support.byte_server import Asked, ByteServer, byte_server

STEPS = 6


def script(asked: Asked) -> list[int]:
    """Say something of the step, so that two commits differ."""
    step = asked.pinned.commit.step
    return ids_of(f" there was {'a small 猫' if step < STEPS else 'an old king'} <b>{step}</b>.")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ByteServer]:
    store = small_store(tmp_path_factory.mktemp("page") / "run", range(1, STEPS + 1))
    with byte_server(store, script, backup=store) as opened:
        yield opened


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    browser = installed_browser()
    with browser_tab(browser, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def fill(tab: Tab, name: str, value: str) -> None:
    tab.run(f"document.getElementById({name!r}).value = {json.dumps(value)}")


def go(tab: Tab, form: str) -> None:
    tab.run(f"document.querySelector('#{form} .go').click()")


def text(tab: Tab, name: str) -> str:
    return str(tab.run(f"document.getElementById({name!r}).textContent"))


def check_quiet(tab: Tab, server: ByteServer) -> None:
    assert tab.console == []
    assert tab.hosts == {f"127.0.0.1:{server.port}"}


def test_writing_on(tab: Tab, server: ByteServer) -> None:
    tab.open(f"{server.url}/#write")
    tab.wait_for("document.querySelector('#state.good')")
    assert text(tab, "state") == f"run · main · step {STEPS}"
    fill(tab, "prompt", "Once <i>upon</i>")
    go(tab, "write-form")
    said = f"Once <i>upon</i> there was an old king <b>{STEPS}</b>."
    tab.wait_for(f"document.getElementById('written').textContent === {json.dumps(said)}")
    tab.wait_for("document.querySelector('#write-form .note').textContent.includes('stop')")
    assert tab.run("document.querySelectorAll('#written b, #written i').length") == 0
    check_quiet(tab, server)


def test_chatting_with_another_commit(tab: Tab, server: ByteServer) -> None:
    tab.open(f"{server.url}/#write")
    tab.wait_for("document.querySelectorAll('#models option').length > 6")
    tab.run("document.querySelector('[data-tab=chat]').click()")
    fill(tab, "model", "run@step-1")
    fill(tab, "message", "Hello")
    go(tab, "chat-form")
    tab.wait_for("document.querySelector('#talk').textContent.includes('猫 <b>1</b>.')")
    tab.wait_for("!document.querySelector('#chat-form .go').disabled")
    fill(tab, "message", "More")
    go(tab, "chat-form")
    tab.wait_for("document.querySelectorAll('#talk .said').length === 4")
    tab.wait_for("!document.querySelector('#chat-form .go').disabled")
    assert bytes_of(server.scheduler.asked[-1].prompt_ids).count(b"User:") == 2
    check_quiet(tab, server)


def bytes_of(ids: tuple[int, ...]) -> bytes:
    letters = {token: bytes([byte]) for byte in range(256) for token in ids_of(bytes([byte]))}
    return b"".join(letters.get(token, b"") for token in ids)


def test_comparing_two_commits(tab: Tab, server: ByteServer) -> None:
    tab.open(f"{server.url}/#compare")
    tab.wait_for("document.querySelectorAll('#models option').length > 6")
    tab.run("document.querySelector('[data-tab=compare]').click()")
    fill(tab, "first", "step-2")
    fill(tab, "second", "backup")
    go(tab, "compare-form")
    tab.wait_for("!document.getElementById('verdict').hidden")
    assert "The first token that differs is number 13" in text(tab, "verdict")
    marks = tab.run("[...document.querySelectorAll('.side mark')].map((m) => m.textContent)")
    assert marks == [" small 猫 <b>2</b>.", f"n old king <b>{STEPS}</b>."]
    check_quiet(tab, server)


def test_seeing_the_run(tab: Tab, server: ByteServer) -> None:
    tab.open(f"{server.url}/#run")
    tab.run("document.querySelector('[data-tab=run]').click()")
    tab.wait_for("document.querySelector('#curve polyline.train')")
    points = tab.run("document.querySelector('#curve polyline.train').getAttribute('points')")
    assert len(points.split()) == STEPS
    assert "NaN" not in tab.run("document.querySelector('#curve').outerHTML")
    assert tab.run("document.querySelectorAll('#curve .pin').length") == STEPS
    assert tab.run("document.querySelectorAll('#names tr').length") == 1 + 1 + STEPS
    assert "stages stay in memory" in text(tab, "resident")
    tab.run("document.querySelector('#commits button').click()")
    assert tab.run("document.getElementById('tab-write').hidden") is False
    assert tab.run("document.getElementById('model').value").startswith("primary@")
    check_quiet(tab, server)


def test_is_a_key_asked_for(tab: Tab, tmp_path: Path) -> None:
    with byte_server(small_store(tmp_path / "run"), script, api_keys=["secret"]) as guarded:
        tab.open(f"{guarded.url}/#write")
        tab.wait_for("!document.getElementById('key-form').hidden")
        fill(tab, "key", "secret")
        tab.run("document.getElementById('key-form').requestSubmit()")
        tab.wait_for("document.querySelectorAll('#models option').length > 0")
        assert tab.run("document.getElementById('key-form').hidden") is True
        assert tab.hosts >= {f"127.0.0.1:{guarded.port}"}
    tab.console.clear()
    tab.hosts.clear()


def test_is_a_failure_shown(tab: Tab, server: ByteServer) -> None:
    tab.open(f"{server.url}/#write")
    fill(tab, "model", "nope")
    go(tab, "write-form")
    tab.wait_for("document.querySelector('#write-form .note.bad')")
    assert "does not exist" in tab.run("document.querySelector('#write-form .note').textContent")
    assert any("404" in line for line in tab.console)  # the control: the console is listened to
    tab.console.clear()


def test_control_a_foreign_script_is_not_run(tab: Tab, server: ByteServer) -> None:
    tab.open(f"{server.url}/#write")
    tab.run(
        "document.body.append(Object.assign(document.createElement('script'),"
        " {textContent: 'window.broken = 1'}))"
    )
    assert tab.run("window.broken") is None
    tab.wait_for("true")
    assert any("Content Security Policy" in line for line in tab.console)
    tab.console.clear()


def test_are_the_files_of_the_page_these(server: ByteServer) -> None:
    for path in FILES:
        answer = server.ask(path)
        assert answer.headers["content-security-policy"] == POLICY
        assert b"http://www.w3.org/2000/svg" in answer.data or b"http" not in answer.data
