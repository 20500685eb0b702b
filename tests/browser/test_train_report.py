"""Does the report draw its curves in a real browser, and without an error?"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.training import arguments, make_data, train_here
from trainer.report_html import page
from trainer.report_html_data import report_data

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sand" + "box", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-sync", "--enable-logging=stderr"),
)
STEPS = 6


@pytest.fixture(scope="module")
def browser() -> str:
    """Find a browser that runs without a screen."""
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    pytest.skip(f"no browser is installed: {', '.join(BROWSERS)}")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Give the page of a short run."""
    folder = tmp_path_factory.mktemp("run")
    data = make_data(folder / "data")
    more = ("--val-data-dir", str(data / "val"), "--validate-every", "2", "--snapshot-every", "3")
    flags = arguments(folder / "run", data, "--max-steps", str(STEPS), *more)
    assert train_here(flags) == 0
    return page(report_data(folder / "run", "main"))


def rendered(browser: str, text: str, folder: Path) -> tuple[str, list[str]]:
    """Load a page; give the document after its script ran, and what the console said."""
    file = folder / "page.html"
    file.write_text(text, encoding="utf-8")
    ended = subprocess.run(
        [browser, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return ended.stdout, [line for line in ended.stderr.splitlines() if "CONSOLE" in line]


def test_every_curve_has_points_and_the_console_is_silent(
    browser: str, text: str, tmp_path: Path
) -> None:
    document, console = rendered(browser, text, tmp_path)
    assert console == []
    curves = {
        name: points.split()
        for name, points in re.findall(
            r'<polyline class="curve" data-name="([^"]+)"[^>]* points="([^"]*)"', document
        )
    }
    assert len(curves["loss"]) == STEPS
    assert len(curves["validation loss"]) == STEPS // 2
    assert {"learning rate", "norm", "tokens a second", "process", "percent"} <= set(curves)
    assert all(len(points) > 1 for points in curves.values())
    assert "NaN" not in "".join(re.findall(r"<svg.*?</svg>", document, re.DOTALL))
    assert document.count('class="cell"') == 5 * STEPS
    assert document.count('class="area"') > 3
    assert document.count('class="event"') >= 2


def test_control_a_broken_script_is_noticed(browser: str, text: str, tmp_path: Path) -> None:
    broken = text.replace("function timeline() {", "function timeline() { missing();", 1)
    document, console = rendered(browser, broken, tmp_path)
    assert any("missing" in line for line in console)
    assert 'class="event"' not in document
