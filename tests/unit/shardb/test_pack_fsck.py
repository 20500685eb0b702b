"""Does a check find what is wrong with packed objects, and does gc take what is left of them?"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import shardb
from shardb.errors import CorruptionError, ObjectCorruptError, ObjectMissingError
from shardb.filesystem import RealFileSystem
from shardb.fsck_objects import check_object
from shardb.gc import DUPLICATE, UNREFERENCED, collect_garbage
from shardb.pack import pack_snapshots
from tests.support.pack_stores import SHARDS, contents, digest_at, fill, stored
from tests.support.small_stores import copy_store, flip_bit, fsck, kinds, only


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed store whose snapshots of steps 1, 3 and 5 are packed; its head is at step 8."""
    root = tmp_path_factory.mktemp("packed") / "run"
    with shardb.open(root, create=True) as store:
        fill(store, range(9), snapshots=(1, 3, 5))
        images = root.parent / "images"
        shutil.copytree(root / "objects", images)
        pack_snapshots(store)
    return root


@pytest.fixture
def run(packed: Path, tmp_path: Path) -> Path:
    """A copy of it, for damaging."""
    return copy_store(packed, tmp_path / "run")


def pack_of(root: Path, step: int, shard: str = SHARDS[0]) -> Path:
    with shardb.open(root) as store:
        return root / "objects" / f"{digest_at(store, f'step-{step}', shard)}.pack"


def test_is_a_packed_store_clean(run: Path) -> None:
    assert fsck(run).findings == []


@pytest.mark.parametrize("where", [0, 30, 70, 90, -1])
def test_is_a_flipped_bit_found_with_whatever_needs_it(run: Path, where: int) -> None:
    path = pack_of(run, 1)
    flip_bit(path, where)
    finding = only(fsck(run))
    assert (finding.kind, finding.path) == ("object_corrupt", str(path))
    assert finding.shards == (SHARDS[0],)
    assert finding.steps == (1, 3, 5)  # those of 3 and 5 are differences to it
    assert finding.snapshots == ("step-1", "step-3", "step-5")
    assert finding.nearest_intact_step == 7
    assert finding.next_command is not None
    with shardb.open(run) as store, pytest.raises(CorruptionError):
        contents(store)


def test_is_damage_at_the_end_of_a_chain_no_harm_to_its_base(run: Path) -> None:
    flip_bit(pack_of(run, 5), 500)
    finding = only(fsck(run))
    assert (finding.steps, finding.nearest_intact_step) == ((5,), 7)
    with shardb.open(run) as store:
        with store.snapshot("step-3") as view:
            assert view.read(SHARDS[0]).digest == digest_at(store, "step-3")
        with store.snapshot("step-5") as view, pytest.raises(ObjectCorruptError):
            view.read(SHARDS[0])


def test_is_a_missing_packed_file_found(run: Path) -> None:
    path = pack_of(run, 3)
    path.unlink()
    finding = only(fsck(run))
    assert (finding.kind, finding.steps) == ("object_missing", (3, 5))
    with (
        shardb.open(run) as store,
        store.snapshot("step-5") as view,
        pytest.raises(ObjectMissingError, match=path.stem),
    ):
        view.read(SHARDS[0])


def test_is_a_file_cut_short_found(run: Path) -> None:
    path = pack_of(run, 5)
    path.write_bytes(path.read_bytes()[:-1])
    finding = only(fsck(run))
    assert (finding.kind, finding.offset) == ("object_corrupt", path.stat().st_size)


def test_is_another_good_file_under_the_name_found(run: Path) -> None:
    shutil.copy(pack_of(run, 1), pack_of(run, 5))
    assert only(fsck(run)).steps == (5,)


@pytest.fixture
def images(packed: Path, run: Path) -> Path:
    """The images that the packed objects were before."""
    shutil.copytree(packed.parent / "images", run.parent / "images")
    return run.parent / "images"


def test_is_an_image_in_the_place_of_a_packed_file_as_good(run: Path, images: Path) -> None:
    path = pack_of(run, 1)
    path.unlink()
    shutil.copy(images / f"{path.stem}.safetensors", run / "objects")
    assert fsck(run).findings == []
    with shardb.open(run) as store:
        assert len(contents(store)) == 3


