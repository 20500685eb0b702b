"""The text files of one preparation, read several times and found the same each time.

Owns the list of files, the check that nothing changed between two passes, and what the manifest
says of every file. It does not know splits or tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.data.manifest import SourceEntry
from trainer.data.progress import PrepareProgress
from trainer.data.readers import BAD_EXAMPLES_MAX, DocumentReader, Piece, ReadRules
from trainer.errors import InputError


class TextSources:
    """Files of one role ("text" or "val-text"), in the order given."""

    def __init__(
        self, role: str, paths: Sequence[Path], rules: ReadRules, progress: PrepareProgress
    ) -> None:
        self.role = role
        self.paths = tuple(paths)
        self.total_bytes = sum(path.stat().st_size for path in paths)
        self.bad_examples: list[str] = []
        self._rules = rules
        self._progress = progress
        self._entries: dict[Path, SourceEntry] = {}

    @property
    def entries(self) -> tuple[SourceEntry, ...]:
        """What the manifest says of the files; complete after the first pass."""
        return tuple(self._entries[path] for path in self.paths if path in self._entries)

    def pieces(self) -> Iterator[Piece]:
        """Read all files once; InputError when one is not what an earlier pass read."""
        for path in self.paths:
            reader = DocumentReader(path, self._rules, self._progress.advance)
            yield from reader.pieces()
            entry = SourceEntry(
                role=self.role,
                name=path.name,
                bytes=reader.source.byte_count,
                xxh3_128=reader.source.digest,
                documents=reader.documents,
                bad_lines=reader.bad_lines,
            )
            if self._entries.setdefault(path, entry) != entry:
                raise InputError(f"{path}: the file changed while it was being read; try again")
            room = BAD_EXAMPLES_MAX - len(self.bad_examples)
            self.bad_examples += [
                example for example in reader.bad_examples if example not in self.bad_examples
            ][: max(0, room)]


def refuse_repeated(text: Sequence[Path], val_text: Sequence[Path]) -> None:
    """Refuse a file that is given twice: training and validation would share its text."""
    seen: dict[Path, str] = {}
    for flag, paths in (("--text", text), ("--val-text", val_text)):
        for path in paths:
            earlier = seen.setdefault(path.resolve(), flag)
            is_twice = sum(path.resolve() == other.resolve() for other in paths) > 1
            if earlier != flag or is_twice:
                other = f"{earlier} and {flag}" if earlier != flag else f"{flag} twice"
                raise InputError(f"{path}: given to {other}; give every file once")
