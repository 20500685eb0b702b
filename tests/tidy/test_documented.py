"""Can what the documents show be typed, and do the figures of docs/testing.md fit one another?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tidy.documented import Known, calls_in, known, untrue_calls
from tests.tidy.remedies import flags_of_commands
from tests.tidy.source import project_files, python_sources, text_files
from tools.coverage_gate import modules
from tools.crash_campaign import plan
from tools.mutation import load


@pytest.fixture(scope="module")
def there() -> Known:
    return known(flags_of_commands(), python_sources())


def test_can_what_the_documents_show_be_typed(there: Known) -> None:
    documents = [(path, text) for path, text in text_files() if path.endswith(".md")]
    assert [fault for path, text in documents for fault in untrue_calls(path, text, there)] == []
    assert sum(1 for _, text in documents for _ in calls_in(text)) > 1_000, "they are read at all"


@pytest.mark.parametrize(
    ("text", "is_wrong"),
    [
        ("`train --store run`", False),
        ("`train --stores run`", True),
        ("`--micro-batchez 3`", True),
        ("`shardb frobnicate run`", True),
        ("`shardb log run --last 3`", True),
        ("`make demos`", True),
        ("`make demo TEKST=a`", True),
        ("`make demo TEXT=a`", False),
        ("`python -m tools.no_such`", True),
        ("`python -m tools.crash --image 3`", True),
        ("```sh\ntrain --store run \\\n  --stepz 3  # --seen\n```", True),
        ("```sh\ntrain --store run  # --not-read\n```", False),
        ("```text\ntrain --is-not-read\n```", False),
    ],
)
def test_is_an_untrue_call_caught(text: str, is_wrong: bool, there: Known) -> None:
    assert bool(untrue_calls("docs/a.md", text, there)) is is_wrong


@pytest.fixture(scope="module")
def testing(repository: Path) -> str:
    """What is told of the tests."""
    return (repository / "docs" / "testing.md").read_text()


def column(document: str, head: str, place: int) -> dict[str, int]:
    """Give a column of figures of the table whose first cell is `head`, by the rows' names."""
    table = document.split(f"| {head} |", 1)[1].split("\n\n", 1)[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()[2:]]
    return {row[0].strip("*"): int(row[place].strip("*").replace(",", "")) for row in rows}


@pytest.mark.parametrize("place", [2, 3, 4, 5])
def test_do_the_workloads_come_to_their_sum(testing: str, place: int) -> None:
    counted = column(testing, "workloads", place)
    assert counted.pop("all") == sum(counted.values())


@pytest.mark.parametrize("head", ["what the disk suffered", "index beside it"])
def test_does_each_table_of_states_come_to_the_same(testing: str, head: str) -> None:
    assert sum(column(testing, head, 1).values()) == column(testing, "workloads", 3)["all"]


def test_is_a_table_that_does_not_add_up_caught(testing: str) -> None:
    wrong = testing.replace("| missing |", "| missing | 1 |\n| also missing |")
    assert sum(column(wrong, "index beside it", 1).values()) != column(wrong, "workloads", 3)["all"]


def test_are_the_workloads_mutants_and_modules_those_there_are(testing: str) -> None:
    told = {
        "faults": re.findall(r"names (\d+) faults", testing)
        + re.findall(r"of (\d+), the", testing),
        "modules": re.findall(r"(\d+) modules", testing),
        "workloads": re.findall(r"operations in ([\d,]+) workloads", testing),
    }
    assert {name: set(figures) for name, figures in told.items()} == {
        "faults": {str(len(load()))},
        "modules": {str(len(modules()))},
        "workloads": {f"{len(plan(0)):,}"},
    }


def test_is_every_package_described(repository: Path) -> None:
    told = (repository / "docs" / "architecture.md").read_text()
    packages = {p.rpartition("/")[0] for p in project_files() if p.endswith("/__init__.py")}
    assert [p for p in sorted(packages - {"tests"}) if f"| `{p}/` |" not in told] == []
    assert {"shardb/testing", "trainer/lora"} <= packages
