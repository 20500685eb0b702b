"""What a doctor says of a package: findings, each with its place and its remedy.

Owns the form of a finding and the grades. Knows nothing of formats. A note is worth knowing and no
fault; an error makes some reader fail or load another model; a warning does so in some versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardb.errors import ShardbError

ERROR, WARNING, NOTE = "error", "warning", "note"
GRADES = (ERROR, WARNING, NOTE)
NAMED_MAX = 5


class UnreadablePackageError(ShardbError):
    """What was given is no package, or nothing of it can be read."""

    kind = "package_unreadable"
    exit_code = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is wrong or worth knowing; `field` is a setting, a tensor, or empty."""

    severity: str
    file: str
    field: str
    what: str
    remedy: str

    def to_json(self) -> dict[str, Any]:
        """Give every field by name."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Makes the findings of one file."""

    file: str

    def error(self, field: str, what: str, remedy: str) -> Finding:
        """Some reader fails, or loads another model."""
        return Finding(severity=ERROR, file=self.file, field=field, what=what, remedy=remedy)

    def warning(self, field: str, what: str, remedy: str) -> Finding:
        """Some version of some reader fails, or loads another model."""
        return Finding(severity=WARNING, file=self.file, field=field, what=what, remedy=remedy)

    def note(self, field: str, what: str, remedy: str = "") -> Finding:
        """No fault, but worth knowing."""
        return Finding(severity=NOTE, file=self.file, field=field, what=what, remedy=remedy)


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """What was looked at, and what was found, the worst first."""

    path: str
    kind: str
    tensors: int
    weight_bytes: int
    values_read: int
    against: str | None
    findings: Sequence[Finding]

    @property
    def exit_code(self) -> int:
        """Give 1 where there is an error or a warning."""
        return int(any(finding.severity != NOTE for finding in self.findings))

    def to_json(self) -> dict[str, Any]:
        """Give every field by name, with the number of findings of each grade."""
        counts = {grade: sum(f.severity == grade for f in self.findings) for grade in GRADES}
        found = [finding.to_json() for finding in self.findings]
        return {**asdict(self), "findings": found, "counts": counts}


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """Order by grade, then as they were found; one that was found twice is told once."""
    return sorted(dict.fromkeys(findings), key=lambda finding: GRADES.index(finding.severity))


def few(names: Sequence[str]) -> str:
    """Name the first few and count the rest."""
    rest = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {rest} more" if rest > 0 else "")
