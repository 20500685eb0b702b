"""Do cat and diff show what is in a commit and what changed between two?"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import shardb
from shardb.branching import create_branch
from shardb.cli import run as run_command
from tests.support.commands import Ask, check_refused
from tests.support.small_stores import SHARDS, flip_bit, object_of


@pytest.fixture
def odd(root: Path) -> Path:
    """Two steps: a shard that stays, one that moves, one that goes, one that comes, and a NaN."""
    with shardb.open(root, create=True) as store:
        for step in (1, 2):
            with store.begin() as txn:
                weights = np.array([3.0, 4.0 + 5 * (step - 1)], dtype=np.float32)
                spoilt = np.array([1.0, math.nan], dtype=np.float32)
                txn.write("params/a", {"w": weights, "count": np.array([step])})
                txn.write("params/b", {"w": spoilt, f"only-{step}": spoilt})
                if step == 1:
                    txn.write("meta/recipe", {"json": np.frombuffer(b"{}", np.uint8)},
                              trainable=False)  # fmt: skip
                else:
                    txn.write("params/new", {"w": weights})
                txn.commit(step=step)
        create_branch(store, "before", "step-1")
    return root


def test_does_cat_tell_every_tensor(ask: Ask, odd: Path) -> None:
    told = ask("cat", odd, "params/b", "--json").json
    assert (told["step"], told["shard"]) == (2, "params/b")
    assert told["tensors"]["w"] == {
        "dtype": "F32",
        "shape": [2],
        "norm": 1.0,
        "minimum": 1.0,
        "maximum": 1.0,
        "nan_count": 1,
        "infinite_count": 0,
    }
    text = ask("cat", odd, "before", "params/b").out
    assert "params/b of step 1" in text
    assert "1 NaN" in text
    assert "only-1" in text


def test_does_cat_write_a_tensor_as_it_is(odd: Path, capfdbinary: object) -> None:
    assert run_command(["cat", str(odd), "meta/recipe", "--raw", "json"]) == 0
    assert capfdbinary.readouterr().out == b"{}"  # type: ignore[attr-defined]


def test_are_wrong_names_told_with_near_ones(ask: Ask, odd: Path) -> None:
    check_refused(ask("cat", odd, "param/a"), 4, "did you mean params/a")
    check_refused(ask("cat", odd, "mian", "params/a"), 4, "did you mean main")
    check_refused(ask("cat", odd, "params/a", "--raw", "weight"), 4, "w")
    check_refused(ask("cat", odd), 2, "SHARD")
    check_refused(ask("cat", odd, "a", "b", "c"), 2, "too many arguments")
    check_refused(ask("cat", odd, "params/a", "--raw", "w", "--json"), 2)
    check_refused(ask("diff", odd), 2, "REF")
    check_refused(ask("diff", odd, "mian"), 4, "did you mean main")
    check_refused(ask("diff", odd, "a", "b", "c"), 2, "too many arguments")
    check_refused(ask("diff", "nowhere"), 4, "no store here")


def test_does_diff_tell_what_changed(ask: Ask, odd: Path) -> None:
    told = ask("diff", odd, "step-1", "main", "--json").json
    assert (told["from"]["step"], told["to"]["step"]) == (1, 2)
    shards = told["shards"]
    assert {name: shard["status"] for name, shard in shards.items()} == {
        "meta/recipe": "same",
        "params/a": "changed",
        "params/b": "changed",
        "params/new": "added",
    }
    assert shards["params/a"]["relative_change"] == 1.0
    assert shards["params/a"]["integers"] == {"count": 1}
    assert (shards["params/b"]["added"], shards["params/b"]["removed"]) == (["only-2"], ["only-1"])
    assert (shards["params/b"]["relative_change"], shards["params/b"]["nonfinite"]) == (0.0, 1)
    assert told["totals"]["params"]["change_norm"] == 5.0
    backward = ask("diff", odd, "main", "before", "--json").json["shards"]
    assert backward["params/new"]["status"] == "removed"
    assert backward["params/a"]["relative_change"] == pytest.approx(5 / math.sqrt(90))


def test_does_diff_print_a_table(ask: Ask, odd: Path) -> None:
    text = ask("diff", odd, "before").out.splitlines()
    assert text[0].startswith("from  step 1 of main")
    assert "1.000e+00" in next(line for line in text if line.startswith("params/a"))
    assert "same object" in next(line for line in text if line.startswith("meta/recipe"))
    assert text[-1].startswith("1 of 4 shards are the same object; params ")
    with_tensors = ask("diff", odd, "before", "--tensors").out.splitlines()
    assert any(line.startswith("  w ") for line in with_tensors)


def test_are_equal_commits_not_read(ask: Ask, run: Path) -> None:
    for shard in SHARDS:
        object_of(run, 6, shard).unlink()
    told = ask("diff", run, "main", "step-6", "--json").json
    assert {shard["status"] for shard in told["shards"].values()} == {"same"}
    assert ask("diff", run, "step-5", "step-6").code == 3, "the control: others are"


def test_is_a_damaged_object_refused(ask: Ask, run: Path) -> None:
    flip_bit(object_of(run, 6, "params/a"), 5000)
    check_refused(ask("cat", run, "params/a"), 3, "shardb fsck")
    check_refused(ask("diff", run, "step-5"), 3, "shardb fsck")
    assert ask("cat", run, "step-5", "params/a").code == 0


def test_is_the_store_of_the_current_directory_meant(
    ask: Ask, odd: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(odd)
    assert ask("cat", "params/a", "--json").json["step"] == 2
    assert ask("cat", "before", "params/a", "--json").json["step"] == 1
    assert ask("diff", "before", "--json").json["to"]["step"] == 2
    assert ask("diff", "before", "step-1", "--json").json["to"]["step"] == 1
