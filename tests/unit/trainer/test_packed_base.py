"""Is a packed base unpacked where it is packed, and refused with a remedy where it cannot be?"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.errors import InputError
from trainer.model import packed


def test_only_what_is_packed_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def dequantize(data: torch.Tensor, state: Any) -> torch.Tensor:
        asked.append((data, state))
        return torch.full(tuple(state.shape), 0.5)

    library = SimpleNamespace(
        QuantState=SimpleNamespace,
        get_4bit_type=lambda *_, **__: torch.zeros(16),
        create_dynamic_map=lambda: torch.zeros(256),
        dequantize_4bit=dequantize,
    )
    monkeypatch.setattr(packed, "packed_library", lambda: library)
    norm = torch.ones(4)
    imported = {"norm.weight": norm, "mlp.weight": torch.zeros(2, 4)}
    key = "mlp.weight.nf4"
    shard = {
        key: torch.zeros(4, 1, dtype=torch.uint8),
        key + "_absmax": torch.zeros(1, dtype=torch.uint8),
        key + "_nested": torch.zeros(1),
        key + "_offset": torch.zeros(1),
        "norm.weight": norm,
    }
    found = packed.unpacked(shard, imported)
    assert list(found) == list(imported)
    assert found["norm.weight"] is norm
    assert torch.equal(found["mlp.weight"], torch.full((2, 4), 0.5))
    [(data, state)] = asked
    assert data is shard[key]
    assert (state.dtype, state.blocksize, state.state2.blocksize) == (torch.float32, 64, 256)


def test_a_packed_shard_stands_for_parameters_alone() -> None:
    shards = {"params/block_000", "nf4/block_000", "params/embeddings", "optim/block_000"}
    found = {name: packed.packed_shard(shards, name) for name in sorted(shards)}
    assert found.pop("params/block_000") == "nf4/block_000"
    assert set(found.values()) == {None}


def test_a_missing_library_is_told_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"no {name}")

    monkeypatch.setattr(packed.importlib, "import_module", missing)
    with pytest.raises(InputError, match=r"pip install.*--merge-into imported"):
        packed.packed_library()
