"""A real browser without a screen, driven over a pipe in its own debugging protocol.

Source of the protocol: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sand" + "box", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-sync", "--remote-debugging-pipe"),
)
WAIT_SECONDS = 60.0


def installed_browser() -> str:
    """Find a browser, or skip."""
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    pytest.skip(f"no browser is installed: {', '.join(BROWSERS)}")


class Tab:
    """One page; `console` is everything it complained of."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._held = b""
        self._count = 0
        self._session: str | None = None
        self.console: list[str] = []
        self.hosts: set[str] = set()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Ask the browser, and wait for its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._count:
                assert "error" not in told, told
                return told["result"]
            self._note(told)

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page; a promise is waited for."""
        result = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until an expression holds."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"never held: {condition}; {self.console}"
            time.sleep(0.05)

    def open(self, url: str) -> None:
        """Go to a page and wait until it is there."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def picture(self, path: Path, *, width: int = 1180, height: int = 1060) -> None:
        """Write what the page looks like."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._from], [], [], WAIT_SECONDS)
            assert ready, "the browser does not answer"
            part = os.read(self._from, 1 << 16)
            assert part, "the browser is gone"
            self._held += part
        data, _, self._held = self._held.partition(b"\0")
        return dict(json.loads(data))

    def _note(self, told: dict[str, Any]) -> None:
        method, parameters = told.get("method"), told.get("params", {})
        if method == "Runtime.consoleAPICalled":
            self.console.append(str(parameters["args"]))
        elif method == "Runtime.exceptionThrown":
            self.console.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded":
            self.console.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = parameters["request"]["url"]
            self.hosts |= set() if url.startswith("data:") else {url.split("/")[2]}


@contextmanager
def browser_tab(browser: str, profile: Path) -> Iterator[Tab]:
    """Open a browser with one empty page."""
    commands_in, commands_out = os.pipe()
    answers_in, answers_out = os.pipe()
    # The browser reads from 3 and writes to 4.
    line = f'exec "$0" "$@" 3<&{commands_in} 4>&{answers_out}'
    process = subprocess.Popen(
        ["bash", "-c", line, browser, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(commands_in, answers_out),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands_in)
    os.close(answers_out)
    try:
        yield Tab(commands_out, answers_in)
    finally:
        process.kill()
        process.wait()
        os.close(commands_out)
        os.close(answers_in)
