"""Are the search's rows, recipes and choices what they are told to be, and its halves apart?"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.evidence_long import WARMUP_STEPS, exports, long_arm, steps_in
from tools.evidence_mixtures import MIXTURES, distinct, halves, make_set, sample
from tools.evidence_recipes import Scale, fields_of, step_tokens, words_of
from tools.evidence_report import Records, searched
from tools.evidence_rows import FACTS_NAME, MIXTURE, Rows, read_rows, rows_of, stream_of, write_rows
from tools.evidence_search import MARGIN, ROUNDS, SEARCH_TOKENS, Recipe, chosen, rounds, small_arm
from trainer.data.manifest import TOKENIZER_NAME
from trainer.recipe_build import check_given
from trainer.recipe_flags import FLAGS

SEQ_LEN = 8
END = 0


def documents(first: int, count: int, length: int) -> list[Rows]:
    """Give documents whose every id tells which one they are."""
    return [np.array([first + n] * length + [END], np.uint16) for n in range(count)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write what an unpacked parcel looks like: two corpora, and documents 1, 2, … held out."""
    folder = tmp_path_factory.mktemp("rows")
    stories, books = (
        np.arange(first, first + count * (SEQ_LEN + 1), dtype=np.uint16).reshape(count, SEQ_LEN + 1)
        for first, count in ((100, 20), (9000, 30))
    )
    write_rows(folder / "train", np.concatenate([stories] * MIXTURE["stories-llama31"] + [books]))
    held = rows_of(np.concatenate([*documents(1, 30, 20), *documents(50, 30, 30)]), SEQ_LEN)
    short = 30 * 21 // SEQ_LEN + 1
    write_rows(folder / "val", held)
    write_rows(folder / "other", held[:5])
    facts = {
        "seq_len": SEQ_LEN,
        "end_of_text_id": END,
        "train": {"stories-llama31": [0, 20], "books-classic": [20, 50]},
        "val": {"tinystories-sample": [0, short], "stories-llama31": [short, len(held)]},
        "other": {"scenes-llama31": [0, 5]},
    }
    (folder / FACTS_NAME).write_text(json.dumps(facts))
    (folder / TOKENIZER_NAME).write_text("{}")
    return folder


def test_a_document_is_in_one_half_alone(data: Path) -> None:
    facts = json.loads((data / FACTS_NAME).read_text())
    rows = read_rows(data / "val")
    ids = [
        {name: set(part[:, 1:].reshape(-1).tolist()) - {END} for name, part in half.items()}
        for half in halves(rows, facts["val"], END)
    ]
    every = [set().union(*half.values()) for half in ids]
    assert not every[0] & every[1]
    assert len(every[0] | every[1]) >= 58, "a tail that fills no row may be lost, no more"
    assert all(max(half["tinystories-sample"]) < 50 for half in ids)
    assert all(min(half["stories-llama31"]) >= 50 for half in ids)
    whole = set(stream_of(rows).tolist()) - {END}
    assert every[0] | every[1] <= whole


def test_a_set_repeats_the_same_sample_by_its_mixture(data: Path, tmp_path: Path) -> None:
    facts = json.loads((data / FACTS_NAME).read_text())
    ranges = {name: (first, last) for name, (first, last) in facts["train"].items()}
    once = distinct(data, ranges)
    assert [len(rows) for rows in once.values()] == [20, 30]
    for mixture, times in MIXTURES.items():
        told = make_set(data, tmp_path / mixture, mixture, 5)
        parts = {name: sample(rows, 5) for name, rows in once.items()}
        expected = [p for name, p in parts.items() for _ in range(times.get(name, 1))]
        assert np.array_equal(read_rows(tmp_path / mixture / "train"), np.concatenate(expected))
        assert told["pass_tokens"] == sum(len(rows) for rows in expected) * SEQ_LEN
        assert told["distinct_tokens"] == {"stories-llama31": 32, "books-classic": 48}
    assert len(make_set(data, tmp_path / "all", "even", 1)["times"]) == 2
    assert len(read_rows(tmp_path / "all" / "train")) == 50


