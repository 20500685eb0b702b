"""Documents from text files, in constant memory.

Owns how a file becomes documents: `.txt` (and any other name) ends a document at `<|endoftext|>`,
`.jsonl` holds one a line in a text field; both may be zstd-packed. A file that is not UTF-8 and a
line that is no record are refused with file, line and byte, or left out and counted. It does not
know tokens or splits.

A document comes in pieces of at most `PIECE_CHARACTERS_MAX`, cut before white space. Where a piece
ends depends on the document alone, not on where in the file it stands, so equal documents have
equal pieces. Line ends of plain text are made LF; a byte order mark is dropped; a document of white
space alone is none.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from shardb.listing import listed
from trainer.data.conversations import Fault, record_fault
from trainer.data.source_bytes import SourceBytes
from trainer.errors import InputError

SEPARATOR: Final = "<|endoftext|>"
PIECE_CHARACTERS_MAX: Final = 1 << 18
LINE_BYTES_MAX: Final = 1 << 26
BAD_EXAMPLES_MAX: Final = 5

# The separator takes the line feed before it and the rest of its line with it.
_SEPARATOR_LINE = re.compile(r"\n?<\|endoftext\|>[ \t]{0,64}\n?")
_SEPARATOR_CHARACTERS_MAX = len(SEPARATOR) + 66
# A line of plain text longer than this is decoded in parts.
_TEXT_LINE_BYTES_MAX = 1 << 20
# Written at the beginning of a file by editors of another system; no part of the text.
_BYTE_ORDER_MARK = "\ufeff"


class Piece(NamedTuple):
    """A part of one document; most documents are one piece, the first and the last."""

    text: str
    first: bool
    last: bool


@dataclass(frozen=True, kw_only=True)
class ReadRules:
    """How files are read: the field of JSON lines that holds the text; what a bad line does.

    form: `text`, or a form of `trainer.data.conversations`: then a document is a whole record, as
    JSON. fault: says why a record of that form cannot be encoded; None where it can.
    """

    text_field: str = "text"
    skip_bad: bool = False
    form: str = "text"
    fault: Callable[[Mapping[str, Any]], Fault | None] | None = None


class DocumentReader:
    """One pass over one file; the counts are complete when `pieces` is exhausted."""

    def __init__(
        self, path: Path, rules: ReadRules, on_bytes: Callable[[int], None] = lambda _: None
    ) -> None:
        self.path = path
        self.source = SourceBytes(path, on_bytes)
        self.documents = 0
        self.bad_lines = 0
        self.bad_examples: list[str] = []
        self._rules = rules

    def pieces(self) -> Iterator[Piece]:
        """Yield every piece of every document, in order."""
        blocks = self.source.blocks()
        is_json = self.path.name.removesuffix(".zst").endswith((".jsonl", ".ndjson", ".json"))
        if self._rules.form != "text" and not is_json:
            raise InputError(
                f"{self.path}: --format {self._rules.form} reads lines of JSON: give .jsonl files"
            )
        found = self._records(blocks) if is_json else text_pieces(self._texts(blocks))
        for piece in found:
            if piece.first and piece.last and not piece.text.strip():
                continue
            self.documents += piece.last
            yield piece

    def _texts(self, blocks: Iterator[bytes]) -> Iterator[str]:
        for offset, line, block in whole_lines(blocks, _TEXT_LINE_BYTES_MAX):
            try:
                text = block.decode()
            except UnicodeDecodeError as error:
                if not self._rules.skip_bad:
                    raise self._bad_utf8(error, block, offset, line) from error
                text = "".join(self._good_lines(block, offset, line))
            if offset == 0:
                text = text.removeprefix(_BYTE_ORDER_MARK)
            yield text.replace("\r\n", "\n").replace("\r", "\n")

    def _good_lines(self, block: bytes, offset: int, line: int) -> Iterator[str]:
        for number, part in enumerate(io.BytesIO(block), line):
            try:
                yield part.decode()
            except UnicodeDecodeError as error:
                self._count_bad(self._bad_utf8(error, part, offset, number))
            offset += len(part)

    def _records(self, blocks: Iterator[bytes]) -> Iterator[Piece]:
        for offset, line, record in json_lines(blocks, LINE_BYTES_MAX):
            try:
                text = self._record_text(record, offset, line)
            except InputError as error:
                if not self._rules.skip_bad:
                    raise
                self._count_bad(error)
            else:
                yield from document_pieces(text) if text is not None else ()

    def _record_text(self, record: bytes | None, offset: int, line: int) -> str | None:
        """Return the text of one line; None for a blank line; InputError says what is wrong."""
        if record is None:
            raise self._bad(line, f"longer than {LINE_BYTES_MAX:,} bytes; split the record")
        if not record.strip():
            return None
        try:
            text = record.decode()
            body = json.loads(text.removeprefix(_BYTE_ORDER_MARK) if offset == 0 else text)
        except UnicodeDecodeError as error:
            raise self._bad_utf8(error, record, offset, line) from error
        except (ValueError, RecursionError) as error:
            raise self._bad(line, f"not valid JSON ({error})") from error
        return self._text_of(body, line)

    def _text_of(self, body: Any, line: int) -> str:
        field = self._rules.text_field
        if not isinstance(body, dict):
            raise self._bad(line, "not a JSON object; write one object a line")
        if self._rules.form != "text":
            return self._record_of(body, line)
        if field not in body:
            names = listed(sorted(body)) or "none"
            raise self._bad(line, f'no field "{field}" (fields: {names}); give --text-field')
        text = body[field]
        if not isinstance(text, str):
            raise self._bad(line, f'field "{field}" is {type(text).__name__}, not text')
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise self._bad(line, f'field "{field}" has half a surrogate pair') from error
        return text

    def _record_of(self, body: dict[str, Any], line: int) -> str:
        fault = record_fault(body, self._rules.form)
        if fault is not None:
            raise self._bad(line, fault)
        found = self._rules.fault(body) if self._rules.fault is not None else None
        if found is not None:
            raise self._bad(line, found.what, found.mend)
        fields = ("messages",) if self._rules.form == "chat" else ("prompt", "completion")
        values = {name: body[name] for name in fields}
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise self._bad(line, "half a surrogate pair stands in a text") from error
        text = json.dumps(values, sort_keys=True)
        if len(text) > PIECE_CHARACTERS_MAX:
            raise self._bad(line, f"a record of more than {PIECE_CHARACTERS_MAX:,} characters")
        return text

    def _bad(self, line: int, reason: str, mend: str = "the line") -> InputError:
        return InputError(
            f"{self.path}: line {line:,}: {reason}; mend {mend}, or use "
            "--skip-bad to leave such lines out"
        )

    def _bad_utf8(
        self, error: UnicodeDecodeError, block: bytes, offset: int, line: int
    ) -> InputError:
        line += block.count(b"\n", 0, error.start)
        where = f"byte {offset + error.start:,}" + (
            " of the unpacked text" if self.source.is_packed else ""
        )
        return InputError(
            f"{self.path}: line {line:,}, {where}: not UTF-8 (byte 0x{block[error.start]:02x}); "
            "convert the file with iconv, or use --skip-bad to leave such lines out"
        )

    def _count_bad(self, error: InputError) -> None:
        self.bad_lines += 1
        if len(self.bad_examples) < BAD_EXAMPLES_MAX:
            self.bad_examples.append(str(error))


def text_pieces(texts: Iterator[str]) -> Iterator[Piece]:
    """Cut running text at every separator; what follows the last one is a document too."""
    held, first = "", True
    for text in texts:
        held += text
        at = 0
        while match := _SEPARATOR_LINE.search(held, at):
            if match.end() == len(held):
                break  # The rest of the separator's line may be in the next block.
            yield from document_pieces(held[at : match.start()], first)
            at, first = match.end(), True
        # Cut a long document only where no separator can begin: its pieces must not depend on
        # how much of it happens to be in memory.
        while match is None and len(held) - at > PIECE_CHARACTERS_MAX + _SEPARATOR_CHARACTERS_MAX:
            end = piece_end(held, at)
            yield Piece(held[at:end], first, False)
            at, first = end, False
        held = held[at:]
    match = _SEPARATOR_LINE.search(held)
    yield from document_pieces(held[: match.start()] if match else held, first)


def document_pieces(text: str, first: bool = True) -> Iterator[Piece]:
    """Cut one document, or the rest of one, into pieces."""
    at = 0
    while len(text) - at > PIECE_CHARACTERS_MAX:
        end = piece_end(text, at)
        yield Piece(text[at:end], first, False)
        at, first = end, False
    yield Piece(text[at:], first, True)


def piece_end(text: str, at: int) -> int:
    """Return where a piece that begins at `at` ends: before a run of white space.

    There the pre-tokenizers of byte-level BPE begin a new word, so the tokens are those of the
    whole document. A line end is preferred to a space; without either the piece is of full length.
    """
    least, most = at + PIECE_CHARACTERS_MAX // 2, at + PIECE_CHARACTERS_MAX
    for space in ("\n", " "):
        end = text.rfind(space, least, most)
        while end > least and text[end - 1].isspace():
            end -= 1
        if end > least:
            return end
    return most


def whole_lines(blocks: Iterator[bytes], longest: int) -> Iterator[tuple[int, int, bytes]]:
    """Regroup blocks to end at line ends; yield (byte offset, line number, bytes).

    A line longer than `longest` comes in parts that end between two characters.
    """
    held, offset, line = b"", 0, 1
    for block in blocks:
        held += block
        end = held.rfind(b"\n") + 1
        if not end and len(held) > longest:
            end = character_end(held)
        if end:
            yield offset, line, held[:end]
            offset, line, held = offset + end, line + held.count(b"\n", 0, end), held[end:]
    if held:
        yield offset, line, held


def character_end(data: bytes) -> int:
    """Return the length of `data` without a character that is not complete, nor a final CR."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        width = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        is_complete = width <= back and byte != 0x0D
        return len(data) if is_complete else len(data) - back
    return len(data)


def json_lines(blocks: Iterator[bytes], longest: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield (byte offset, line number, line); None in place of a line longer than `longest`."""
    parts: list[bytes] = []
    size, offset, line = 0, 0, 1
    for block in blocks:
        for part in block.splitlines(keepends=True):
            size += len(part)
            if size <= longest:
                parts.append(part)
            else:
                parts.clear()  # What is too long is counted but not kept.
            if part.endswith(b"\n"):
                yield offset, line, b"".join(parts) if size <= longest else None
                offset, line, size, parts = offset + size, line + 1, 0, []
    if size:
        yield offset, line, b"".join(parts) if size <= longest else None
