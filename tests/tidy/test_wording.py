"""Do the texts speak of the project alone, and does what they name exist?"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tidy.source import PACKAGES, project_files, text_files
from tests.tidy.wording import (
    FOREIGN_WORDS,
    broken_links,
    console_scripts,
    foreign_words,
    missing_files,
    undocumented_commands,
)


def documents(repository: Path) -> list[str]:
    """Give the text of the README and of everything under docs/."""
    return [(repository / p).read_text() for p in project_files() if p.endswith(".md")]


def test_do_the_texts_speak_of_the_project_alone() -> None:
    assert [finding for path, text in text_files() for finding in foreign_words(path, text)] == []


@pytest.mark.parametrize("word", FOREIGN_WORDS)
def test_is_a_foreign_word_caught(word: str) -> None:
    assert foreign_words("docs/a.md", f"see {word.upper()} for more") != []


def test_may_a_test_name_the_option_of_a_browser() -> None:
    flag = "--no-sand" + "box"
    assert foreign_words("tests/a.py", f"[{flag!r}]") == []
    assert foreign_words("tests/a.py", flag.removeprefix("--no-")) != []


def test_do_the_links_of_the_documents_lead_somewhere() -> None:
    assert [finding for path, text in text_files() for finding in broken_links(path, text)] == []


def test_is_a_broken_link_caught() -> None:
    assert broken_links("docs/a.md", "see [b](no-such-file.md#part)") != []
    assert broken_links("docs/a.md", "![b](no-such-picture.png)") != []
    assert broken_links("docs/a.md", "see [b](../README.md#part) and [c](#part)") == []


def test_do_the_documents_name_files_that_exist() -> None:
    assert [finding for path, text in text_files() for finding in missing_files(path, text)] == []


def test_is_a_missing_file_caught() -> None:
    assert missing_files("docs/a.md", "see `shardb/no_such_module.py`") != []
    assert missing_files("docs/a.md", "see `shardb/filesystem.py` and `tests/tidy`") == []


def test_is_every_command_documented(repository: Path) -> None:
    commands = console_scripts((repository / "pyproject.toml").read_text())
    assert "train" in commands
    assert undocumented_commands(commands, documents(repository)) == []


def test_is_an_undocumented_command_caught() -> None:
    commands = console_scripts('[project.scripts]\ntrain = "a:b"\nno-such-command = "a:b"')
    assert undocumented_commands(commands, ["type `train`"]) == [
        "no-such-command: no document mentions it"
    ]
    assert undocumented_commands(["train"], ["the trainer and train-data"]) != []


def test_does_the_readme_show_every_folder(repository: Path) -> None:
    readme = (repository / "README.md").read_text()
    folders = {path.split("/")[0] for path in project_files() if "/" in path}
    missing = [f for f in sorted(folders) if not f.startswith(".") and f"{f}/" not in readme]
    assert set(PACKAGES) <= folders
    assert missing == []
