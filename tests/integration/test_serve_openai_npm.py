"""Does the npm client work end to end, without special handling?"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.spoken_server import API_KEY, spoken_server, write_spoken_store

SCRIPT = Path(__file__).with_name("openai_npm.mjs")


@pytest.fixture(scope="module")
def node() -> str:
    """Find node with the openai package, which NODE_PATH leads to."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("no node is installed")
    probe = [found, "-e", "require('openai')"]
    if subprocess.run(probe, capture_output=True, env=dict(os.environ)).returncode:
        pytest.skip("node has no package openai: `make serve-npm` gets it")
    return found


def test_does_the_npm_client_work(node: str, tmp_path: Path) -> None:
    with spoken_server(write_spoken_store(tmp_path / "run")) as server:
        ended = subprocess.run(
            [node, str(SCRIPT), server.url, API_KEY], capture_output=True, text=True, timeout=60
        )
    assert ended.returncode == 0, ended.stderr
    assert "cases hold" in ended.stdout


def test_control_another_text_is_noticed(node: str, tmp_path: Path) -> None:
    other = tmp_path / "openai_npm.mjs"
    other.write_text(SCRIPT.read_text().replace("uó猫y😀z!", "something else"))
    with spoken_server(write_spoken_store(tmp_path / "run")) as server:
        ended = subprocess.run(
            [node, str(other), server.url, API_KEY], capture_output=True, text=True, timeout=60
        )
    assert ended.returncode != 0
    assert "AssertionError" in ended.stderr
