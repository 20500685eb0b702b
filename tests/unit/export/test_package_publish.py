"""Is a target always what it was or what it will be, and is what a kill leaves cleared away?"""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from export import package_publish
from export.package_publish import Draft, Rename, check_apart, remove_dead, rename_flags
from shardb.errors import StorageFullError
from tests.support.forked import Child, Tell
from trainer.errors import InputError

OLD, NEW = {"config.json": "old", "stray.safetensors": "old"}, {"config.json": "new"}


def fill(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def publish(target: Path, *, overwrite: bool = False, **more: object) -> None:
    with Draft(target, is_directory=True, overwrite=overwrite, **more) as draft:  # type: ignore[arg-type]
        fill(draft.path, NEW)
        draft.publish()


def without_flags(source: Path, target: Path, flags: int) -> None:
    """Be a file system that knows no flags of rename."""
    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def test_is_a_package_made_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "er" / "package"
    old_mask = os.umask(0o077)
    try:
        publish(target)
    finally:
        os.umask(old_mask)
    assert content(target) == NEW
    assert stat.S_IMODE((target / "config.json").stat().st_mode) == 0o644
    assert stat.S_IMODE(target.stat().st_mode) == 0o755
    assert [path.name for path in target.parent.iterdir()] == ["package"]


@pytest.mark.parametrize("rename", [rename_flags, without_flags])
def test_is_an_old_package_replaced_as_a_whole(
    tmp_path: Path, rename: Callable[[Path, Path, int], None]
) -> None:
    target = fill(tmp_path / "package", OLD)
    with pytest.raises(InputError, match="--overwrite"):
        publish(target, rename=rename)
    assert content(target) == OLD
    publish(target, overwrite=True, rename=rename)
    assert content(target) == NEW
    assert [path.name for path in tmp_path.iterdir()] == ["package"]


def test_does_a_link_stay_a_link(tmp_path: Path) -> None:
    real = fill(tmp_path / "real", OLD)
    link = tmp_path / "link"
    link.symlink_to(real)
    publish(link, overwrite=True)
    assert link.is_symlink()
    assert content(real) == NEW


def test_does_a_failure_leave_everything_as_it_was(tmp_path: Path) -> None:
    target = fill(tmp_path / "package", OLD)

    def fill_the_disk(folder: Path) -> None:
        fill(folder, NEW)
        raise OSError(errno.ENOSPC, "full")

    for place in (target, tmp_path / "new" / "package"):
        with (
            pytest.raises(OSError, match="full"),
            Draft(place, is_directory=True, overwrite=True) as draft,
        ):
            fill_the_disk(draft.path)
    assert content(target) == OLD
    assert [path.name for path in tmp_path.iterdir()] == ["package"]


def test_is_somebodys_folder_never_replaced(tmp_path: Path) -> None:
    target = fill(tmp_path / "thesis", {"chapter.txt": "years of work"})
    with pytest.raises(InputError, match="no package"):
        publish(target, overwrite=True)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(InputError, match="a file is there"):
        publish(file, overwrite=True)
    with pytest.raises(InputError, match="a directory is there"):
        Draft(target, is_directory=False, overwrite=True)
    assert content(target) == {"chapter.txt": "years of work"}


def test_is_what_appears_meanwhile_not_overwritten(tmp_path: Path) -> None:
    target = tmp_path / "package"
    with Draft(target, is_directory=True, overwrite=False) as draft:
        fill(draft.path, NEW)
        fill(target, OLD)
        with pytest.raises(InputError, match="there already"):
            draft.publish()
    assert content(target) == OLD
    assert [path.name for path in tmp_path.iterdir()] == ["package"]


def test_is_a_dead_draft_removed_and_a_live_one_left(tmp_path: Path) -> None:
    target = tmp_path / "package"

    def build_and_die(_: Tell) -> None:
        draft = Draft(target, is_directory=True, overwrite=False)
        draft.__enter__()
        fill(draft.path, NEW)
        os.kill(os.getpid(), signal.SIGKILL)

    Child(build_and_die).finish(-signal.SIGKILL)
    [left] = tmp_path.iterdir()
    assert left.name.startswith(".package.export-")
    with Draft(target, is_directory=True, overwrite=False) as draft:
        assert list(tmp_path.iterdir()) == [draft.path]
        assert remove_dead(target) == []  # control: this one has a live maker
        fill(draft.path, NEW)
        draft.publish()
    assert [path.name for path in tmp_path.iterdir()] == ["package"]


def test_is_a_kill_between_two_renames_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = fill(tmp_path / "package", OLD)
    renamed: list[Path] = []
    real_rename = os.rename

    def die_at_second(source: Path, destination: Path) -> None:
        if renamed:
            os.kill(os.getpid(), signal.SIGKILL)
        renamed.append(source)
        real_rename(source, destination)

    def replace_and_die(_: Tell) -> None:
        monkeypatch.setattr(package_publish.os, "rename", die_at_second)
        publish(target, overwrite=True, rename=without_flags)

    Child(replace_and_die).finish(-signal.SIGKILL)
    assert not target.exists()
    with pytest.raises(InputError, match="--overwrite"):
        Draft(target, is_directory=True, overwrite=False)
    assert content(target) == OLD
    publish(target, overwrite=True)
    assert content(target) == NEW
    assert [path.name for path in tmp_path.iterdir()] == ["package"]


def test_is_a_file_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "model.gguf"
    for text in ("old", "new"):
        with Draft(target, is_directory=False, overwrite=text == "new") as draft:
            draft.path.write_text(text)
            assert not target.exists() or target.read_text() == "old"
            draft.publish()
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_is_too_little_space_said_before_anything_is_written(tmp_path: Path) -> None:
    with Draft(tmp_path / "package", is_directory=True, overwrite=False) as draft:
        draft.check_space(1)
        with pytest.raises(StorageFullError, match="are free"):
            draft.check_space(1 << 60)


@pytest.mark.parametrize("out", ["store", "store/package", "."])
def test_is_a_place_in_or_around_the_store_refused(tmp_path: Path, out: str) -> None:
    (tmp_path / "store").mkdir()
    with pytest.raises(InputError, match="overlap"):
        check_apart(tmp_path / out, tmp_path / "store")
    check_apart(tmp_path / "store-package", tmp_path / "store")


@pytest.mark.parametrize(
    ("rename", "overwrite"), [(rename_flags, False), (rename_flags, True), (without_flags, True)]
)
def test_does_an_interrupt_at_any_line_leave_the_old_or_the_new(
    tmp_path: Path, rename: Rename, overwrite: bool
) -> None:
    """Line by line, until one is beyond the last."""
    ends = []
    for line in range(1, 1000):
        parent = tmp_path / f"{line}"
        target = parent / "package"
        if overwrite:
            parent.mkdir()
            fill(target, OLD)
        is_over = interrupted_at(line, lambda at: publish_in_stack(at, overwrite, rename), target)
        left = [path.name for path in parent.iterdir()] if parent.exists() else []
        found = content(target) if target.exists() else None
        assert left == ([] if found is None else ["package"]), line
        assert found in ([OLD, NEW] if overwrite else [None, NEW]), line
        ends.append(found)
        if is_over:
            break
    assert len(ends) > 40
    assert ends.index(NEW) > 20
    assert ends[-1] == NEW


def publish_in_stack(target: Path, overwrite: bool, rename: Rename) -> None:
    with ExitStack() as stack:
        draft = Draft(target, is_directory=True, overwrite=overwrite, rename=rename)
        stack.push(draft)
        draft.begin()
        fill(draft.path, NEW)
        draft.publish()


def interrupted_at(line: int, work: Callable[[Path], None], target: Path) -> bool:
    """Raise KeyboardInterrupt at the n-th line of the module; say whether it has no such line."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != package_publish.__file__:
            return None
        count += event == "line"
        if count == line and event == "line":
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work(target)
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(before)
    return True
