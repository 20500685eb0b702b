"""The verb `fsck`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

import typer

from shardb.cli.places import JsonOption, StoreArgument, store_path
from shardb.cli.printing import in_bytes, print_json
from shardb.cli.progress import ObjectsLine
from shardb.cli.verified import VerifiedTimes
from shardb.durations import duration
from shardb.errors import ShardbError, UsageError
from shardb.filesystem import RealFileSystem
from shardb.findings import Finding, Report
from shardb.fsck import check_store

DURATION = re.compile(r"^(\d+(?:\.\d+)?)(s|m|h|)$")
UNIT_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}


def fsck(
    store: StoreArgument = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            metavar="TIME",
            help="Stop reading objects after this long (60s, 10m, 2h). Those that were not "
            "verified for longest come first.",
        ),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Check a store: the log, the index against it, and every byte of every object in use.

    It only reads, and repairs nothing. Each finding names the file, what was expected and found,
    which shards, branches, steps and snapshots it hits, the nearest intact step, and the next
    command. The exit code is 1 when there is an error; warnings and infos, such as leftovers that
    `shardb gc` removes, do not change it.

    \b
    Examples:
      shardb fsck run
      shardb fsck run --budget 60s
      shardb fsck run --json

    Keys of --json: findings (each with kind, severity, path, offset, expected, found, shards,
    branches, steps, snapshots, nearest_intact_step, nearest_intact_branch, next_command),
    objects_checked, bytes_checked, seconds, complete. It is printed whatever the exit code; with
    error (kind, path, message) where there is no store or it cannot be read at all.

    It may run beside a live `train`. An interrupt leaves nothing behind.
    """
    root = store_path(store)
    files = RealFileSystem()
    verified = VerifiedTimes(files, root)
    budget_seconds = None if budget is None else _seconds(budget)
    try:
        with ObjectsLine("checked") as line:
            report = check_store(
                files,
                root,
                budget_seconds=budget_seconds,
                verified=verified.times,
                on_progress=line.show_objects,
                on_verified=verified.add,
            )
    except ShardbError as error:
        if json:
            print_json({**Report(complete=False).to_json(), "error": error.to_json()})
        raise
    finally:
        verified.save()
    if json:
        print_json(report.to_json())
    else:
        _print_text(root, report)
    return 1 if report.has_errors else 0


def _seconds(text: str) -> float:
    match = DURATION.match(text)
    if match is None:
        raise UsageError(f"--budget {text!r}: give a time such as 60s, 10m or 2h")
    return float(match.group(1)) * UNIT_SECONDS[match.group(2)]


def _print_text(root: str, report: Report) -> None:
    for finding in report.findings:
        for line in _lines(root, finding):
            print(line)
    counts = {
        severity: sum(f.severity == severity for f in report.findings)
        for severity in ("error", "warning", "info")
    }
    found = ", ".join(
        f"{count} {severity}{'s' if count > 1 else ''}"
        for severity, count in counts.items()
        if count
    )
    rest = "" if report.complete else "; not every object was read"
    print(
        f"checked {report.objects_checked} objects, {in_bytes(report.bytes_checked)} in "
        f"{duration(report.seconds)}: {found or 'no findings'}{rest}"
    )


def _lines(root: str, finding: Finding) -> Iterator[str]:
    at = f" at byte {finding.offset}" if finding.offset else ""
    yield f"{finding.severity}: {finding.kind}: {finding.path.removeprefix(f'{root}/')}{at}"
    for word, text in (("expected", finding.expected), ("found", finding.found)):
        if text:
            yield f"    {word} {text}"
    hit = {
        "shards": finding.shards,
        "branches": finding.branches,
        "steps": finding.steps,
        "snapshots": finding.snapshots,
    }
    if any(hit.values()):
        yield "    hits " + "; ".join(
            f"{word} {', '.join(map(str, names))}" for word, names in hit.items() if names
        )
    if finding.nearest_intact_step is not None:
        branch = finding.nearest_intact_branch
        other = f" of branch {branch}" if branch is not None else ""
        yield f"    nearest intact step: {finding.nearest_intact_step}{other}"
    if finding.next_command:
        yield f"    next: {finding.next_command}"
