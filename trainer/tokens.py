"""A batch of token rows as a model takes it: ids and, shifted by one, labels.

Owns the last check before ids reach a device, where a bad one would surface far from its cause.
Knows nothing of files; whoever reads them checks with file and offset first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainer.data.masked import begins_record, ids_of, is_masked
from trainer.device import Device
from trainer.errors import InputError
from trainer.head import IGNORED_LABEL
from trainer.model.config import ModelConfig
from trainer.model.micro_batch import Documents


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """ids and labels, int64 [B, T] on the device; `valid_count` labels count in the loss.

    documents: the records that share rows, where they are to be kept apart.
    """

    ids: Tensor
    labels: Tensor
    valid_count: int
    documents: Documents | None = None

    @classmethod
    def from_rows(cls, rows: NDArray[np.integer], config: ModelConfig, device: Device) -> Tokens:
        """Split rows [B, T + 1]; a label of -100 is ignored, and read as padding where it is input.

        A token that `trainer.data.masked` marks is read, and is no label.

        Raises:
            InputError: the rows have another shape, are longer than the model's positions, or hold
                an id outside the vocabulary.
        """
        plain = ids_of(rows)
        _check_rows(plain, config)
        inputs = plain[:, :-1]
        labels = np.where(is_masked(rows), IGNORED_LABEL, rows)[:, 1:]
        return cls(
            ids=device.tokens(np.where(inputs == IGNORED_LABEL, config.pad_token_id, inputs)),
            labels=device.tokens(labels),
            valid_count=int((labels != IGNORED_LABEL).sum()),
            documents=_documents(rows, device),
        )


def _documents(rows: NDArray[np.integer], device: Device) -> Documents | None:
    begins = begins_record(rows)[:, :-1]
    if not begins.any():
        return None
    columns = np.arange(begins.shape[1])
    # What comes before a row's first beginning, if anything does, counts from the row's own.
    starts = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    return Documents(positions_BT=device.tokens(columns - starts))


def _check_rows(rows: NDArray[np.integer], config: ModelConfig) -> None:
    if rows.ndim != 2 or rows.shape[0] < 1 or rows.shape[1] < 2:
        raise InputError(f"token rows have shape {rows.shape}: give [rows >= 1, tokens >= 2]")
    check_length(rows.shape[1] - 1, config)
    bad = (rows != IGNORED_LABEL) & ((rows < 0) | (rows >= config.vocab_size))
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise InputError(
            f"token id {rows[row, column]} in row {row}, position {column} of a batch is outside "
            f"the model's vocabulary of {config.vocab_size}: prepare the data with the model's "
            "tokenizer, or raise --vocab-size"
        )


def check_length(positions: int, config: ModelConfig) -> None:
    """Raise InputError when a row is longer than the model's positions."""
    if positions > config.max_position_embeddings:
        raise InputError(
            f"rows have {positions} tokens, the model {config.max_position_embeddings} positions: "
            "prepare shorter rows with --seq-len, or raise --max-position-embeddings"
        )
