"""Does a window hand out the announced shards in order, read ahead as told, and count them?"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from shardb import ShardView, TensorSpec
from shardb.layout import build
from trainer.prefetch import Prefetch
from trainer.residency import ShardWindow
from trainer.timing import BUCKETS, StepClock

ORDER = ["params/a", "params/b", "params/b", "optim/b", "params/a", "optim/a"]


class Recorder:
    """A reader that notes what is read, and in which thread."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.threads: list[str] = []

    def read(self, name: str) -> ShardView:
        self.names.append(name)
        self.threads.append(threading.current_thread().name)
        layout = build({"x": TensorSpec(dtype="U8", shape=(1,))})
        return ShardView(name, layout, np.zeros(layout.size_bytes, dtype=np.uint8), "d")


def walk(
    prefetch: Prefetch, order: Sequence[str] = ORDER, reader: Recorder | None = None
) -> tuple[Recorder, ShardWindow]:
    """Take every shard of an order, an optimizer shard while its parameters are held."""
    reader = reader or Recorder()
    with ShardWindow(reader, order, prefetch=prefetch, clock=StepClock()) as window:
        position = 0
        while position < len(order):
            with window.take(order[position]) as view:
                assert view.name == order[position]
                if position + 1 < len(order) and order[position + 1].startswith("optim/"):
                    position += 1
                    with window.take(order[position]) as state:
                        assert state.name == order[position]
            position += 1
    return reader, window


def test_without_prefetch_one_of_each_is_active() -> None:
    reader, window = walk(Prefetch())
    assert reader.names == ORDER
    assert set(reader.threads) == {threading.current_thread().name}
    assert window.active_max == {"params": 1, "optim": 1}


@pytest.mark.parametrize("window_shards", [1, 2, 5, 100])
def test_a_window_is_read_ahead_in_order(window_shards: int) -> None:
    reader, window = walk(Prefetch(window=window_shards))
    assert reader.names == ORDER
    # Only the first shard has nobody to read it ahead.
    assert sum(name.startswith("read-ahead") for name in reader.threads) == len(ORDER) - 1
    assert 2 <= window.active_max["params"] <= min(1 + window_shards, 4)
    assert window.active_max["optim"] <= min(1 + window_shards, 2)


def test_a_wider_window_holds_more_at_once() -> None:
    """Control for the counts: they follow the window."""
    assert walk(Prefetch(window=1))[1].active_max["params"] == 2
    assert walk(Prefetch(window=100))[1].active_max["params"] == 4


def test_optimizer_shards_are_left_out_when_asked() -> None:
    reader, window = walk(Prefetch(window=100, optimizer_shards=False))
    assert sorted(reader.names) == sorted(ORDER)
    ahead = {
        name
        for name, thread in zip(reader.names, reader.threads, strict=True)
        if thread.startswith("read-ahead")
    }
    assert ahead == {"params/a", "params/b"}
    assert window.active_max["optim"] == 1


def test_parameters_read_ahead_are_sent_on_and_nothing_else() -> None:
    sent: list[str] = []
    walk(Prefetch(window=3, send=lambda view: sent.append(view.name)))
    assert sent == ["params/b", "params/b", "params/a"]


def test_a_shard_out_of_turn_is_our_mistake() -> None:
    window = ShardWindow(Recorder(), ORDER, prefetch=Prefetch(), clock=StepClock())
    with pytest.raises(AssertionError), window.take("params/b"):
        pass


def test_a_failed_read_ahead_is_raised_where_the_shard_is_taken() -> None:
    class Failing(Recorder):
        def read(self, name: str) -> ShardView:
            if name == "params/b":
                raise OSError("gone")
            return super().read(name)

    with pytest.raises(OSError, match="gone"):
        walk(Prefetch(window=2), reader=Failing())


def test_the_clock_waits_for_devices_at_both_ends_when_told() -> None:
    waits: list[str] = []
    clock = StepClock(lambda: waits.append("wait"))
    with clock.measure("h2d_seconds"):
        waits.append("work")
    assert waits == ["wait", "work", "wait"]
    assert set(clock.seconds) == set(BUCKETS)
