"""Which stages stay in memory, and which one is read while another computes.

Owns the shelf of resident stages with its budget, and the one thread that reads ahead. Knows
nothing of requests or arithmetic. Invariants: the stages that stay are within the budget; a stage
that is not resident is read and checked anew in every sweep, once for all that the sweep does with
it; nothing is being read from a model after `settle` returned.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from serve.row_products import RowProducts
from serve.weights import StageKey, StagePlace, Weights, bring_weights, kept_bytes, weights_bytes
from shardb.errors import ShardbError
from trainer.device import Device


@dataclass(kw_only=True, slots=True)
class _Resident:
    """Weights that stay, whose stage they are, and when they were last used."""

    place: StagePlace
    weights: Weights
    last_sweep: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Brought:
    weights: Weights
    stays: bool
    seconds: float


class StageShelf:
    """Gives the stages of a sweep, one after the other."""

    def __init__(
        self,
        device: Device,
        dtype: torch.dtype,
        products: RowProducts,
        max_resident_bytes: int | None,
    ) -> None:
        self.resident_bytes = 0
        self.bytes_read = 0
        self.read_seconds = 0.0
        self.wait_seconds = 0.0
        self._device = device
        self._dtype = dtype
        self._products = products
        self._max_bytes = max_resident_bytes
        self._resident: dict[StageKey, _Resident] = {}
        self._order: deque[StagePlace] = deque()
        self._after: list[StagePlace] = []
        self._uses: Counter[StageKey] = Counter()
        self._ahead: tuple[StagePlace, Future[_Brought]] | None = None
        self._held: dict[StageKey, Weights] = {}
        self._sweep = 0
        self._executor = ThreadPoolExecutor(1, "read-ahead")

    @property
    def resident_stages(self) -> int:
        """Count the stages that stay."""
        return len(self._resident)

    def begin_sweep(self, order: Sequence[StagePlace], after: Iterable[StagePlace] = ()) -> None:
        """Announce the stages of a sweep in order, and those that the next one begins with."""
        self._sweep += 1
        self._held.clear()
        self._order = deque(order)
        self._after = list(after)
        self._uses = Counter(place.key for place in order)
        self._read_ahead()

    def take(self, place: StagePlace) -> Weights:
        """Give a stage; those that this sweep takes no more are let go, skipped ones passed over.

        Raises:
            ShardbError: it cannot be read; other stages still can.
        """
        self._pass_to(place)
        weights = self._held.get(place.key)
        self._held = {key: each for key, each in self._held.items() if self._uses[key] > 0}
        if weights is None:
            weights = self._resident_weights(place)
        if weights is None:
            weights = self._keep(place, self._brought(place))
        self._held[place.key] = weights
        self._read_ahead()
        return weights

    def _pass_to(self, place: StagePlace) -> None:
        while self._order:
            passed = self._order.popleft()
            self._uses[passed.key] -= 1
            if passed is place:
                return

    def settle(self) -> None:
        """Wait until nothing is being read, so that a lease may be given up."""
        self._held.clear()
        if self._ahead is not None:
            _wait_quietly(self._ahead[1])
            self._ahead = None

    def close(self) -> None:
        """Let go of everything."""
        self.settle()
        self._executor.shutdown(wait=True)
        self._resident.clear()
        self.resident_bytes = 0

    def _resident_weights(self, place: StagePlace) -> Weights | None:
        found = self._resident.get(place.key)
        if found is None:
            return None
        found.last_sweep = self._sweep
        if not found.place.pinned.is_live:
            found.place = place
        return found.weights

    def _read_ahead(self) -> None:
        """Begin to read the next stage that is neither resident nor in use."""
        if self._ahead is not None:
            return
        for place in (*self._order, *self._after):
            if place.key not in self._held and place.key not in self._resident:
                stays = self._may_stay(place)
                self._ahead = (place, self._executor.submit(self._bring, place, stays))
                return

    def _brought(self, place: StagePlace) -> _Brought:
        ahead, self._ahead = self._ahead, None
        started = time.perf_counter()
        if ahead is not None and ahead[0].key != place.key:
            _wait_quietly(ahead[1])
            ahead = None
        try:
            if ahead is not None and ahead[0].pinned.is_live:
                found = ahead[1].result()
            else:
                found = self._bring(place, self._may_stay(place))
        finally:
            self.wait_seconds += time.perf_counter() - started
        self.read_seconds += found.seconds
        self.bytes_read += place.pinned.size_bytes(place.shard)
        return found

    def _bring(self, place: StagePlace, stays: bool) -> _Brought:
        started = time.perf_counter()
        weights = bring_weights(place, self._device, self._dtype, self._products, keep=stays)
        return _Brought(weights=weights, stays=stays, seconds=time.perf_counter() - started)

    def _may_stay(self, place: StagePlace) -> bool:
        """Make room for a stage; say whether there is any.

        What a newer version of the same stage takes the place of goes first, then what no sweep
        has used of late.
        """
        needed = kept_bytes(place, self._dtype)
        for key, each in list(self._resident.items()):
            if not each.place.pinned.is_live and each.place.shard == place.shard:
                self._drop(key)
        if self._max_bytes is None:
            return True
        unused = [key for key, each in self._resident.items() if each.last_sweep < self._sweep - 1]
        while self.resident_bytes + needed > self._max_bytes and unused:
            self._drop(unused.pop(0))
        return self.resident_bytes + needed <= self._max_bytes

    def _keep(self, place: StagePlace, brought: _Brought) -> Weights:
        if brought.stays:
            self._resident[place.key] = _Resident(
                place=place, weights=brought.weights, last_sweep=self._sweep
            )
            self.resident_bytes += weights_bytes(brought.weights)
        return brought.weights

    def _drop(self, key: StageKey) -> None:
        self.resident_bytes -= weights_bytes(self._resident.pop(key).weights)


def _wait_quietly(future: Future[_Brought]) -> None:
    """Wait for a reading nobody wants: its error belongs to whoever reads it again."""
    try:
        future.result()
    except ShardbError:
        return
