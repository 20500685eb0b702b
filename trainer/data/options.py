"""What to prepare, of which files, and how: checked once, when it is made.

Owns the limits of every option and the messages that name its flag. It touches no file but to see
whether two names are one file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trainer.data.conversations import FORMATS
from trainer.data.packing import ROWS_PER_FILE
from trainer.data.readers import ReadRules
from trainer.data.sources import refuse_repeated
from trainer.data.tokenizer import BYTE_COUNT, TRAINED_VOCAB_MIN
from trainer.errors import InputError

VAL_FRACTION: Final = 0.05
VAL_FRACTION_MAX: Final = 0.5
SEQ_LEN_MAX: Final = 1 << 20
VOCAB_MAX: Final = 1 << 24


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The options of one preparation; InputError names the flag that is wrong."""

    text: tuple[Path, ...]
    out: Path
    seq_len: int
    vocab_size: int | None = None
    tokenizer: Path | None = None
    end_of_text: str | None = None
    val_text: tuple[Path, ...] = ()
    val_fraction: float = VAL_FRACTION
    rules: ReadRules = field(default_factory=ReadRules)
    overwrite: bool = False
    seed: int = 0
    rows_per_file: int = ROWS_PER_FILE
    chat_template: Path | None = None
    pack: bool = False
    attend_across: bool = False

    @property
    def has_records(self) -> bool:
        """Say whether the files hold records of which a part is learned, not text."""
        return self.rules.form != "text"

    @property
    def keeps_apart(self) -> bool:
        """Say whether records that share a row are marked, so that they do not see each other."""
        return self.pack and not self.attend_across

    def __post_init__(self) -> None:
        if not self.text:
            raise InputError("--text: give at least one text file")
        if not 1 <= self.seq_len <= SEQ_LEN_MAX:
            raise InputError(f"--seq-len {self.seq_len}: give 1 to {SEQ_LEN_MAX:,} tokens a row")
        if not 0 < self.val_fraction <= VAL_FRACTION_MAX:
            raise InputError(
                f"--val-fraction {self.val_fraction}: give more than 0 and at most "
                f"{VAL_FRACTION_MAX}; a model is always validated on text that is held out "
                "(--val-text takes it from files of its own)"
            )
        if self.rows_per_file < 1:
            raise InputError(f"--rows-per-file {self.rows_per_file}: give at least 1")
        self._check_records()
        self._check_vocabulary()
        refuse_repeated(self.text, self.val_text)

    def _check_records(self) -> None:
        form = self.rules.form
        if form not in FORMATS:
            raise InputError(f"--format {form!r}: choose from {', '.join(FORMATS)}")
        if self.has_records and self.tokenizer is None:
            raise InputError(f"--format {form}: give --tokenizer, that of the model to be tuned")
        if self.pack and not self.has_records:
            raise InputError("--pack is for records; text fills its rows anyway: leave it out")
        if self.attend_across and not self.pack:
            raise InputError("--attend-across is for records that share rows: give --pack too")
        if self.chat_template is not None and form != "chat":
            raise InputError("--chat-template goes with --format chat")

    def _check_vocabulary(self) -> None:
        if self.tokenizer is None and self.end_of_text is not None:
            raise InputError("--end-of-text: only with --tokenizer; one trained here has its own")
        if self.vocab_size is None:
            if self.tokenizer is None:
                raise InputError("--vocab-size: give it, or a --tokenizer that is trained already")
            return
        least = 1 if self.tokenizer else TRAINED_VOCAB_MIN
        if not least <= self.vocab_size <= VOCAB_MAX:
            reason = "" if self.tokenizer else f" ({BYTE_COUNT} bytes and the end of a text)"
            raise InputError(
                f"--vocab-size {self.vocab_size}: give {least:,} to {VOCAB_MAX:,}{reason}"
            )
