"""Weights as an export reads them: one leased commit, or the mean of several, a shard at a time.

Owns opening the commits that a command names and the check that they are of one model. Knows
nothing of package formats. Where a commit has adapters beside a frozen base, what is read is the
base with the adapters merged in: beside a packed base, the unpacked weights that they were trained
on, or those that were imported. Invariant: nothing of a shard is kept here after the caller let go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from torch import Tensor

import shardb
from export.average import mean_of
from export.source_package import SourcePackage, read_source
from shardb import Commit, ReadView, Store, TensorSpec, torch_adaptor
from trainer.errors import InputError
from trainer.model.adapter_settings import LoraSettings
from trainer.model.adapters import adapter_shard, adapters_of, with_adapters
from trainer.model.config import ModelConfig
from trainer.model.packed import packed_shard, unpacked
from trainer.model.stored import read_model

# Objects are mapped, not cached; only packed ones are unpacked into memory.
CACHE_BYTES = 1 << 26
PACKED, IMPORTED = "packed", "imported"
BASES = (PACKED, IMPORTED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """The weights of a model; `views` has one commit, or those whose mean is meant."""

    store: Store
    views: tuple[ReadView, ...]
    model: ModelConfig
    source: SourcePackage | None
    adapters: tuple[LoraSettings | None, ...]
    merges_packed: bool = True

    @property
    def merged_into(self) -> str | None:
        """Name the base that adapters are merged into; None where there are none."""
        if not any(self.adapters):
            return None
        return PACKED if _is_packed(self.adapters) and self.merges_packed else IMPORTED

    @property
    def commits(self) -> tuple[Commit, ...]:
        """Give the commits, in the order named."""
        return tuple(view.commit for view in self.views)

    @property
    def commit(self) -> Commit:
        """Give the commit that names the package: the last one of a mean."""
        return self.views[-1].commit

    @property
    def view(self) -> ReadView:
        """Give the view that everything but weights is read from."""
        return self.views[-1]

    def read(self, shard: str) -> Mapping[str, Tensor]:
        """Give the shard's tensors; the store's own memory where it is one commit."""
        each = [
            _read(view, shard, lora, self._packed_of(view, shard))
            for view, lora in zip(self.views, self.adapters, strict=True)
        ]
        if len(each) == 1:
            return each[0]
        return {name: mean_of([tensors[name] for tensors in each]) for name in each[0]}

    def specs(self, shard: str) -> Mapping[str, TensorSpec]:
        """Give the shapes and stored dtypes of a shard's tensors."""
        return self.view.read(shard).specs

    def objects(self, shard: str) -> list[str]:
        """Give the digests of the objects that a shard's values came from."""
        found = []
        for view in self.views:
            found.append(view.commit.shards[self._packed_of(view, shard) or shard].digest)
            if beside := adapter_shard(view.names(), shard):
                found.append(view.commit.shards[beside].digest)
        return found

    def _packed_of(self, view: ReadView, shard: str) -> str | None:
        """Give the packed shard that is read in a shard's place, where one is."""
        return packed_shard(view.names(), shard) if self.merges_packed else None


def _is_packed(adapters: Sequence[LoraSettings | None]) -> bool:
    """Say whether some adapters were trained over a packed base."""
    return any(lora is not None and lora.base_quant != "none" for lora in adapters)


def _read(
    view: ReadView, shard: str, lora: LoraSettings | None, packed: str | None
) -> Mapping[str, Tensor]:
    """Read a shard; adapters beside it are merged in."""
    weights: Mapping[str, Tensor] = torch_adaptor.tensors(view.read(shard))
    if packed is not None:
        weights = unpacked(torch_adaptor.tensors(view.read(packed)), weights)
    beside = adapter_shard(view.names(), shard)
    if lora is None or beside is None:
        return weights
    return with_adapters(weights, view.read(beside), lora)


@contextmanager
def open_weights(
    path: str,
    *,
    ref: str | None,
    average: Sequence[str] = (),
    allow_network: bool = False,
    merge_into: str | None = None,
) -> Iterator[Weights]:
    """Lease the commits for a block; NotFoundError or InputError where a name means nothing.

    merge_into: `packed` or `imported`, what adapters beside a packed base are merged into; None is
    `packed` where there is such a base.
    """
    if merge_into not in (None, *BASES):
        raise InputError(f"--merge-into is {merge_into!r}: choose from {', '.join(BASES)}")
    if average and ref is not None:
        raise InputError("--average names the commits itself: leave out --ref")
    if len(average) == 1:
        raise InputError("--average needs two commits or more: for one give --ref")
    with ExitStack() as stack:
        store = stack.enter_context(
            shardb.open(path, cache_bytes=CACHE_BYTES, allow_network=allow_network)
        )
        refs: Sequence[str | None] = average or [ref]
        views = tuple(stack.enter_context(store.at(ref=each)) for each in refs)
        models = [read_model(view) for view in views]
        sources = [read_source(view) for view in views]
        for name, model, source in zip(refs, models, sources, strict=True):
            if model != models[-1] or source != sources[-1]:
                raise InputError(
                    f"--average: {name} is of another model than {refs[-1]}: the mean of different"
                    " geometries is none"
                )
        adapters = tuple(adapters_of(view) for view in views)
        if merge_into is not None and not any(adapters):
            raise InputError("--merge-into: there are no adapters to merge: leave it out")
        if merge_into == PACKED and not _is_packed(adapters):
            raise InputError("--merge-into packed: the base was not packed: leave it out")
        yield Weights(
            store=store,
            views=views,
            model=models[-1],
            source=sources[-1],
            adapters=adapters,
            merges_packed=merge_into != IMPORTED,
        )
