"""A file is damaged: are wrong bytes never read, is exactly that found, and is the rest kept?

The suite tries a few places of every kind of file; `make damage` tries 64 of each, and prints how
many. DAMAGE_OFFSETS and DAMAGE_SEED choose others.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.support import damage_media
from tests.support.damage_media import Case, cases, judged
from tests.support.damage_store import KINDS, Specimen

OFFSETS = int(os.environ.get("DAMAGE_OFFSETS", "2"))
SEED = int(os.environ.get("DAMAGE_SEED", "0"))


@pytest.mark.parametrize("kind", KINDS)
def test_is_damage_of_any_file_found_and_survived(
    kind: str, specimen: Specimen, scratch: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = random.Random(f"{SEED} {kind}")
    tried: Counter[str] = Counter()
    wrong: list[str] = []
    for number, case in enumerate(cases(specimen, kind, OFFSETS, source)):
        changed, texts = judged(case, specimen, scratch, SEED + number)
        tried[case.damage if changed else "without effect"] += 1
        wrong += texts
    with capsys.disabled():
        told = ", ".join(f"{count} {name}" for name, count in sorted(tried.items()))
        print(f"\n{kind}: {told}")
    assert sum(tried.values()) >= 2 * OFFSETS
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong[:20])


# Control arms: the judge must find fault with a store that believes what it reads.


def _first(specimen: Specimen, kind: str, damage: str) -> Case:
    found = cases(specimen, kind, 2, random.Random(0))
    return next(case for case in found if case.damage == damage)


def test_would_believed_bytes_be_noticed(
    specimen: Specimen, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = next(p for p in specimen.files("object") if specimen.needed_by.get(p))
    case = Case(kind="object", damage="flip", path=path, offset=5000)
    assert judged(case, specimen, scratch, 0) == (True, [])
    monkeypatch.setattr("shardb.verifying.compare_digest", lambda *_: None)
    changed, wrong = judged(case, specimen, scratch, 0)
    assert changed
    assert any("wrong bytes" in text for text in wrong)


def test_would_an_older_state_be_noticed(
    specimen: Specimen, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest records are gone, and the index with what it knows of them."""
    case = _first(specimen, "open log segment", "older")
    plain = damage_media.apply

    def without_index(
        case: Case, specimen: Specimen, root: Path, source: random.Random
    ) -> set[str]:
        (root / "index/data.mdb").unlink()
        return plain(case, specimen, root, source)

    monkeypatch.setattr(damage_media, "apply", without_index)
    assert any("another state" in text for text in judged(case, specimen, scratch, 0)[1])
