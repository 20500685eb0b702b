"""Does nobody take a part of a list for the whole of it?"""

from __future__ import annotations

from pathlib import Path

import pytest

import shardb
from shardb import branching
from shardb.errors import NotFoundError
from shardb.listing import last_listed, listed
from shardb.retention import Policy
from tests.support.small_stores import fill_store


def test_is_what_is_left_out_counted() -> None:
    assert listed([]) == last_listed([]) == ""
    assert listed("abc", most=3) == last_listed("abc", most=3) == "a, b, c"
    assert listed("abcde", most=3) == "a, b, c and 2 more"
    assert last_listed("abcde", most=3) == "c, d, e and 2 before them"


def test_are_names_and_steps_of_a_store_counted(tmp_path: Path) -> None:
    with shardb.open(tmp_path / "run", create=True) as store:
        branching.set_policy(store, Policy(keep_last=14))
    fill_store(tmp_path / "run", range(14))
    with shardb.open(tmp_path / "run") as store:
        with pytest.raises(NotFoundError, match=r"steps: 2, 3, 4, .*, 12, 13 and 2 before them"):
            store.at(step=99)
        with pytest.raises(NotFoundError, match=r"there are: main, step-0, .*, step-10 and 3 more"):
            store.at(ref="qqqq")
