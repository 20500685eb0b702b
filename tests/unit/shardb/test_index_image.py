"""Does the pure reader see what liblmdb wrote, and does it survive what liblmdb would not?"""

from __future__ import annotations

import random
import struct
from pathlib import Path

import lmdb
import pytest

from shardb.index_image import DATA_VERSION, MAGIC, ImageError, read_image

PAGE_BYTES = 4096
Databases = dict[str, dict[bytes, bytes]]


def _write(path: Path, databases: Databases) -> bytes:
    environment = lmdb.open(str(path), map_size=1 << 26, max_dbs=8, sync=False)
    handles = {name: environment.open_db(name.encode()) for name in databases}
    with environment.begin(write=True) as transaction:
        for name, entries in databases.items():
            for key, value in entries.items():
                transaction.put(key, value, db=handles[name])
    environment.close()
    return (path / "data.mdb").read_bytes()


def _example(random_source: random.Random, entry_count: int, value_bytes_max: int) -> Databases:
    return {
        name: {
            b"%06d" % random_source.randrange(10**6): random_source.randbytes(
                random_source.randrange(value_bytes_max)
            )
            for _ in range(entry_count)
        }
        for name in ("branches", "commits", "objects")
    }


def _page_at(image: bytes, field: int) -> int:
    """Offset of the page that byte `field` of the newest meta page names."""
    newest = max((0, PAGE_BYTES), key=lambda meta: struct.unpack_from("=Q", image, meta + 144)[0])
    return int(struct.unpack_from("=Q", image, newest + field)[0]) * PAGE_BYTES


def _root_page(image: bytes) -> int:
    return _page_at(image, 128)


def _patched(image: bytes, offset: int, data: bytes) -> bytes:
    return image[:offset] + data + image[offset + len(data) :]


@pytest.mark.parametrize(
    ("entry_count", "value_bytes_max"),
    [(1, 10), (30, 200), (40, 9000), (3000, 60)],
    ids=["one entry", "one page each", "overflow pages", "branch pages"],
)
def test_reads_what_liblmdb_wrote(tmp_path: Path, entry_count: int, value_bytes_max: int) -> None:
    expected = _example(random.Random(1), entry_count, value_bytes_max)
    assert read_image(_write(tmp_path, expected)) == expected


def test_an_empty_environment_has_no_databases(tmp_path: Path) -> None:
    lmdb.open(str(tmp_path), map_size=1 << 20, max_dbs=2).close()
    assert read_image((tmp_path / "data.mdb").read_bytes()) == {}


def test_an_empty_database_is_named_and_plain_entries_have_no_name(tmp_path: Path) -> None:
    environment = lmdb.open(str(tmp_path), map_size=1 << 20, max_dbs=2)
    environment.open_db(b"leases")
    with environment.begin(write=True) as transaction:
        transaction.put(b"key", b"value")
    environment.close()
    image = (tmp_path / "data.mdb").read_bytes()
    assert read_image(image) == {"leases": {}, "": {b"key": b"value"}}


def test_follows_liblmdb_through_random_transactions(tmp_path: Path) -> None:
    """Deletes, drops, replaced values and aborted transactions leave free and stale pages."""
    source = random.Random(7)
    environment = lmdb.open(str(tmp_path), map_size=1 << 26, max_dbs=4, sync=False)
    handles = {name: environment.open_db(name.encode()) for name in ("commits", "objects")}
    model: Databases = {name: {} for name in handles}
    short_file_count = 0
    for round_index in range(120):
        staged = {name: dict(entries) for name, entries in model.items()}
        with environment.begin(write=True) as transaction:
            for _ in range(source.randrange(1, 120)):
                name = source.choice(list(handles))
                if staged[name] and source.random() < 0.47:
                    key = source.choice(list(staged[name]))
                    transaction.delete(key, db=handles[name])
                    del staged[name][key]
                else:
                    key = source.randbytes(source.choice([1, 8, 32, 511]))
                    staged[name][key] = source.randbytes(source.choice([0, 9, 200, 5000]))
                    transaction.put(key, staged[name][key], db=handles[name])
            if round_index % 9 == 8:
                transaction.drop(handles["objects"], delete=False)
                staged["objects"] = {}
            if round_index % 7 == 6:
                transaction.abort()
                continue
        model = staged
        image = (tmp_path / "data.mdb").read_bytes()
        assert read_image(image) == model
        pages = environment.info()["last_pgno"] + 1
        short_file_count += pages * PAGE_BYTES > len(image)
    environment.close()
    # liblmdb leaves out trailing pages that were freed before they were written.
    assert short_file_count > 0


@pytest.mark.parametrize("kept_bytes", [0, 1, 100, 4095, 4096, 8191, 8192, 12288])
def test_a_truncated_image_is_refused(tmp_path: Path, kept_bytes: int) -> None:
    image = _write(tmp_path, _example(random.Random(2), 30, 200))
    with pytest.raises(ImageError):
        read_image(image[:kept_bytes])


