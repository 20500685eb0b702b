"""Records become rows of both splits: the encoding pass of `prepare` where a part is learned.

Owns that pass and what it refuses. Knows nothing of files or of publishing.
"""

from __future__ import annotations

from pathlib import Path

from trainer.data.chat_template import read_template
from trainer.data.conversations import ConversationEncoder
from trainer.data.corpus import Corpus
from trainer.data.manifest import SPLITS, SplitEntry
from trainer.data.options import PrepareOptions
from trainer.data.progress import PrepareProgress
from trainer.data.record_packing import RecordPacker
from trainer.data.split import DOCUMENTS_MIN, HashSplitter
from trainer.data.tokenizer import TextTokenizer
from trainer.errors import InputError


def encoded_records(
    corpus: Corpus,
    tokenizer: TextTokenizer,
    encoder: ConversationEncoder,
    options: PrepareOptions,
    folder: Path,
    progress: PrepareProgress,
) -> tuple[dict[str, SplitEntry], list[str]]:
    """Write every row of both splits; give what the manifest says of them, and what to know."""
    if not options.val_text and corpus.split_by != HashSplitter(limit=0, seed=0).name:
        raise InputError(
            f"--format {options.rules.form}: fewer than {DOCUMENTS_MIN} different records, or one"
            " that is most of them, cannot be split: give --val-text"
        )
    packers = {
        name: RecordPacker(
            folder / name,
            seq_len=options.seq_len,
            vocab_size=tokenizer.vocab_size,
            end_id=tokenizer.end_of_text_id,
            packs=options.pack,
            apart=options.keeps_apart,
            rows_per_file=options.rows_per_file,
        )
        for name in SPLITS
    }
    progress.begin("encoding", corpus.total_bytes)
    try:
        for parts in (corpus.val_text_parts(), corpus.text_parts()):
            for part in parts:
                packer = packers[part.split]
                packer.add_record(encoder.encode(part.text))
                packer.documents += 1
                packer.text_bytes += len(part.text.encode())
        for name, packer in packers.items():
            packer.flush()
            if not packer.learned_tokens:
                raise InputError(
                    f"the {name} split has no record of which {options.seq_len} tokens hold"
                    " something to learn: give more records or a larger --seq-len"
                )
        progress.end()
        splits = {n: packer.finish(tokenizer.unknown_id) for n, packer in packers.items()}
        return splits, _notes(packers, splits)
    finally:
        for packer in packers.values():
            packer.close()


def record_encoder(tokenizer: TextTokenizer, options: PrepareOptions) -> ConversationEncoder:
    """Give what makes ids of records; InputError names a template that cannot be used."""
    assert options.tokenizer is not None, "the options were checked"
    form = options.rules.form
    template = read_template(options.tokenizer, options.chat_template) if form == "chat" else None
    return ConversationEncoder(tokenizer.json_bytes, form, tokenizer.end_of_text_id, template)


def _notes(packers: dict[str, RecordPacker], splits: dict[str, SplitEntry]) -> list[str]:
    notes = []
    for name, packer in packers.items():
        if packer.unlearned_records:
            notes.append(
                f"{packer.unlearned_records:,} records of the {name} split were left out: nothing"
                " of them is learned within a row; --seq-len is too small for them"
            )
        if splits[name].tokens_dropped:
            notes.append(
                f"{splits[name].tokens_dropped:,} tokens of the {name} split were cut off: their"
                " records are longer than a row"
            )
    return notes
