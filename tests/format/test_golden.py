"""Does this version open the stores of every earlier one, with the same answers?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardb
from shardb import fsck
from shardb.filesystem import RealFileSystem
from shardb.format import FORMAT_VERSION
from tests.format.make_golden import GOLDEN, KEPT, answers, build
from tests.support.stores import copied

VERSIONS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
GOLDEN_BYTES_MAX = 50_000


def test_is_there_a_golden_store_for_every_format_version() -> None:
    assert [f"v{version}" for version in range(1, FORMAT_VERSION + 1)] == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_does_a_golden_store_open_with_the_same_answers(tmp_path: Path, version: str) -> None:
    root = copied(GOLDEN / version / "store", tmp_path / "run")
    expected = json.loads((GOLDEN / version / "expected.json").read_text())
    with shardb.open(root) as store:
        assert answers(store) == expected
        assert store.recovery.dropped == []
    with shardb.open(root) as store:
        assert answers(store) == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_can_a_golden_store_be_gone_on_with(tmp_path: Path, version: str) -> None:
    root = copied(GOLDEN / version / "store", tmp_path / "run")
    with shardb.open(root) as store, store.begin() as transaction:
        step = transaction.base.step + 1 if transaction.base else 0
        for name, entry in (transaction.base.shards if transaction.base else {}).items():
            if entry.trainable:
                view = transaction.read(name)
                transaction.write(name, {t: view.array(t) for t in view.specs})
        assert transaction.commit(step=step).step == step


@pytest.mark.parametrize("version", VERSIONS)
def test_is_a_golden_store_clean(tmp_path: Path, version: str) -> None:
    root = copied(GOLDEN / version / "store", tmp_path / "run")
    shardb.open(root).close()
    report = fsck.check_store(RealFileSystem(), str(root))
    assert [f for f in report.findings if f.severity == "error"] == []
    assert report.objects_checked > 0


def test_would_another_answer_be_noticed(tmp_path: Path) -> None:
    """The control arm: a store with the same history, made today, has other ids and times."""
    build(tmp_path / "run")
    expected = json.loads((GOLDEN / VERSIONS[-1] / "expected.json").read_text())
    with shardb.open(tmp_path / "run") as store:
        today = answers(store)
    assert today != expected
    assert today["history"] == expected["history"]
    assert shards_of(today) == shards_of(expected)


def shards_of(found: dict[str, Any]) -> list[str]:
    return sorted(json.dumps(c["shards"], sort_keys=True) for c in found["commits"].values())


def test_are_golden_stores_small_and_without_an_index() -> None:
    files = [path for path in GOLDEN.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < GOLDEN_BYTES_MAX * len(VERSIONS)
    for version in VERSIONS:
        assert {path.name for path in (GOLDEN / version / "store").iterdir()} == set(KEPT)
