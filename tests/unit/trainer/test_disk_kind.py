"""Is a disk's kind told only where the kernel tells it?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer.disk_kind import MEMORY, Disk, device_kind, disk_kind

NUMBER = os.makedev(259, 3)
NAME = "259:3"


def made(
    system: Path, path: str, *, rotational: str | None = None, number: str | None = NAME
) -> Path:
    """Make a disk's folder as the kernel shows it; `number` is its own."""
    folder = system / "devices" / path
    folder.mkdir(parents=True)
    if rotational is not None:
        (folder / "queue").mkdir()
        (folder / "queue" / "rotational").write_text(rotational + "\n")
    if number is not None:
        link = system / "dev" / "block" / number
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder)
    return folder


def kind(system: Path) -> Disk:
    return device_kind(NUMBER, system=system, mounts=system / "mountinfo")


@pytest.mark.parametrize(
    ("path", "rotational", "expected"),
    [
        ("pci0/nvme/nvme0/nvme0n1", "0", "nvme"),
        ("pci0/ata1/host0/sda", "0", "ssd"),
        ("pci0/ata1/host0/sda", "1", "rotating"),
        ("pci0/ata1/host0/sda", "?", "unknown"),
        ("pci0/virtio1/vda", "1", "unknown"),
        ("virtual/block/loop0", "0", "unknown"),
    ],
)
def test_a_disk_is_told_by_its_name_and_its_queue(
    path: str, rotational: str, expected: str, tmp_path: Path
) -> None:
    made(tmp_path, path, rotational=rotational)
    assert kind(tmp_path).kind == expected


def test_a_partition_is_its_disk_and_a_stack_its_slowest(tmp_path: Path) -> None:
    part = made(tmp_path, "pci0/ata1/sda/sda2")
    (part / "partition").write_text("2\n")
    (part.parent / "queue").mkdir()
    (part.parent / "queue" / "rotational").write_text("1\n")
    assert kind(tmp_path) == Disk(kind="rotating", why="sda")
    mapped = made(tmp_path / "other", "virtual/block/dm-0")
    fast = made(tmp_path / "other", "pci0/nvme/nvme0n1", number=None)
    slaves = mapped / "slaves"
    slaves.mkdir()
    (slaves / "nvme0n1").symlink_to(fast)
    assert kind(tmp_path / "other").kind == "nvme"
    (slaves / "sda").symlink_to(part.parent)
    assert kind(tmp_path / "other").kind == "rotating"


def test_what_has_no_block_device_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(
        f"30 1 {NAME} / /mnt rw shared:1 - overlay overlay rw,lowerdir=/a\n"
    )
    found = kind(tmp_path)
    assert (found.kind, "overlay" in found.why) == ("unknown", True)
    assert kind(tmp_path / "nothing").kind == "unknown"


def test_a_ram_disk_is_memory() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("there is no /dev/shm here")
    assert disk_kind(Path("/dev/shm")).kind == MEMORY


def test_a_file_system_with_a_number_of_its_own_is_told_by_its_source(tmp_path: Path) -> None:
    blocks = [path for path in Path("/dev").iterdir() if path.is_block_device()]
    if not blocks:
        pytest.skip("there is no block device here")
    source = blocks[0]
    (tmp_path / "mountinfo").write_text(f"30 1 {NAME} / /mnt rw - btrfs {source} rw\n")
    number = os.stat(source).st_rdev
    below = f"{os.major(number)}:{os.minor(number)}"
    made(tmp_path, "pci0/nvme/nvme0n1", number=below)
    assert kind(tmp_path) == Disk(kind="nvme", why="nvme0n1")


def test_a_network_file_system_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardb.filesystem.RealFileSystem.kind", lambda *_: "network:nfs")
    found = disk_kind(tmp_path)
    assert (found.kind, found.why) == ("unknown", "nfs is a network file system")
