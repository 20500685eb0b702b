"""Do the evidence's rows, recipes, comparisons and plots say what they claim, and notice faults?"""

from __future__ import annotations

import json
import math
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tools import evidence, evidence_report
from tools.evidence_memory import Limits, Line, block_parameters, blocks_in, largest
from tools.evidence_package import byte_counts, unigram_entropy
from tools.evidence_parts import PARTS, RATES
from tools.evidence_plots import drawn, plots
from tools.evidence_recipes import (
    Scale,
    ablation_arms,
    brisk_arms,
    fields_of,
    hot_arms,
    main_arm,
    rate_arms,
    step_tokens,
    v25_arms,
    words_of,
)
from tools.evidence_report import Records, arms, coincidence, persistence, source_table, thinned
from tools.evidence_rows import MIXTURE, overlap, pack, read_rows, rows_of, stream_of, unpack
from tools.evidence_runs import Place, Recorder, run, step_lines
from tools.evidence_steps import Capped
from trainer.data.options import PrepareOptions
from trainer.data.prepare import prepare
from trainer.recipe_build import check_given
from trainer.recipe_flags import FLAGS
from trainer.schedule import Schedule

SEQ_LEN = 8
WORDS = "the red ball rolled down a hill and into one pond where nobody saw it again".split()


