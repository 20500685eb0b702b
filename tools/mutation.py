"""`make mutation`: plant one fault after the other in a copy of the engine; do the tests notice?

The faults are data, in `mutation_table.toml`. The tree is copied to a temporary folder, and never
edited where it lies; there each mutant's tests must fail. First they must pass without any fault,
or a failing test would prove nothing. A mutant that survives is a hole in the tests. Interrupt it
at any time: the same command goes on, and tries again only what changed or survived.

Exit codes: 0 every mutant was killed; 1 some were not, or the tests fail without a fault; 2 usage,
or a mutant that does not fit the sources any more; 130 and 143 interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
TABLE = REPOSITORY / "tools" / "mutation_table.toml"
NOT_COPIED = shutil.ignore_patterns(
    *(".*", "__pycache__", "*.egg-info", "build", "dist", "demo-run", "benchmarks")
)
LIMIT_SECONDS = 600.0
PASSED, FAILED = 0, 1  # pytest's exit codes
CONTROL = "(no fault)"


class StaleMutantError(ValueError):
    """The table does not fit the sources: what a mutant replaces is not there exactly once."""


@dataclass(frozen=True, kw_only=True)
class Edit:
    """One replacement in one file."""

    file: str
    find: str
    replace: str


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A planted fault, what it is in words, and the tests that should notice, in order."""

    name: str
    fault: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]

    def sources(self, root: Path) -> dict[str, str]:
        """The files with the fault; StaleMutantError where one does not fit any more."""
        changed: dict[str, str] = {}
        for edit in self.edits:
            text = changed.get(edit.file) or (root / edit.file).read_text(encoding="utf-8")
            count = text.count(edit.find)
            if count != 1 or edit.find == edit.replace:
                raise StaleMutantError(
                    f"mutant {self.name}: what it replaces is {count} times in {edit.file}, not "
                    "once; mend its entry in tools/mutation_table.toml"
                )
            changed[edit.file] = text.replace(edit.find, edit.replace)
        return changed


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of one run of the tests; `outcome` is killed, survived or undecided."""

    name: str
    outcome: str
    seconds: float
    by: str
    fingerprint: str


def load(path: Path = TABLE) -> list[Mutant]:
    """Read the table; names of selections are replaced by what they stand for."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    selections: Mapping[str, list[str]] = table["selections"]

    def tests_of(row: Mapping[str, Any]) -> tuple[str, ...]:
        lists = (selections[t[1:]] if t.startswith("@") else [t] for t in row["tests"])
        return tuple(dict.fromkeys(test for tests in lists for test in tests))

    return [
        Mutant(
            name=row["name"],
            fault=row["fault"],
            edits=tuple(Edit(**edit) for edit in row["edits"]),
            tests=tests_of(row),
        )
        for row in table["mutants"]
    ]


