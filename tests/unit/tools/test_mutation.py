"""Do the mutants fit the sources, is one that is noticed killed, and one that is not told?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import mutation
from tools.mutation import REPOSITORY, Edit, Mutant, StaleMutantError, load

MUTANTS = load()
MUTANTS_MIN = 40
# Their tests take a second.
CHEAP = ("branch-lock-not-taken", "rewind-loses-its-undo")


def test_are_there_enough_and_has_each_a_name_of_its_own() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= MUTANTS_MIN
    assert set(CHEAP) <= set(names)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_does_a_mutant_still_fit(mutant: Mutant) -> None:
    for file, text in mutant.sources(REPOSITORY).items():
        compile(text, file, "exec")
        assert text != (REPOSITORY / file).read_text(encoding="utf-8")
    for test in mutant.tests:
        assert (REPOSITORY / test.split("::")[0]).exists(), test


@pytest.mark.parametrize("find", ["no line of it", "import"])
def test_is_a_mutant_refused_that_does_not_fit(find: str) -> None:
    edit = Edit(file="shardb/locks.py", find=find, replace="pass")
    stale = Mutant(name="stale", fault="", edits=(edit,), tests=())
    with pytest.raises(StaleMutantError, match="not once"):
        stale.sources(REPOSITORY)


def _judge(place: Path, *words: str) -> tuple[int, Path]:
    verdicts = place / "verdicts.jsonl"
    return mutation.main([*words, "--file", str(verdicts), "--json"]), verdicts


def test_are_cheap_mutants_really_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [word for name in CHEAP for word in ("--only", name)]
    code, verdicts = _judge(tmp_path, *words)
    told = json.loads(capsys.readouterr().out)
    assert (code, told["killed"]) == (0, len(CHEAP)), told
    assert all(row["by"].startswith("tests/") for row in told["mutants"])
    before = verdicts.read_text()
    monkeypatch.setattr(mutation.Workshop, "try_mutant", None)  # nothing is tried a second time
    assert _judge(tmp_path, *words)[0] == 0
    assert verdicts.read_text() == before


def _table(place: Path, find: str, replace: str, test: str) -> str:
    path = place / "table.toml"
    path.write_text(
        f"[selections]\n[[mutants]]\nname = 'one'\nfault = 'f'\ntests = ['{test}']\n"
        f"[[mutants.edits]]\nfile = 'shardb/retention.py'\nfind = '{find}'\nreplace = '{replace}'\n"
    )
    return str(path)


RETENTION = "tests/unit/shardb/test_state.py::test_do_records_without_effect_change_nothing"


def test_is_a_survivor_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The control arm of the whole: what no test notices must not be called killed."""
    table = _table(tmp_path, "older = retained", "older = 1 and retained", RETENTION)
    assert _judge(tmp_path, "--table", table)[0] == 1
    [row] = json.loads(capsys.readouterr().out)["mutants"]
    assert (row["name"], row["outcome"]) == ("one", "survived")


def test_does_a_failing_test_prove_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tests that fail without a fault are refused before any mutant is tried."""
    table = _table(tmp_path, "older = retained", "older = 1 and retained", f"{RETENTION}_not")
    assert _judge(tmp_path, "--table", table)[0] == 1
    assert "without a fault" in capsys.readouterr().err


def test_is_an_unknown_name_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _judge(tmp_path, "--only", "nobody")[0] == 2
    assert "no mutant is called nobody" in capsys.readouterr().err