def write_text(path: Path, documents: int, seed: int) -> Path:
    random = np.random.default_rng(seed)
    texts = [" ".join(random.choice(WORDS, 30)) for _ in range(documents)]
    path.write_text("".join(f"{text}\n<|endoftext|>\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evidence")
    stories = write_text(folder / "stories-llama31.train.txt", 12, 1)
    books = write_text(folder / "books-classic.train.txt", 9, 2)
    held = write_text(folder / "stories-llama31.valid.txt", 4, 3)
    more = write_text(folder / "scenes-llama31.valid.txt", 4, 4)
    prepare(
        PrepareOptions(
            text=(stories, books), val_text=(held,), out=folder / "data", vocab_size=300,
            seq_len=SEQ_LEN,
        )
    )  # fmt: skip
    prepare(
        PrepareOptions(
            text=(held,), val_text=(more,), out=folder / "other", seq_len=SEQ_LEN,
            tokenizer=folder / "data" / "tokenizer.json",
        )
    )  # fmt: skip
    return folder


def test_a_parcel_gives_back_the_rows_mixed_as_told(prepared: Path, tmp_path: Path) -> None:
    rows = read_rows(prepared / "data" / "train")
    facts = pack(prepared / "data", prepared / "other", tmp_path / "rows.tar", len(rows))
    found = unpack(tmp_path / "rows.tar", tmp_path / "out")
    first, last = facts["train"]["stories-llama31"]
    stories, books = rows[first:last], rows[last:]
    expected = np.concatenate([stories] * MIXTURE["stories-llama31"] + [books])
    assert np.array_equal(read_rows(tmp_path / "out" / "train"), expected)
    held = read_rows(prepared / "data" / "val")
    assert np.array_equal(read_rows(tmp_path / "out" / "val"), held)
    assert np.array_equal(
        read_rows(tmp_path / "out" / "other"), read_rows(prepared / "other" / "val")
    )
    assert found["mixture_tokens"] == len(expected) * SEQ_LEN
    assert 0 < first + last < len(rows), "each corpus has rows"


def test_rows_beyond_the_limit_do_not_travel(prepared: Path, tmp_path: Path) -> None:
    rows = read_rows(prepared / "data" / "train")
    pack(prepared / "data", prepared / "other", tmp_path / "rows.tar", len(rows) - 3)
    assert unpack(tmp_path / "rows.tar", tmp_path / "out")["distinct_tokens"] == (
        (len(rows) - 3) * SEQ_LEN
    )


def test_rows_become_a_stream_and_rows_again(prepared: Path) -> None:
    rows = read_rows(prepared / "data" / "train")
    assert np.array_equal(rows_of(stream_of(rows), SEQ_LEN), rows)


def test_overlap_is_seen_where_there_is_some(prepared: Path, tmp_path: Path) -> None:
    clean = overlap(prepared / "data")
    text = write_text(tmp_path / "a.txt", 6, 1)
    copy = tmp_path / "b.txt"
    copy.write_text(text.read_text().replace("<|endoftext|>", "again <|endoftext|>", 3))
    prepare(
        PrepareOptions(
            text=(text,), val_text=(copy,), out=tmp_path / "data", seq_len=SEQ_LEN,
            tokenizer=prepared / "data" / "tokenizer.json",
        )
    )  # fmt: skip
    copied = overlap(tmp_path / "data")
    assert clean["seen_share"] < 0.1
    assert copied["seen_share"] > 0.3
    assert copied["documents_above_half_seen"] > clean["documents_above_half_seen"]


@pytest.mark.parametrize("scale", [Scale(), Scale.tiny()])
def test_every_flag_of_every_arm_is_one_of_trains(scale: Scale) -> None:
    known = {name for flag in FLAGS for spelled in flag.names for name in spelled.split("/")}
    every = [main_arm(scale), *rate_arms(scale, RATES, 100), *ablation_arms(scale)]
    every += [*hot_arms(scale), *brisk_arms(scale), *v25_arms(scale)]
    assert len({arm.name for arm in every}) == len(every)
    for arm in every:
        given = [word for word in words_of(arm.flags) if word.startswith("--")]
        assert set(given) <= known, arm.name
        assert check_given(fields_of(arm.flags) | {"store": "s"}) is not None


def test_the_schedule_ends_with_the_last_step() -> None:
    arm = main_arm(Scale())
    flags = arm.flags
    schedule = Schedule(
        shape=flags["lr-schedule"],
        peak=flags["learning-rate"],
        warmup_tokens=flags["warmup-tokens"],
        decay_tokens=flags["decay-tokens"],
        min_lr_ratio=flags["min-lr-ratio"],
    )
    last = arm.steps * step_tokens(flags)
    assert schedule.learning_rate(last) == pytest.approx(0.1 * flags["learning-rate"])
    assert schedule.learning_rate(last - step_tokens(flags)) > schedule.learning_rate(last)


def test_bits_count_the_bytes_that_tokens_stand_for(prepared: Path) -> None:
    loaded = Tokenizer.from_file(str(prepared / "data" / "tokenizer.json"))
    sizes = byte_counts(prepared / "data" / "tokenizer.json")
    text = "the red ball – once again"
    assert sizes[loaded.encode(text).ids].sum() == len(text.encode())
    end = loaded.token_to_id("<|endoftext|>")
    assert sizes[end] == 0
    assert unigram_entropy(np.array([[1, 2], [3, 4]])) == pytest.approx(math.log(4))


def throw(error: Exception) -> None:
    raise error


def step(part: str, run: str, number: int, **more: Any) -> dict[str, Any]:
    line = {"part": part, "kind": "step", "run": run, "step": number, "loss": 9.0 - number / 10}
    return {**line, "grad_norm": 1.5, "clip_scale": 0.5, "learning_rate": 1e-3} | {
        "seconds": 0.1, "tokens_per_second": 100.0, "tokens_seen": 10 * number, **more
    }  # fmt: skip


def commits(part: str, run: str, digests: Mapping[int, str]) -> dict[str, Any]:
    return {"part": part, "kind": "commits", "run": run, "digests": digests}


def records(lines: Sequence[Mapping[str, Any]], tmp_path: Path) -> Records:
    path = tmp_path / "evidence.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"part": "ma')
    return Records.read(path)


def test_equal_runs_coincide_and_one_bit_is_noticed(tmp_path: Path) -> None:
    mine = [step("main", "main", n) for n in (1, 2, 3)]
    tensors = {"part": "main", "kind": "tensors", "run": "main", "step": 3, "digests": {"a": "x"}}
    theirs = [{**line, "part": "resident"} for line in mine]
    last = {"part": "resident", "kind": "step", "step": 3, "digests": {"a": "x"}}
    told = list(coincidence(records([*mine, tensors, *theirs, last], tmp_path)))
    assert "loss: 0 of 3 steps differ" in told
    assert "tensors at step 3: 0 of 1 differ" in told
    theirs[1] = {**theirs[1], "loss": np.nextafter(theirs[1]["loss"], 10.0)}
    other = {**last, "digests": {"a": "y"}}
    told = list(coincidence(records([*mine, tensors, *theirs, other], tmp_path)))
    assert told[0].startswith("loss: 1 of 3 steps differ, first at step 2")
    assert "tensors at step 3: 1 of 1 differ" in told


def test_a_killed_run_that_differs_is_noticed(tmp_path: Path) -> None:
    kill = {"part": "killed", "kind": "killed", "run": "killed", "exit_code": -9}
    lines = [
        commits("main", "main", {1: "a", 2: "b", 3: "c"}),
        commits("killed", "killed", {1: "a", 2: "b"}),
        commits("control", "killed-control", {1: "a", 2: "z"}),
        {**kill, "last_logged": 1},
    ]
    same, control = persistence(records(lines, tmp_path))
    assert same.startswith("killed: SIGKILL inside the step after [1]; 0 of 2 commits differ")
    assert "1 of 2 commits differ, first at step 2" in control


def test_guards_are_counted_and_what_is_missing_is_told(tmp_path: Path) -> None:
    guards = [{"attempts": 1}, {"attempts": 3}]
    lines = [
        step("hot", "hot-strict", n + 1, guarded_step_replay=guard, skipped_steps=4 * n)
        for n, guard in enumerate(guards)
    ]
    found = records([*lines, step("v25", "v25-bf16", 1)], tmp_path)
    assert list(arms(found, "hot"))[-1].endswith("| 1 | 2 | 4 |")
    table = list(source_table(found))
    assert "8.9000, 1.500, 0.500" in table[2]
    assert "not measured" in table[3]
    assert list(coincidence(found)) == ["resident: not measured"]


def test_plots_are_drawn_from_thinned_records(tmp_path: Path) -> None:
    lines = [step("main", "main", n) for n in range(1, 1000)]
    lines[499]["validation_loss"] = 3.0
    lines += [step("v25", "v25 <1>", n) for n in range(1, 20)]
    lines += [step("long", "long", n) for n in range(1, 20)]
    for name, recipe in (
        ("a", {"weight_decay": 0.1, "rate": 1.0}),
        ("b", {"weight_decay": 0.5, "rate": 1.0}),
        ("c", {"weight_decay": 0.1, "rate": 2.0}),
    ):
        lines.append({"part": "search", "kind": "tried", "run": name, "steps": 1, "recipe": recipe})
        lines.append(step("search", name, 1, validation_loss=2.0))
    chosen = {"weight_decay": 0.5, "rate": 1.0}
    lines.append({"part": "search", "kind": "chosen", "round": 0, "seconds": 1, "recipe": chosen})
    kept = list(thinned(records(lines, tmp_path)))
    assert len(kept) < 500
    assert any(line.get("validation_loss") == 3.0 for line in kept)
    made = plots(kept)
    assert [plot.name for plot in made] == ["learning", "search", "long", "v25"]
    assert [curve.name for curve in made[1].curves] == ["weight decay 0.1", "weight decay 0.5"]
    for plot in made:
        assert ET.fromstring(drawn(plot)).tag.endswith("svg")


def test_tables_of_thinned_records_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, thin = tmp_path / "all.jsonl", tmp_path / "thin.jsonl"
    lines = [step("main", "main", n) for n in range(1, 30)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert evidence_report.main([str(path), "--thin", str(thin)]) == 0
    assert evidence_report.main([str(thin)]) == 2
    assert f"{thin}: these records are thinned" in capsys.readouterr().err


def test_a_run_that_takes_too_long_is_ended_and_read(tmp_path: Path) -> None:
    place = Place(
        data=tmp_path,
        disk=tmp_path,
        memory=tmp_path,
        record=Recorder(tmp_path / "out.jsonl", "main"),
        ends_at=time.monotonic() + 60,
    )
    arm = main_arm(Scale())
    code = run([sys.executable, "-c", "import time; time.sleep(60)"], arm, place, limit_seconds=0.3)
    assert code == -15
    logs = place.store(arm.name) / "logs"
    logs.mkdir(parents=True)
    (logs / "steps.jsonl").write_text('{"step": 1, "seconds": 0.0}\n{"st')
    assert [line["step"] for line in step_lines(place.store(arm.name))] == [1]
    endless = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert run(endless, arm, place, limit_seconds=30, kill_step=1) == -9
    assert run(endless, arm, place, limit_seconds=0.3, kill_step=2) == -15


def test_the_largest_size_is_found() -> None:
    limits = Limits(device="cpu", ends_at=time.monotonic() + 60, rows_max=512)
    good, bad = largest(lambda size: size <= 100, 4, 512, limits)
    assert good <= 100 < bad <= good * 9 // 8 + 1
    assert largest(lambda size: size <= 100, 130, 512, limits) == (100, 114)
    assert largest(lambda size: size > 0, 4, 512, limits) == (512, 0)
    assert largest(lambda size: size < 3, 4, 512, limits) == (2, 3)
    assert largest(lambda size: size < 1, 4, 512, limits) == (0, 1)
    line = Line(few=10, few_bytes=1100, many=20, many_bytes=2100)
    assert [line.rows_in(size) for size in (1100, 3100, 5)] == [10, 30, 1]


def test_the_cap_is_told_from_other_errors_and_room_is_kept_for_others() -> None:
    def broken() -> None:
        try:
            raise torch.OutOfMemoryError("no room")
        except torch.OutOfMemoryError:
            raise RuntimeError("the recording broke off") from None

    device = Capped("cpu")
    assert device.tried(broken) is None
    assert device.tried(lambda: None) == 0
    with pytest.raises(RuntimeError, match="another"):
        device.tried(partial(throw, RuntimeError("another")))
    limits = Limits(device="cpu", ends_at=0.0)
    blocks = blocks_in(64 << 30, limits)
    assert blocks * block_parameters(limits.block) * 3 * 12 < 64 << 30
    assert blocks_in(1 << 30, limits) < 1


def test_an_unknown_part_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evidence.main(["--lane", "0:main,no-such-part", "--out", str(tmp_path)]) == 2
    assert "no-such-part" in capsys.readouterr().err
    assert evidence.main(["--list"]) == 0
    told = capsys.readouterr().out
    assert [line.split()[0] for line in told.splitlines()] == list(PARTS)
