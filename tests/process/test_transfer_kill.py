"""Does a copy that is killed at a random moment leave both stores whole, and the next one go on?"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import shardb
from tests.support.commands import Ask
from tests.support.transfer_kill import check_clean, is_staging, killed_when
from tests.support.transfer_stores import commit, contents, told_steps

SIZE_BYTES = 16 << 20


@pytest.mark.parametrize("verb", ["push", "pull", "clone"])
def test_does_a_killed_copy_go_on(verb: str, tmp_path: Path, ask: Ask) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    with shardb.open(source, create=True) as store:
        commit(store, 0, size=SIZE_BYTES)
        store.create_snapshot("first")
        commit(store, 1, size=SIZE_BYTES)
        expected, head = contents(store), store.resolve("main").id
    words = {
        "push": ["push", source, target],
        "pull": ["pull", target, source],
        "clone": ["clone", source, target],
    }[verb]
    chance = random.Random()
    died = 0
    for delay_seconds in (0.0, chance.uniform(0, 0.06)):
        died += killed_when(words, lambda: is_staging(target), delay_seconds)
        check_clean(source)
        check_clean(target)
    assert died, "no kill came in time; is the machine so fast? enlarge SIZE_BYTES"
    done = ask(*words)
    assert done.code == 0, done.err
    with shardb.open(target) as copied:
        assert copied.resolve("main").id == head
        assert contents(copied) == expected
        assert told_steps(copied) == [0, 1]
        if verb == "clone":
            assert copied.snapshots()["first"].step == 0
    check_clean(target)


def test_do_pushes_to_a_directory_survive_a_kill(tmp_path: Path, ask: Ask) -> None:
    source, place, copy = tmp_path / "source", tmp_path / "place", tmp_path / "copy"
    with shardb.open(source, create=True) as store:
        commit(store, 0, size=SIZE_BYTES)
        expected = contents(store)
    words = ["push", source, place.as_uri()]
    chance = random.Random()
    killed_when(words, (place / "objects").exists, chance.uniform(0, 0.06))
    check_clean(source)
    assert ask(*words).code == 0
    assert ask("pull", copy, place.as_uri()).code == 0
    with shardb.open(copy) as copied:
        assert contents(copied) == expected
