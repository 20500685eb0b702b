"""Do messages name a command that installs what is missing, as the README does?"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from shardb.extras import install

REPOSITORY = Path(__file__).resolve().parents[3]


def test_is_every_extra_that_messages_name_one_of_the_project() -> None:
    known = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    packages = ("shardb", "trainer", "export", "serve")
    sources = [path.read_text() for name in packages for path in (REPOSITORY / name).rglob("*.py")]
    named = {each for text in sources for each in re.findall(r"\binstall\([\"'](\w+)[\"']\)", text)}
    assert named <= known["optional-dependencies"].keys()
    assert len(named) >= 5
    assert not [text for text in sources if re.search(r"pip install ['\"]?shardb", text)]


def test_is_it_the_command_of_the_readme() -> None:
    assert install("serve").partition(" (")[0] in (REPOSITORY / "README.md").read_text()
