"""Commits of a run as packages, and what transformers makes of them.

Owns the two processes of it, the exporter's and transformers', and their records. Knows nothing of
which commits are worth it. An export is recorded under its name with its exit code and its words.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.evidence_recipes import Scale
from tools.evidence_runs import Place, copy_lines, output_of, run_tool


@dataclass(frozen=True, kw_only=True)
class Export:
    """A package: its name, the commits it is made of, and the held-out rows it is measured on."""

    name: str
    store: Path
    commits: Sequence[str]
    data: Path
    batch_rows: int
    losses_alone: bool = False

    def words(self) -> list[str]:
        """Give the exporter's flag: one commit, or the mean of several."""
        flag = "--ref" if len(self.commits) == 1 else "--average"
        return [flag, ",".join(self.commits)]


def export(wanted: Export, place: Place, scale: Scale, limit: float) -> None:
    """Export, load by transformers in a process of its own, measure, and let it write."""
    ends_at = time.monotonic() + limit
    out = place.disk / f"{wanted.name}-package"
    began = time.monotonic()
    words = ["export.hf_cli", str(wanted.store), *wanted.words(), "--out", str(out), "--overwrite"]
    code = run_tool(words, place, f"{wanted.name}-export", limit)
    place.record.write(
        "exported",
        package=wanted.name,
        commits=list(wanted.commits),
        exit_code=code,
        seconds=round(time.monotonic() - began, 1),
        said=output_of(place, f"{wanted.name}-export")[-2500:],
    )
    found, name = place.disk / f"{wanted.name}.jsonl", f"{wanted.name}-transformers"
    words = ["tools.evidence_package", "--package", str(out), "--data", str(wanted.data)]
    words += ["--device", scale.device, "--out", str(found)]
    words += ["--batch-rows", str(wanted.batch_rows)]
    words += ["--losses-alone"] if wanted.losses_alone else []
    words += ["--rows", "2"] if scale.is_tiny else []
    code = run_tool(words, place, name, ends_at - time.monotonic())
    said = output_of(place, name)[-600:]
    copy_lines(found, place, "ended", package=wanted.name, exit_code=code, said=said)