def test_what_is_reported_on_is_not_what_chooses(data: Path, tmp_path: Path) -> None:
    told = make_set(data, tmp_path / "set", "even", 1)
    choosing = read_rows(tmp_path / "set" / "val")
    report = tmp_path / "set" / "report"
    facts = json.loads((report / FACTS_NAME).read_text())
    assert len(choosing) == told["choosing_rows"] > 0
    reported = read_rows(report / "val")
    assert not (set(choosing.reshape(-1)) - {END}) & (set(reported.reshape(-1)) - {END})
    other = read_rows(report / "other")
    first, last = facts["other"]["chosen-by"]
    assert np.array_equal(other[first:last], choosing)
    assert np.array_equal(
        other[slice(*facts["other"]["scenes-llama31"])], read_rows(data / "other")
    )


@pytest.mark.parametrize("scale", [Scale(), Scale.tiny()])
def test_every_round_asks_for_flags_of_trains_and_equal_tokens(scale: Scale) -> None:
    known = {name for flag in FLAGS for spelled in flag.names for name in spelled.split("/")}
    for number in range(ROUNDS):
        for change in rounds(number, Recipe()):
            recipe = replace(Recipe(), **change)
            assert len(recipe.differs_in(Recipe())) == 1
            arm = small_arm(scale, recipe)
            assert {w for w in words_of(arm.flags) if w.startswith("--")} <= known
            assert check_given(fields_of(arm.flags) | {"store": "s"}) is not None
            if not scale.is_tiny:
                assert arm.steps * step_tokens(arm.flags) == recipe.share * SEARCH_TOKENS


def test_a_setting_changes_only_for_more_than_the_margin() -> None:
    base = Recipe()
    losses = {
        base: 3.0,
        replace(base, weight_decay=1.0): 2.9,
        replace(base, weight_decay=3.0): 2.95,
        replace(base, mixture="even"): 3.0 - MARGIN / 2,
        replace(base, seed=2): 2.0,
        replace(base, rate=1.0, batch_rows=64): 1.0,
    }
    assert chosen(base, losses) == replace(base, weight_decay=1.0)
    del losses[base]
    assert chosen(base, losses) == base, "nothing to compare with"


def test_the_last_snapshots_are_averaged_and_the_best_step_is_packed() -> None:
    arm = long_arm(Scale(), 1250)
    lines: list[dict[str, Any]] = [{"step": step} for step in range(1, 1050)]
    lines[249]["validation_loss"], lines[749]["validation_loss"] = 2.0, 2.5
    plain, *means = exports(lines, arm, Path("store"), Path("report"))
    assert plain.words() == ["--ref", "best-step-250"]
    assert means[0].words() == ["--average", "step-750,step-1000"]
    assert [len(mean.commits) for mean in means] == [2, 4]
    assert len(exports(lines[:900], arm, Path("store"), Path("report"))) == 2, "there are no four"
    assert arm.steps * step_tokens(arm.flags) == (
        arm.flags["warmup-tokens"] + arm.flags["decay-tokens"]
    )


def test_the_long_runs_length_changes_nothing_in_its_warm_up() -> None:
    probe, arm = (long_arm(Scale(), steps).flags for steps in (0, 4000))
    unlike = {name for name in arm if arm[name] != probe[name]}
    assert unlike <= {"decay-tokens", "validate-every"}
    assert steps_in(100, 400.0, 0.1) == 3750
    assert steps_in(100, 400.0, 0.1) * 0.1 < 400.0 + 100 * 0.1
    assert steps_in(0, 0.0, 1.0) == 2 * WARMUP_STEPS, "a fall has at least one step"


def test_the_search_is_told_by_its_lowest_loss(tmp_path: Path) -> None:
    def step(number: int, **more: Any) -> dict[str, Any]:
        line = {"part": "search", "kind": "step", "run": "a", "step": number, "loss": 3.0}
        return line | {"clip_scale": 1.0, "tokens_per_second": 9.0, **more}

    lines = [
        {"part": "search", "kind": "tried", "run": "a", "steps": 4, "recipe": {"rate": 0.5}},
        *(step(1), step(2, validation_loss=2.5), step(3, validation_loss=2.75)),
    ]
    path = tmp_path / "evidence.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(searched(Records.read(path)))[-1] == (
        "| 0.5 | 2.5000 | 2 | 2.7500 | 3.0000 | 3 of 4 |"
    )
    path.write_text("")
    assert list(searched(Records.read(path))) == ["search: not measured"]