@pytest.mark.usefixtures("images")
class TestLeftovers:
    """What a crash between the record and the end of a packing leaves."""

    def leave_image(self, run: Path, step: int) -> Path:
        name = f"{pack_of(run, step).stem}.safetensors"
        return Path(shutil.copy(run.parent / "images" / name, run / "objects" / name))

    def test_is_the_image_of_a_packed_object_told(self, run: Path) -> None:
        path = self.leave_image(run, 1)
        finding = only(fsck(run))
        assert (finding.kind, finding.severity) == ("object_duplicate", "info")
        assert finding.path == str(path)

    def test_is_the_packed_file_checked_although_an_image_is_there(self, run: Path) -> None:
        self.leave_image(run, 1)
        flip_bit(pack_of(run, 1), 100)
        assert kinds(fsck(run)) == ["object_corrupt", "object_duplicate"]

    def test_does_gc_remove_it(self, run: Path) -> None:
        path = self.leave_image(run, 1)
        would = collect_garbage(str(run), dry_run=True)
        assert [(i.path, i.why) for i in would.removed if i.why == DUPLICATE] == [
            (str(path), DUPLICATE)
        ]
        assert path.exists()
        collect_garbage(str(run))
        assert not path.exists()
        assert fsck(run).findings == []

    def test_does_the_next_packing_remove_it(self, run: Path) -> None:
        path = self.leave_image(run, 1)
        (run / "spare" / "staged.@pack.0123456789abcdef").write_bytes(b"half a file")
        assert kinds(fsck(run)) == ["object_duplicate", "staged_leftover"]
        with shardb.open(run) as store:
            assert store.recovery.dropped[0]["why"] == "a copy or a packing was interrupted"
            assert pack_snapshots(store).objects == []
        assert not path.exists()
        assert fsck(run).findings == []

    def test_is_an_image_kept_that_has_no_packed_file(self, run: Path) -> None:
        path = self.leave_image(run, 1)
        pack_of(run, 1).unlink()
        collect_garbage(str(run))
        with shardb.open(run) as store:
            pack_snapshots(store)
            assert len(contents(store)) == 3
        assert path.exists()

    def test_is_a_packed_file_without_a_record_a_leftover(self, run: Path) -> None:
        path = run / "objects" / f"{'0' * 32}.pack"
        path.write_bytes(b"a packing that died before its record")
        assert kinds(fsck(run)) == ["object_unreferenced"]
        collected = collect_garbage(str(run))
        assert (str(path), UNREFERENCED) in [(i.path, i.why) for i in collected.removed]
        assert fsck(run).findings == []


def test_does_gc_keep_packed_objects_and_their_bases(run: Path) -> None:
    with shardb.open(run) as store:
        before, files = contents(store), stored(run)
    shardb_gc = collect_garbage(str(run))
    assert not any("/objects/" in item.path for item in shardb_gc.removed)
    assert stored(run) == files
    with shardb.open(run) as store:
        assert contents(store) == before


def test_does_a_check_without_the_log_unpack_the_file(run: Path) -> None:
    """`snapshot --verify` looks at objects alone."""
    files, root = RealFileSystem(), str(run)
    with shardb.open(run) as store:
        entry = store.snapshots()["step-5"].shards[SHARDS[0]]
    check_object(files, root, SHARDS[0], entry)
    flip_bit(pack_of(run, 1), 2000)  # its base
    with pytest.raises(ObjectCorruptError, match="when unpacked"):
        check_object(files, root, SHARDS[0], entry)
    pack_of(run, 5).unlink()
    with pytest.raises(ObjectMissingError):
        check_object(files, root, SHARDS[0], entry)


def test_is_a_wrong_base_in_the_index_found(run: Path) -> None:
    with shardb.open(run) as store:
        first, last = (digest_at(store, f"step-{step}") for step in (1, 5))
        row = store.index.read(lambda tables: tables.get("packs", last))
        store.index.write(lambda tables: tables.put("packs", last, [first, *row[1:]]))
    assert "index_differs" in kinds(fsck(run))
