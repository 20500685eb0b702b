"""The tables of the evidence, and the thinned records that its plots are drawn from.

Owns the comparisons: losses step by step, digests of commits and tensors, arms on equal tokens.
Knows nothing of how runs are made. What was not recorded is told as not measured.

    python -m tools.evidence_report evidence.jsonl
    python -m tools.evidence_report evidence.jsonl --thin docs/evidence/records.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]
COMPARED = ("loss", "grad_norm", "clip_scale", "learning_rate")
# What the source printed of its own run of 291 M parameters: step, loss, norm, clip scale.
SOURCE_V25 = (
    (1, 10.5728, 1.430, 0.699),
    (2, 10.5250, 1.378, 0.726),
    (4, 10.4542, 1.423, 0.703),
    (8, 10.2461, 1.818, 0.550),
    (10, 10.1660, 1.844, 0.542),
    (12, 9.9918, 2.011, 0.497),
)
ARMS_HEAD = (
    "| arm | steps | held-out loss | training loss, last 20 | clipped | tokens/s"
    " | steps tried again | attempts dropped | steps skipped |"
)
LAST_STEPS = 20
THINNED_TO = 300
DRAWN = ("loss", "validation_loss")
TOLD = (*DRAWN, "tokens_seen", "learning_rate", "grad_norm", "clip_scale")
# Records that are kept whole beside thinned steps.
KEPT_KINDS = (
    "machine",
    "rows",
    "loss",
    "sample",
    "exported",
    "model",
    "killed",
    "ended",
    "failed",
    "skipped",
    "commits",
    "set",
    "tried",
    "chosen",
)


class Records:
    """Everything that a campaign recorded, by part, kind and run."""

    def __init__(self, lines: Sequence[Record]) -> None:
        self._lines = lines

    @classmethod
    def read(cls, path: Path) -> Records:
        """Read a file of JSON lines; a line that is not whole ends it."""
        data = path.read_bytes()
        return cls([json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()])

    def of(self, part: str, kind: str, run: str | None = None) -> list[Record]:
        """Give the records of a part."""
        return [
            line
            for line in self._lines
            if line["part"] == part and line["kind"] == kind and run in (None, line.get("run"))
        ]

    def runs(self, part: str) -> dict[str, list[Record]]:
        """Give the steps of each run of a part."""
        found: dict[str, list[Record]] = defaultdict(list)
        for line in self.of(part, "step"):
            found[line["run"]].append(line)
        return found

    def commits(self, part: str, run: str) -> dict[int, str]:
        """Give one digest a step."""
        lines = self.of(part, "commits", run)
        return {int(step): d for line in lines for step, d in line["digests"].items()}


def learning(records: Records, part: str = "main") -> Iterator[str]:
    """Tell a run of many steps: held-out loss by step, and how long it took."""
    steps = records.of(part, "step")
    if not steps:
        yield f"{part}: not measured"
        return
    yield "| step | tokens seen | training loss, last 20 | held-out loss |"
    yield "|---:|---:|---:|---:|"
    for line in steps:
        if "validation_loss" in line:
            first = line["step"] - LAST_STEPS
            past = [s["loss"] for s in steps if first < s["step"] <= line["step"]]
            yield (
                f"| {line['step']:,} | {line['tokens_seen']:,} | {statistics.mean(past):.4f} |"
                f" {line['validation_loss']:.4f} |"
            )
    rate = statistics.median(line["tokens_per_second"] for line in steps[10:] or steps)
    clipped = sum(line["clip_scale"] < 1 for line in steps)
    yield f"{rate:,.0f} tokens/s, {clipped} of {len(steps)} steps clipped"
    yield "shards updated: " + _range(steps, "updated_shards")
    yield "parameter shards active at once: " + _range(steps, "max_active_param_shards")


def coincidence(records: Records) -> Iterator[str]:
    """Compare the main run with the resident one, step by step and tensor by tensor."""
    mine = {line["step"]: line for line in records.of("main", "step")}
    theirs = {line["step"]: line for line in records.of("resident", "step") if "loss" in line}
    both = sorted(mine.keys() & theirs.keys())
    if not both:
        yield "resident: not measured"
        return
    for field in COMPARED:
        unlike = [step for step in both if mine[step][field] != theirs[step][field]]
        most = max(abs(mine[step][field] - theirs[step][field]) for step in both)
        first = f", first at step {unlike[0]}, by {most:g} at most" if unlike else ""
        yield f"{field}: {len(unlike)} of {len(both)} steps differ{first}"
    seconds = statistics.median(theirs[step]["seconds"] for step in both)
    yield f"resident step: {seconds:.4f} s"
    left = {line["step"]: line["digests"] for line in records.of("main", "tensors")}
    right = {s["step"]: s["digests"] for s in records.of("resident", "step") if "digests" in s}
    for step in left.keys() & right.keys():
        names = left[step].keys() | right[step].keys()
        unlike_names = [n for n in names if left[step].get(n) != right[step].get(n)]
        yield f"tensors at step {step}: {len(unlike_names)} of {len(names)} differ"


def persistence(records: Records) -> Iterator[str]:
    """Compare every commit of the killed run with the unbroken one's; the control must differ."""
    unbroken = records.commits("main", "main")
    for part, run in (("killed", "killed"), ("control", "killed-control")):
        found = records.commits(part, run)
        both = sorted(found.keys() & unbroken.keys())
        kills = records.of(part, "killed", run)
        met = [k["last_logged"] for k in kills if k["exit_code"] == -9]
        unlike = [step for step in both if found[step] != unbroken[step]]
        said = f", first at step {unlike[0]}" if unlike else ""
        yield (
            f"{run}: SIGKILL inside the step after {met}; {len(unlike)} of {len(both)} commits"
            f" differ{said}"
        )