class Workshop:
    """A copy of the tree in which faults are planted, one at a time."""

    def __init__(self, root: Path, limit_seconds: float) -> None:
        self.root = root
        self._limit_seconds = limit_seconds
        shutil.copytree(REPOSITORY, root, ignore=NOT_COPIED, symlinks=True)

    def try_mutant(self, mutant: Mutant) -> Verdict:
        """Plant a fault, run its tests, take it out again."""
        with self._planted(mutant.sources(self.root)):
            code, seconds, said = self._pytest(mutant.tests)
        outcome = {PASSED: "survived", FAILED: "killed"}.get(code, "undecided")
        by = _first_failure(said) if outcome == "killed" else ""
        if outcome == "undecided":
            by = f"pytest ended with {code}: {said.strip().splitlines()[-1:]}"
        return Verdict(
            name=mutant.name,
            outcome=outcome,
            seconds=round(seconds, 1),
            by=by,
            fingerprint=self.fingerprint(mutant),
        )

    def control(self, tests: Sequence[str]) -> str:
        """Run tests without a fault; what they said when they failed, nothing when they passed."""
        code, _, said = self._pytest(tests, limited=False)
        return "" if code == PASSED else said[-3000:]

    def fingerprint(self, mutant: Mutant) -> str:
        """Says whether a verdict is still about this mutant in these sources."""
        told = json.dumps([asdict(mutant), mutant.sources(self.root)])
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def fingerprint_of_control(self, tests: Sequence[str]) -> str:
        """Says whether these tests have passed, as they are now, with this engine."""
        digest = hashlib.sha256(json.dumps(sorted(tests)).encode())
        for place in ("shardb", *(test.split("::")[0] for test in tests)):
            found = self.root / place
            for path in sorted(found.rglob("*.py")) if found.is_dir() else [found]:
                digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    @contextmanager
    def _planted(self, sources: Mapping[str, str]) -> Iterator[None]:
        before = {file: (self.root / file).read_text(encoding="utf-8") for file in sources}
        try:
            for file, text in sources.items():
                (self.root / file).write_text(text, encoding="utf-8")
            yield
        finally:
            for file, text in before.items():
                (self.root / file).write_text(text, encoding="utf-8")

    def _pytest(self, tests: Sequence[str], *, limited: bool = True) -> tuple[int, float, str]:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
        paths = [*tests, *([] if limited else ["--maxfail=3"])]
        # Compiled files are told apart by the second and the size: a mutant may have both.
        own = {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        began = time.monotonic()
        with subprocess.Popen(
            [*command, *paths],
            cwd=self.root,
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=self._limit_seconds if limited else None)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                said, _ = process.communicate()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                return -1, time.monotonic() - began, f"{said}\nno end after the time limit"
        return process.returncode, time.monotonic() - began, said


def _first_failure(said: str) -> str:
    lines = [line for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0].split(" ", 1)[1].split(" - ")[0] if lines else ""


class Results:
    """The verdicts so far, kept in a file: one line of JSON each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.known: dict[str, Verdict] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                verdict = Verdict(**json.loads(line))
                self.known[verdict.name] = verdict

    def holds(self, name: str, fingerprint: str) -> bool:
        """Whether a mutant was killed, or the control arm passed, as things are now."""
        known = self.known.get(name)
        return known is not None and (known.outcome, known.fingerprint) == ("killed", fingerprint)

    def add(self, verdict: Verdict) -> None:
        """Keep a verdict."""
        self.known[verdict.name] = verdict
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(verdict)) + "\n")


OnVerdict = Callable[[Verdict, int, int, float], None]


def judge(
    mutants: Sequence[Mutant], workshop: Workshop, results: Results, on_verdict: OnVerdict
) -> str:
    """Run the control arm, then every mutant without a verdict; what went wrong in the first."""
    pending = [m for m in mutants if not results.holds(m.name, workshop.fingerprint(m))]
    if not pending:
        return ""
    tests = list(dict.fromkeys(test for mutant in pending for test in mutant.tests))
    if failure := _control(tests, workshop, results):
        return failure
    began = time.monotonic()
    for number, mutant in enumerate(pending, start=1):
        verdict = workshop.try_mutant(mutant)
        results.add(verdict)
        left = (time.monotonic() - began) / number * (len(pending) - number)
        on_verdict(verdict, number, len(pending), left)
    return ""


def _control(tests: Sequence[str], workshop: Workshop, results: Results) -> str:
    """Run the tests that have not passed without a fault in these sources."""
    for test in tests:
        name = f"{CONTROL} {test}"
        fingerprint = workshop.fingerprint_of_control([test])
        if results.holds(name, fingerprint):
            continue
        began = time.monotonic()
        if failure := workshop.control([test]):
            return failure
        seconds = round(time.monotonic() - began, 1)
        results.add(
            Verdict(name=name, outcome="killed", seconds=seconds, by="", fingerprint=fingerprint)
        )
        print(f"{name}: passes, {seconds:.0f} s", file=sys.stderr, flush=True)
    return ""


def main(words: Sequence[str] | None = None) -> int:
    """Judge the mutants asked for, by default all of them."""
    arguments = _arguments(words)
    mutants = load(Path(arguments.table))
    unknown = set(arguments.only or ()) - {mutant.name for mutant in mutants}
    if unknown:
        print(f"mutation: no mutant is called {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    mutants = [m for m in mutants if not arguments.only or m.name in arguments.only]
    if arguments.list:
        for mutant in mutants:
            print(f"{mutant.name}: {mutant.fault}")
        return 0
    results = Results(Path(arguments.file))
    scratch = tempfile.mkdtemp(prefix="shardb-mutation-")
    try:
        workshop = Workshop(Path(scratch) / "tree", arguments.limit)
        failure = judge(mutants, workshop, results, _say)
    except StaleMutantError as error:
        print(f"mutation: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mutation: interrupted; the same command goes on", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(scratch)
    if failure:
        print(f"mutation: the tests fail without a fault:\n{failure}", file=sys.stderr)
        return 1
    return _report(mutants, results, as_json=arguments.json)


def _say(verdict: Verdict, number: int, count: int, left_seconds: float) -> None:
    line = f"{number} of {count}: {verdict.name} {verdict.outcome} ({verdict.seconds:.0f} s)"
    told = f" by {verdict.by}" if verdict.by else ""
    print(f"{line}{told}; {left_seconds / 60:.0f} min left", file=sys.stderr, flush=True)


def _report(mutants: Sequence[Mutant], results: Results, *, as_json: bool) -> int:
    verdicts = [results.known[mutant.name] for mutant in mutants]
    alive = [verdict for verdict in verdicts if verdict.outcome != "killed"]
    killed = len(verdicts) - len(alive)
    if as_json:
        told = [{**asdict(v), "fault": m.fault} for m, v in zip(mutants, verdicts, strict=True)]
        print(json.dumps({"killed": killed, "mutants": told}, indent=2))
    else:
        for verdict in alive:
            print(f"{verdict.outcome}: {verdict.name} {verdict.by}")
        print(f"{killed} of {len(verdicts)} mutants killed")
    return 1 if alive else 0


def _cache() -> str:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "shardb", "mutation.jsonl")


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    text = __doc__ or ""
    parser = argparse.ArgumentParser(
        description=text.split("\n")[0], epilog=text.rpartition("\n\n")[2]
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="may be repeated")
    parser.add_argument("--list", action="store_true", help="say what the mutants are, and end")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for each")
    parser.add_argument("--file", default=_cache(), help="where verdicts are kept")
    parser.add_argument("--table", default=str(TABLE), help="other mutants")
    parser.add_argument("--json", action="store_true", help="print the verdicts as JSON")
    return parser.parse_args(words)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves through `finally`
    sys.exit(main())
