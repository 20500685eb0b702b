"""Are cold snapshots stored smaller, and is everything read as if they were not?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import shardb
from shardb import branching
from shardb.errors import ConflictError, NotFoundError, ObjectCorruptError, UsageError
from shardb.pack import pack_snapshots
from shardb.pack_choice import HOT, PACKED, SMALL
from shardb.pack_report import PackProgress
from shardb.pack_turn import PACK_KEY
from shardb.pack_undo import unpack_snapshots
from shardb.references import CHAIN_MAX, chain_of, pack_rows
from tests.support.pack_stores import SHARDS, commit_step, contents, digest_at, fill, stored
from tests.support.small_stores import flip_bit, fsck
from tests.support.stores import Medium


@pytest.fixture
def cold(store: shardb.Store) -> shardb.Store:
    """A store with snapshots of steps 1, 3 and 5, whose head is at step 8."""
    fill(store, range(9), snapshots=(1, 3, 5))
    return store


def reopened(store: shardb.Store) -> shardb.Store:
    """The same store, with nothing of it in memory."""
    store.close()
    return shardb.open(store.root, files=store.files)


def test_is_every_snapshot_what_it_was(cold: shardb.Store) -> None:
    before = contents(cold)
    digests = {name: commit.shards for name, commit in cold.snapshots().items()}
    done = pack_snapshots(cold)
    assert {item.step for item in done.objects} == {1, 3, 5}
    assert contents(cold) == before
    with reopened(cold) as again:
        assert contents(again) == before
        assert {name: commit.shards for name, commit in again.snapshots().items()} == digests
        assert again.recovery.dropped == []


def test_are_packed_files_smaller_and_images_gone(cold: shardb.Store) -> None:
    root = Path(cold.root)
    whole = stored(root)["safetensors"]
    done = pack_snapshots(cold)
    assert stored(root)["pack"] == {item.digest for item in done.objects}
    assert stored(root)["safetensors"] == whole - stored(root)["pack"]
    for item in done.objects:
        assert (root / "objects" / f"{item.digest}.pack").stat().st_size == item.packed_bytes
        assert item.packed_bytes < 0.95 * item.bytes
    assert done.to_json()["freed_bytes"] == done.bytes - done.packed_bytes > 0
    assert [p.name for p in (root / "spare").iterdir() if p.name.startswith("staged.")] == []


def test_is_a_packed_store_clean(cold: shardb.Store) -> None:
    pack_snapshots(cold)
    root = Path(cold.root)
    cold.close()
    report = fsck(root)
    assert report.findings == []
    assert report.bytes_checked == sum(p.stat().st_size for p in (root / "objects").iterdir())


def test_is_only_packed_what_no_branch_reads(cold: shardb.Store) -> None:
    cold.create_snapshot("newest")
    done = pack_snapshots(cold)
    assert {item.step for item in done.objects} == {1, 3, 5}
    # Two shards of the head, and the recipe that all commits share.
    assert done.skipped == {HOT: 3}
    commit_step(cold, 9)
    branching.create_branch(cold, "other", "newest")
    assert pack_snapshots(cold, ["newest"]).objects == []


def test_are_only_the_named_snapshots_packed(cold: shardb.Store) -> None:
    done = pack_snapshots(cold, ["step-3"])
    assert {item.step for item in done.objects} == {3}
    assert pack_snapshots(cold, ["step-3"]).skipped == {PACKED: 2, HOT: 1}


def test_is_a_commit_that_no_snapshot_keeps_refused(cold: shardb.Store) -> None:
    with pytest.raises(UsageError, match="which no snapshot keeps"):
        pack_snapshots(cold, ["main"])
    with pytest.raises(NotFoundError, match="step 33 is not retained"):
        pack_snapshots(cold, ["step-33"])


def test_are_small_objects_left_alone(store: shardb.Store) -> None:
    fill(store, (0,), snapshots=(0,))
    with store.begin() as transaction:
        for number, shard in enumerate(SHARDS):
            transaction.write(shard, {"w": np.full(9, number)})
        transaction.commit(step=1)
    store.create_snapshot("small")
    fill(store, (2, 3, 4))
    assert pack_snapshots(store, ["small"]).skipped == {SMALL: 2, HOT: 1}


def test_is_the_snapshot_before_the_base_and_no_chain_too_long(store: shardb.Store) -> None:
    fill(store, range(13), snapshots=range(10))
    done = pack_snapshots(store)
    of_shard = [item for item in done.objects if item.shard == SHARDS[0]]
    bases = [item.base_step for item in of_shard]
    assert bases == [None, 0, 1, 2, None, 4, 5, 6, None, 8]
    chains = [store.index.read(lambda t, d=item.digest: chain_of(t, d)) for item in of_shard]
    assert max(len(chain) for chain in chains) == CHAIN_MAX
    with reopened(store) as again:
        assert len(contents(again)) == 10


def test_is_a_difference_smaller_than_the_object_alone(cold: shardb.Store) -> None:
    first, *rest = [i for i in pack_snapshots(cold).objects if i.shard == SHARDS[0]]
    assert first.base is None
    assert all(item.packed_bytes < 0.9 * first.packed_bytes for item in rest)


def test_does_a_base_stay_until_nothing_needs_it(cold: shardb.Store) -> None:
    root, before = Path(cold.root), contents(cold)
    pack_snapshots(cold)
    base = digest_at(cold, "step-1")
    branching.delete_snapshot(cold, "step-1")
    assert base in stored(root)["pack"]
    with reopened(cold) as again:
        assert contents(again) == {name: before[name] for name in ("step-3", "step-5")}
        branching.delete_snapshot(again, "step-3")
        assert base in stored(root)["pack"]
        branching.delete_snapshot(again, "step-5")
        assert stored(root)["pack"] == set()
    assert fsck(root).findings == []


def test_is_a_packed_store_packed_further(cold: shardb.Store) -> None:
    pack_snapshots(cold)
    cold.create_snapshot("step-8")
    fill(cold, (9, 10, 11))
    done = pack_snapshots(cold)
    assert [(item.step, item.base_step) for item in done.objects] == [(8, 5), (8, 5)]
    with reopened(cold) as again:
        assert len(contents(again)) == 4


def test_is_everything_whole_again_after_unpacking(cold: shardb.Store) -> None:
    root, before, whole = Path(cold.root), contents(cold), stored(Path(cold.root))
    done = pack_snapshots(cold)
    one = unpack_snapshots(cold, ["step-3"])
    assert one.objects == 2
    assert contents(cold) == before
    rest = unpack_snapshots(cold)
    assert one.bytes + rest.bytes == done.bytes
    assert stored(root) == whole
    assert unpack_snapshots(cold).objects == 0
    with reopened(cold) as again:
        assert contents(again) == before
    assert fsck(root).findings == []


def test_does_training_go_on_from_a_packed_snapshot(cold: shardb.Store) -> None:
    pack_snapshots(cold)
    before = contents(cold)["step-3"]
    with reopened(cold) as again:
        branching.create_branch(again, "second", "step-3")
        with again.begin("second") as transaction:
            for shard in SHARDS:
                view = transaction.read(shard)
                assert view.image.tobytes() == before[shard]
                transaction.write(shard, {n: array * 2 for n, array in view.arrays().items()})
            transaction.commit(step=4)
        assert contents(again)["step-3"] == before
    assert fsck(Path(cold.root)).findings == []


def test_do_views_stay_as_they_are_while_their_objects_are_packed(cold: shardb.Store) -> None:
    with reopened(cold) as again, again.snapshot("step-3") as view:
        shard = view.read(SHARDS[0])
        before = shard.image.tobytes()
        pack_snapshots(again)
        fill(again, range(9, 15))
        assert shard.image.tobytes() == before == view.read(SHARDS[0]).image.tobytes()


def test_is_a_second_packing_at_the_same_time_refused(cold: shardb.Store) -> None:
    with (
        shardb.open(cold.root, files=cold.files) as other,
        other.receiving(PACK_KEY),
        pytest.raises(ConflictError, match="another process packs this store"),
    ):
        pack_snapshots(cold)


def test_is_a_damaged_object_left_as_it_is(root: Path, medium: Medium) -> None:
    with shardb.open(root, create=True, files=medium) as store:
        fill(store, range(6), snapshots=(1,))
        digest = digest_at(store, "step-1")
    flip_bit(root / "objects" / f"{digest}.safetensors", 6000)
    with shardb.open(root, files=medium) as store:
        with pytest.raises(ObjectCorruptError, match=digest):
            pack_snapshots(store)
        assert digest in stored(root)["safetensors"]


def test_is_a_snapshot_that_goes_meanwhile_passed_over(cold: shardb.Store) -> None:
    def remove(progress: PackProgress) -> None:
        if progress.objects == 1:
            branching.delete_snapshot(cold, "step-5")

    done = pack_snapshots(cold, on_progress=remove)
    assert {item.step for item in done.objects} == {1, 3}
    assert done.skipped["retired meanwhile"] == 2


def test_is_progress_told_to_the_end(cold: shardb.Store) -> None:
    told: list[PackProgress] = []
    done = pack_snapshots(cold, on_progress=told.append)
    assert [item.objects for item in told] == list(range(1, 1 + len(done.objects)))
    assert told[-1].bytes == told[-1].bytes_total == done.bytes


def test_is_nothing_packed_in_an_empty_store(store: shardb.Store) -> None:
    assert pack_snapshots(store).objects == []
    assert unpack_snapshots(store).objects == 0


def test_is_what_is_packed_known_without_the_index(root: Path) -> None:
    with shardb.open(root, create=True) as store:
        store.appender._segment_limit_bytes = 1  # every record begins a new segment
        fill(store, range(6), snapshots=(1, 2, 3))
        before = contents(store)
        pack_snapshots(store)
        branching.delete_snapshot(store, "step-2")
    (root / "index" / "data.mdb").unlink()
    with shardb.open(root) as store:
        del before["step-2"]
        assert contents(store) == before
        fill(store, (6, 7))
        assert contents(store) == before
    assert fsck(root).findings == []


def test_is_what_was_retired_not_unpacked_after_the_index_was_lost(root: Path) -> None:
    """An index made anew from the log still tells of packed objects that are gone."""
    with shardb.open(root, create=True) as store:
        fill(store, range(5), snapshots=(1, 2))
        pack_snapshots(store)
        branching.delete_snapshot(store, "step-1")
        branching.delete_snapshot(store, "step-2")
    (root / "index" / "data.mdb").unlink()
    with shardb.open(root) as store:
        assert store.index.read(pack_rows) != {}
        assert unpack_snapshots(store).objects == 0
        assert pack_snapshots(store).objects == []
    assert fsck(root).findings == []