def arms(records: Records, part: str) -> Iterator[str]:
    """Tell the runs of a part on equal tokens."""
    yield ARMS_HEAD
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for arm in summaries(records, part):
        held = "none" if arm["held_out"] is None else f"{arm['held_out']:.4f} at {arm['held_at']}"
        yield (
            f"| {arm['run']} | {arm['steps']} | {held} | {arm['training_loss']:.4f} |"
            f" {100 * arm['clipped']:.0f} % | {arm['tokens_per_second']:,.0f} |"
            f" {_or_dash(arm['tried_again'])} | {_or_dash(arm['dropped'])} | {arm['skipped']} |"
        )


def summaries(records: Records, part: str) -> Iterator[dict[str, Any]]:
    """Give what is told of each run of a part: medians, sums and last values of its steps."""
    for run, steps in records.runs(part).items():
        held = [line for line in steps if "validation_loss" in line]
        guards = [line["guarded_step_replay"] for line in steps if "guarded_step_replay" in line]
        given_up = [line.get("batches_given_up", 0) for line in records.of(part, "ended", run)]
        yield {
            "run": run,
            "steps": steps[-1]["step"],
            "held_out": held[-1]["validation_loss"] if held else None,
            "held_at": held[-1]["step"] if held else None,
            "lowest": min((line["validation_loss"] for line in held), default=None),
            "lowest_at": _lowest_at(held),
            "training_loss": statistics.mean(line["loss"] for line in steps[-LAST_STEPS:]),
            "clipped": sum(line["clip_scale"] < 1 for line in steps) / len(steps),
            "tokens_per_second": statistics.median(
                line["tokens_per_second"] for line in steps[5:] or steps
            ),
            "tried_again": sum(guard["attempts"] > 1 for guard in guards) if guards else None,
            "dropped": sum(guard["attempts"] - 1 for guard in guards) if guards else None,
            "skipped": max(steps[-1].get("skipped_steps", 0), *given_up, 0),
        }


def _lowest_at(held: Sequence[Record]) -> int | None:
    best = min(held, key=lambda line: line["validation_loss"], default=None)
    return None if best is None else best["step"]


def searched(records: Records) -> Iterator[str]:
    """Tell the recipes of the search: the lowest and the last held-out loss of each."""
    tried = {line["run"]: line for line in records.of("search", "tried")}
    if not tried:
        yield "search: not measured"
        return
    settings = list(next(iter(tried.values()))["recipe"])
    yield "| " + " | ".join(settings) + " | lowest held-out | at | last | training loss | made |"
    yield "|" + "---:|" * (len(settings) + 5)
    for arm in summaries(records, "search"):
        line = tried[arm["run"]]
        held = "none | – | none"
        if arm["lowest"] is not None:
            held = f"{arm['lowest']:.4f} | {arm['lowest_at']:,} | {arm['held_out']:.4f}"
        told = " | ".join(str(value) for value in line["recipe"].values())
        made = f"{arm['steps']:,} of {line['steps']:,}"
        yield f"| {told} | {held} | {arm['training_loss']:.4f} | {made} |"
    for line in records.of("search", "chosen"):
        yield f"after round {line['round']}, {line['seconds']} s: {line['recipe']}"


def _or_dash(count: int | None) -> str:
    return "–" if count is None else str(count)


def source_table(records: Records) -> Iterator[str]:
    """Put the source's printed steps of its 291 M run beside ours."""
    runs = records.runs("v25")
    yield "| step | source: loss, norm, clip |" + "".join(f" {run} |" for run in runs)
    yield "|---:|---|" + "---|" * len(runs)
    for step, *printed in SOURCE_V25:
        yield f"| {step} | {_triple(*printed)} |" + "".join(
            f" {_of_step(steps, step)} |" for steps in runs.values()
        )
    for run, steps in runs.items():
        rate = statistics.median(line["tokens_per_second"] for line in steps[3:] or steps)
        last, held = steps[-1]["step"], [s for s in steps if "validation_loss" in s]
        yield f"{run}: {last} steps, last {_of_step(steps, last)}, {rate:,.0f} tokens/s"
        yield from (f"{run}: held out at {s['step']}: {s['validation_loss']:.4f}" for s in held)