@pytest.mark.parametrize(
    ("offset", "data", "reason"),
    [
        (16, struct.pack("=I", MAGIC ^ 1), "magic"),
        (20, struct.pack("=I", DATA_VERSION + 1), "data version"),
        (10, struct.pack("=H", 2), "not a meta page"),
        (40, struct.pack("=I", 3), "page size"),
        (PAGE_BYTES + 40, struct.pack("=I", 512), "disagree"),
        (136, struct.pack("=Q", 2**60), "last page"),
        (92, struct.pack("=H", 4), "flags"),
        (94, struct.pack("=H", 33), "depth"),
        (94, struct.pack("=H", 2), "kind"),
        (128, struct.pack("=Q", 2**63), "referenced"),
        (128, struct.pack("=Q", 1), "referenced twice"),
        (120, struct.pack("=Q", 99), "recorded"),
    ],
)
def test_a_wrong_field_of_the_meta_page_is_refused(
    tmp_path: Path, offset: int, data: bytes, reason: str
) -> None:
    image = _write(tmp_path, _example(random.Random(3), 30, 200))
    newest = struct.unpack_from("=Q", image, 144) > struct.unpack_from("=Q", image, 4096 + 144)
    if offset >= 92 and offset < PAGE_BYTES:
        offset += 0 if newest else PAGE_BYTES
    with pytest.raises(ImageError, match=reason):
        read_image(_patched(image, offset, data))


@pytest.mark.parametrize(
    ("offset", "data", "reason"),
    [
        (0, struct.pack("=Q", 3000), "says it is page"),
        (12, struct.pack("=H", 15), "bounds"),
        (12, struct.pack("=H", 17), "bounds"),
        (14, struct.pack("=H", 5000), "bounds"),
        (16, struct.pack("=H", 4095), "a node at"),
        (16, struct.pack("=H", 2), "a node at"),
    ],
)
def test_a_wrong_field_of_a_page_header_is_refused(
    tmp_path: Path, offset: int, data: bytes, reason: str
) -> None:
    image = _write(tmp_path, _example(random.Random(4), 30, 200))
    with pytest.raises(ImageError, match=reason) as caught:
        read_image(_patched(image, _root_page(image) + offset, data))
    assert 0 <= caught.value.offset <= len(image)


def test_kinds_of_database_that_the_index_never_has_are_refused(tmp_path: Path) -> None:
    environment = lmdb.open(str(tmp_path), map_size=1 << 20, max_dbs=2)
    environment.open_db(b"many", dupsort=True)
    environment.close()
    with pytest.raises(ImageError, match="flags 0x4"):
        read_image((tmp_path / "data.mdb").read_bytes())


def test_a_page_in_use_that_is_listed_as_free_is_refused(tmp_path: Path) -> None:
    example = _example(random.Random(5), 30, 200)
    _write(tmp_path, example)
    image = _write(tmp_path, {**example, "objects": {b"later": b"1"}})
    free_leaf = _page_at(image, 80)
    node = free_leaf + struct.unpack_from("=H", image, free_leaf + 16)[0]
    forged = struct.pack("=QQ", 1, _root_page(image) // PAGE_BYTES)  # A list of one page.
    with pytest.raises(ImageError, match="in use and listed as free"):
        read_image(_patched(image, node + 16, forged))


def test_a_free_list_longer_than_its_entry_is_refused(tmp_path: Path) -> None:
    example = _example(random.Random(6), 30, 200)
    _write(tmp_path, example)
    image = _write(tmp_path, example)
    free_leaf = _page_at(image, 80)
    node = free_leaf + struct.unpack_from("=H", image, free_leaf + 16)[0]
    with pytest.raises(ImageError, match="longer than its entry"):
        read_image(_patched(image, node + 16, struct.pack("=Q", 2**61)))


def _damaged(image: bytes, source: random.Random) -> bytes:
    damaged = bytearray(image)
    page = source.randrange(len(image) // PAGE_BYTES) * PAGE_BYTES
    how = source.randrange(7)
    if how == 0:
        damaged[source.randrange(len(damaged))] ^= 1 << source.randrange(8)
    elif how == 1:
        damaged[page + source.randrange(160)] = source.randrange(256)
    elif how == 2:
        at = source.randrange(len(damaged) - 8)
        damaged[at : at + 8] = source.choice([b"\xff" * 8, bytes(8), source.randbytes(8)])
    elif how == 3:
        del damaged[source.randrange(len(damaged)) :]
    elif how == 4:
        damaged[page : page + PAGE_BYTES] = source.randbytes(PAGE_BYTES)
    elif how == 5:
        damaged[page : page + 512] = bytes(512)
    else:
        other = source.randrange(len(image) // PAGE_BYTES) * PAGE_BYTES
        damaged[page : page + PAGE_BYTES] = image[other : other + PAGE_BYTES]
    return bytes(damaged)


def test_damage_gives_a_bounded_answer_or_the_error(tmp_path: Path) -> None:
    """Never another exception, never an answer larger than the image."""
    source = random.Random(11)
    refused_count = 0
    for index, (entry_count, value_bytes_max) in enumerate([(40, 200), (20, 9000), (900, 60)]):
        path = tmp_path / str(index)
        path.mkdir()
        image = _write(path, _example(source, entry_count, value_bytes_max))
        for _ in range(250):
            refused_count += _answer_is_bounded(_damaged(image, source))
    assert refused_count > 200


def _answer_is_bounded(image: bytes) -> bool:
    """True when the image was refused."""
    try:
        answer = read_image(image)
    except ImageError:
        return True
    sizes = [len(key) + len(value) for part in answer.values() for key, value in part.items()]
    assert sum(sizes) <= len(image)
    return False


@pytest.mark.parametrize("size", [0, 10, 4096, 20_000])
def test_garbage_is_refused(size: int) -> None:
    for seed in range(20):
        with pytest.raises(ImageError):
            read_image(random.Random(seed).randbytes(size))
