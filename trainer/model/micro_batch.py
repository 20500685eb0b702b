"""What a stage may have to know of a micro-batch beside what the stage before it gives.

Owns that record: which dropout it has, and which records share its rows. Knows nothing of rows or
steps. Invariant: it is the same on the way forward and when a stage is computed again, so that both
give the same bits.

Shapes: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import xxhash
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class Documents:
    """Records that share rows and must not see each other.

    positions_BT: of each token within its own record, int64; a record begins where it is 0.
    """

    positions_BT: Tensor
    _masks: dict[tuple[torch.dtype, torch.device], Tensor] = field(default_factory=dict)

    def mask(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Give what is added to scores, [B, 1, T, T]: 0 within a record and its past, else -inf."""
        found = self._masks.get((dtype, device))
        if found is None:
            found = self._masks[dtype, device] = _mask(self.positions_BT.to(device), dtype)
        return found


def _mask(positions_BT: Tensor, dtype: torch.dtype) -> Tensor:
    record_BT = (positions_BT == 0).cumsum(1, dtype=torch.int32)
    seen_BTT = (record_BT[:, :, None] == record_BT[:, None, :]).tril_()
    return torch.zeros((), dtype=dtype, device=seen_BTT.device).where(seen_BTT, -torch.inf)[:, None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """drop_key: what dropout follows from; None where nothing is dropped, or no row is shared."""

    drop_key: str | None = None
    documents: Documents | None = None

    def drop_seed(self, stage: str, module: str) -> int | None:
        """Give the seed of one module's dropout, 63 bits; None where nothing is dropped."""
        if self.drop_key is None:
            return None
        return xxhash.xxh3_64_intdigest(f"{self.drop_key}/{stage}/{module}".encode()) >> 1


def stand_ins(ids: Sequence[Tensor], *, on_host: bool) -> list[Documents]:
    """Give records for token ids [B, T] without content, two a row: only their form counts."""
    place = torch.device("cpu") if on_host else torch.device("meta")
    found = []
    for each in ids:
        rows, count = each.shape
        positions_T = torch.arange(count, device=place) % max(1, -(-count // 2))
        found.append(Documents(positions_BT=positions_T.expand(rows, count).contiguous()))
    return found


def drop_keys(rate: float, *, seed: int, step: int, count: int) -> list[str | None]:
    """Give the keys of a step's micro-batches; none where `rate` is 0."""
    return [f"{seed}/{step}/{index}" if rate else None for index in range(count)]


def micro_batches(
    known: Sequence[MicroBatch],
    keys: Sequence[str | None],
    documents: Sequence[Documents | None],
) -> Sequence[MicroBatch]:
    """Give what is known of a step's micro-batches with what is new; empty where it is nothing."""
    if not any(keys) and all(each is None for each in documents):
        return known
    count = max(len(known), len(keys), len(documents))
    old = known or [MicroBatch()] * count
    keys = keys or [each.drop_key for each in old]
    documents = documents or [each.documents for each in old]
    assert len(old) == len(keys) == len(documents) == count, "one of each a micro-batch"
    return [MicroBatch(drop_key=key, documents=of) for key, of in zip(keys, documents, strict=True)]