def sizes(records: Records) -> Iterator[str]:
    """Tell the largest models and the most rows of capped devices."""
    yield "| device, GiB | way | parameters | one block more | peak, GiB |"
    yield "|---:|---|---:|---|---:|"
    for line in [*records.of("memory", "model"), *records.of("deep", "model")]:
        more = "does not fit" if line.get("too_many_blocks") else "not tried"
        yield (
            f"| {line['cap_gib']} | {line['way']} | {line.get('parameters', 0):,} | {more} |"
            f" {_gib(line.get('peak_bytes'))} |"
        )
    yield "\n| device, GiB | way | rows | tokens | too many rows | peak, GiB |"
    yield "|---:|---|---:|---:|---:|---:|"
    for line in [*records.of("memory", "rows"), *records.of("rows", "rows")]:
        yield (
            f"| {line['cap_gib']} | {line['way']} | {line['fits']} | {512 * line['fits']:,} |"
            f" {line['too_many']} | {_gib(line.get('peak_bytes'))} |"
        )


def texts(records: Records) -> Iterator[str]:
    """Tell the held-out losses of exported packages, as transformers gives them."""
    yield "| package | text | dtype | tokens | bytes | nats a token | bits a byte | unigram nats |"
    yield "|---|---|---|---:|---:|---:|---:|---:|"
    for line in [*records.of("package", "loss"), *records.of("long", "loss")]:
        yield (
            f"| {line.get('package', 'main-best')} | {line['text']} | {line['dtype']} |"
            f" {line['tokens']:,} | {line['bytes']:,} |"
            f" {line['nats_per_token']:.4f} | {line['bits_per_byte']:.4f} |"
            f" {line['unigram_entropy_nats']:.4f} |"
        )


def rest(records: Records) -> Iterator[str]:
    """Tell what needs no arithmetic: the machine, the rows, sizes, ends, exports, samples."""
    for part, kind in (
        *(("machine", "machine"), ("data", "rows"), ("memory", "failed"), ("deep", "model")),
        *(("package", "exported"), ("package", "sample")),
        *(("long", "set"), ("long", "exported"), ("long", "sample")),
    ):
        yield from (json.dumps(line) for line in records.of(part, kind))
    for line in records._lines:
        if line["kind"] in ("ended", "skipped", "failed", "part"):
            yield json.dumps(line)


def thinned(records: Records) -> Iterator[Record]:
    """Give what is committed: some 300 steps a run with few fields, each validation, and facts.

    Of the search's many runs it is the validations alone.
    What is told of all steps of a run is told before they are thinned.
    """
    for part in ("main", "long", "rates", "search", "ablations", "hot", "brisk", "v25"):
        fields = DRAWN if part in ("search", "ablations", "hot", "brisk") else TOLD
        for run, steps in records.runs(part).items():
            every = len(steps) if part == "search" else max(1, len(steps) // THINNED_TO)
            for index, line in enumerate(steps):
                if index % every == 0 or "validation_loss" in line:
                    kept = {name: _rounded(line[name]) for name in fields if name in line}
                    yield {"part": part, "kind": "step", "run": run, "step": line["step"], **kept}
        for arm in summaries(records, part):
            yield {"part": part, "kind": "arm", **arm}
    for part, lines in (("resident", coincidence(records)), ("killed", persistence(records))):
        yield {"part": part, "kind": "compared", "told": list(lines)}
    yield from (line for line in records._lines if line["kind"] in KEPT_KINDS)


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _gib(size: int | None) -> str:
    return "–" if size is None else f"{size / (1 << 30):.2f}"


def _range(steps: Sequence[Record], field: str) -> str:
    values = [line[field] for line in steps]
    return f"{min(values)} to {max(values)}"


def _of_step(steps: Sequence[Record], step: int) -> str:
    for line in steps:
        if line["step"] == step:
            return _triple(line["loss"], line["grad_norm"], line["clip_scale"])
    return "not measured"


def _triple(loss: float, norm: float, clip: float) -> str:
    return f"{loss:.4f}, {norm:.3f}, {clip:.3f}"


def main(words: Sequence[str] | None = None) -> int:
    """Print every table, or write the thinned records; 2 where a file was thinned already."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("records", type=Path)
    parser.add_argument("--thin", type=Path, help="write the records that plots are drawn from")
    given = parser.parse_args(words)
    records = Records.read(given.records)
    if any("tokens_per_second" not in line for line in records.of("main", "step")):
        print(
            f"error: {given.records}: these records are thinned: give the file that `python -m"
            " tools.evidence` wrote, or draw plots from this one with tools.evidence_plots",
            file=sys.stderr,
        )
        return 2
    if given.thin:
        given.thin.write_text("".join(json.dumps(line) + "\n" for line in thinned(records)))
        return 0
    for title, lines in (
        ("learning", learning(records)),
        ("resident", coincidence(records)),
        ("killed", persistence(records)),
        *((part, arms(records, part)) for part in ("rates", "ablations", "hot", "brisk", "probe")),
        ("the search at small scale", searched(records)),
        ("the long run", learning(records, "long")),
        ("the source's 291 M run", source_table(records)),
        ("sizes", sizes(records)),
        ("texts", texts(records)),
        ("the rest", rest(records)),
    ):
        print(f"\n## {title}\n")
        print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
