"""Damage of single files, as media and people do it; and what a store must still be with it.

Every case is one file of a known store (`damage_store`), damaged in one way at one place.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import shardb
from shardb.findings import Finding, Report
from shardb.repair import repair
from tests.support.damage_store import Held, Specimen, commit_step, held
from tests.support.small_stores import flip_bit, fsck

PAGE_BYTES = 4096
# Kinds whose content nothing of what is committed depends on: the store only ever writes them anew.
SCRATCH = (
    *("lock file of the index", "lock", "lease", "spare file", "staged file"),
    *("unfinished file", "reserve", "journal of steps"),
)
OBJECTS = ("object", "packed object")
DAMAGES = ("flip", "zero", "truncate", "append", "exchange", "older")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One damage: of which file, how, and at which byte."""

    kind: str
    damage: str
    path: str
    offset: int

    def __str__(self) -> str:
        return f"{self.kind} {self.path}: {self.damage} at {self.offset}"


def cases(specimen: Specimen, kind: str, offsets: int, source: random.Random) -> Iterator[Case]:
    """Every damage of a kind: bits and pages at `offsets` places, and each other way once a file.

    Places are drawn; the first and the last byte are always among them.
    """
    paths = specimen.files(kind)
    assert paths, f"the store has no {kind}"
    for damage in ("flip", "zero"):
        for number in range(offsets):
            path = paths[number % len(paths)]
            size = (specimen.root / path).stat().st_size
            ends = (0, size - 1)
            offset = ends[number] if number < len(ends) else source.randrange(max(size, 1))
            yield Case(kind=kind, damage=damage, path=path, offset=max(offset, 0))
    for path in source.sample(paths, min(len(paths), max(1, offsets // 4))):
        size = (specimen.root / path).stat().st_size
        for cut in {1, PAGE_BYTES, size}:
            if cut <= size:
                yield Case(kind=kind, damage="truncate", path=path, offset=size - cut)
        for length in (1, source.randrange(2, 3 * PAGE_BYTES)):
            yield Case(kind=kind, damage="append", path=path, offset=length)
        yield Case(kind=kind, damage="exchange", path=path, offset=0)
    for path in sorted({*paths, *_gone(specimen, kind)} & specimen.older.keys()):
        for number in range(len(specimen.older[path])):
            yield Case(kind=kind, damage="older", path=path, offset=number)


def _gone(specimen: Specimen, kind: str) -> set[str]:
    """Raw segments that were there before they were closed: they can come back from a copy."""
    if kind != "closed log segment":
        return set()
    return {path.removesuffix(".zst") for path in specimen.files(kind)}


def apply(case: Case, specimen: Specimen, root: Path, source: random.Random) -> set[str]:
    """Damage a copy of the store; return the paths whose bytes are others now."""
    path = root / case.path
    touched = [case.path]
    before = {case.path: path.read_bytes() if path.exists() else None}
    data = before[case.path] or b""
    if case.damage == "flip" and data:
        flip_bit(path, case.offset, source.randrange(8))
    elif case.damage == "zero":
        stretch = data[case.offset : case.offset + PAGE_BYTES]
        path.write_bytes(
            data[: case.offset] + bytes(len(stretch)) + data[case.offset :][len(stretch) :]
        )
    elif case.damage == "truncate":
        path.write_bytes(data[: case.offset])
    elif case.damage == "append":
        path.write_bytes(data + source.randbytes(case.offset))
    elif case.damage == "older":
        path.write_bytes(specimen.older[case.path][case.offset])
    elif case.damage == "exchange" and (other := _other(case, specimen, data)) is not None:
        touched.append(other)
        before[other] = (root / other).read_bytes()
        path.write_bytes(before[other] or b"")
        (root / other).write_bytes(data)
    return {name for name in touched if (root / name).read_bytes() != before[name]}


def _other(case: Case, specimen: Specimen, data: bytes) -> str | None:
    """A file to exchange with: of the same kind, and of the same length where there is one."""
    others = [path for path in specimen.files(case.kind) if path != case.path]
    contents = {path: (specimen.root / path).read_bytes() for path in others}
    differing = [path for path in others if contents[path] != data]
    differing.sort(key=lambda path: len(contents[path]) != len(data))
    return differing[0] if differing else None


# Judging


def judged(case: Case, specimen: Specimen, scratch: Path, seed: int) -> tuple[bool, list[str]]:
    """Damage, check, open, read and repair; whether bytes changed, and what was not right."""
    root = scratch / "run"
    shutil.copytree(specimen.root, root)
    try:
        changed = apply(case, specimen, root, random.Random(seed))
        if not changed:
            return False, []
        second = scratch / "second"
        shutil.copytree(root, second)
        try:
            report = fsck(root)
            wrong = _judge_reading(case, specimen, changed, root, report)
            wrong += _judge_findings(case, specimen, changed, root, report)
            wrong += _judge_repair(case, specimen, changed, second)
        finally:
            shutil.rmtree(second)
        return True, [f"{case}, seed {seed}: {text}" for text in wrong]
    finally:
        shutil.rmtree(root)


def _hit(specimen: Specimen, changed: set[str]) -> set[str]:
    """Commits that need what is damaged."""
    return {commit for path in changed for commit in specimen.needed_by.get(path, set())}


def _opened(root: Path) -> tuple[Held | None, str]:
    """What the store says, or its own error when it is refused as damaged."""
    try:
        with shardb.open(root) as store:
            return held(store), ""
    except shardb.ShardbError as error:
        return None, f"exit code {error.exit_code}: {error}"


def _judge_reading(
    case: Case, specimen: Specimen, changed: set[str], root: Path, report: Report
) -> list[str]:
    """Never wrong bytes, never an older state; what is refused is an error of the check too."""
    now, refused = _opened(root)
    if now is None:
        if case.kind in (*OBJECTS, "closed log segment", "index", *SCRATCH):
            return [f"refused: {refused}"]
        named = any(path.rpartition("/")[2] in refused for path in changed)
        if named and report.has_errors and refused.startswith("exit code 3"):
            return []
        return [f"refused with {refused!r}, and the check says {report.findings}"]
    wrong = []
    if (now.branches, now.snapshots) != (specimen.held.branches, specimen.held.snapshots):
        wrong.append(f"opened at another state: {now.branches}, {now.snapshots}")
    elif now.records != specimen.held.records:
        wrong.append("a commit's record says something else")
    for commit, shards in now.shards.items():
        for name, data in shards.items():
            if specimen.held.shards.get(commit, {}).get(name) != data:
                wrong.append(f"wrong bytes of {name} of step {specimen.steps.get(commit)}")
    hit = _hit(specimen, changed)
    for text in now.wrong:
        commit, _, code = text.split(" ")[:3]
        if commit not in hit or code != "3":
            wrong.append(f"not damaged, and not read: {text}")
    if now.wrong and not report.has_errors:
        wrong.append(f"the check found no error, and reading did: {now.wrong[0]}")
    return wrong


def _judge_findings(
    case: Case, specimen: Specimen, changed: set[str], root: Path, report: Report
) -> list[str]:
    """Errors name what is hit, and nothing else: the files, and who needs them."""
    errors = [finding for finding in report.findings if finding.severity == "error"]
    named = {Path(finding.path).relative_to(root).as_posix() for finding in errors}
    if case.kind in SCRATCH:
        return [f"no error was expected: {errors}"] if errors else []
    if case.kind not in OBJECTS:
        return [f"named, not damaged: {f}" for f in errors if not _may_name(f, changed)]
    wrong = []
    if named != changed:
        wrong.append(f"damaged {changed}, found {named}")
    hit = _hit(specimen, changed)
    steps = {step for finding in errors for step in finding.steps}
    if steps != {specimen.steps[commit] for commit in hit}:
        wrong.append(f"steps {sorted(steps)} named, {sorted(specimen.steps[c] for c in hit)} hit")
    names = {
        "snapshots": {n for n, commit in specimen.held.snapshots.items() if commit in hit},
        "branches": {n for n, kept in specimen.held.branches.items() if not hit.isdisjoint(kept)},
    }
    for what, expected in names.items():
        told = {name for finding in errors for name in getattr(finding, what)}
        if told != expected:
            wrong.append(f"{what} {sorted(told)} named, {sorted(expected)} hit")
    return wrong


def _may_name(finding: Finding, changed: set[str]) -> bool:
    """Whether a file outside `objects/` is hit: it is damaged, or does not follow on one that is.

    A log segment has one number, closed or not.
    """
    numbers = {Path(path).name.split(".")[0] for path in changed}
    name = Path(finding.path).name.split(".")[0]
    follows = finding.kind == "log_chain_broken" and f"{int(name) - 1:010d}" in numbers
    return name in numbers or follows


def _judge_repair(case: Case, specimen: Specimen, changed: set[str], root: Path) -> list[str]:
    """A repaired store opens; everything that was not hit is in it, to the byte, and it goes on."""
    hit = _hit(specimen, changed) if case.kind in OBJECTS else set()
    outcome = repair(str(root), yes=True)
    if hit == set(specimen.steps):  # nothing is whole: everything is kept, and said to be damaged
        return [] if outcome.plan.unmended else ["everything is damaged, and nothing is said"]
    wrong = [f"still found after the repair: {finding}" for finding in outcome.remaining]
    now, refused = _opened(root)
    if now is None:
        return [*wrong, f"refused after the repair: {refused}"]
    exchanged = case.damage == "exchange" and case.kind == "object"
    expected = set(specimen.steps) - (set() if exchanged or not outcome.plan.loses else hit)
    if not expected <= set(now.shards):
        wrong.append(f"lost steps {sorted(specimen.steps[c] for c in expected - set(now.shards))}")
    if now.wrong:
        wrong.append(f"unreadable after the repair: {now.wrong[0]}")
    others = [c for c in now.shards if now.shards[c] != specimen.held.shards.get(c)]
    wrong += [f"wrong bytes of step {specimen.steps.get(c)} after the repair" for c in others]
    names_before = (specimen.held.branches, specimen.held.snapshots)
    if not hit and (now.branches, now.snapshots) != names_before:
        wrong.append(f"names have changed: {now.branches}, {now.snapshots}")
    return wrong + _judge_going_on(root)


def _judge_going_on(root: Path) -> list[str]:
    with shardb.open(root) as store:
        made = commit_step(store, store.resolve().step + 1)
        read: Callable[[str], object] = held(store).shards[made.id].get
        missing = [name for name in made.shards if read(name) is None]
    findings = [f for f in fsck(root).findings if f.severity == "error"]
    return [f"a further commit: {missing} {findings}"] if missing or findings else []
