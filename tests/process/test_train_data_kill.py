"""Does a kill at any moment of preparing leave the old data set, the new one, or nothing?"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.data import packing, publish
from trainer.data.options import PrepareOptions
from trainer.data.prepare import prepare

END = "<|endoftext|>"
POINTS = (
    (os, "fsync"),
    (os, "mkdir"),
    (Path, "rename"),
    (Path, "mkdir"),
    (Path, "write_bytes"),
    (Path, "write_text"),
    (packing.RowFileWriter, "write"),
    (packing.RowFileWriter, "finish"),
    (publish, "_exchange_in_one_step"),
    (shutil, "rmtree"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a text, and what an undisturbed preparation makes of it, with two seeds."""
    folder = tmp_path_factory.mktemp("made")
    stories = [f"Story {n}: " + f"the {n % 7} cats of {n * n} " * (n % 9 + 1) for n in range(80)]
    (folder / "text.txt").write_text("".join(f"{story}\n{END}\n" for story in stories))
    prepare(options(folder / "first", folder, seed=0, tokenizer=None))
    prepare(options(folder / "second", folder, seed=1))
    assert files_of(folder / "first") != files_of(folder / "second")
    return folder


def options(out: Path, folder: Path, **more: Any) -> PrepareOptions:
    given = {"tokenizer": folder / "first" / "tokenizer.json", **more}
    return PrepareOptions(
        text=(folder / "text.txt",), out=out, seq_len=8, vocab_size=300, rows_per_file=300, **given
    )


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def killed_at(nth: int, work: Callable[[], object]) -> bool:
    """Do the work in a process that is killed at its n-th call of POINTS; tell whether it was.

    Even numbers are killed before a call, odd ones right after it.
    """
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        return os.WIFSIGNALED(status)
    try:
        calls = [0]
        for owner, name in POINTS:
            setattr(owner, name, deadly(getattr(owner, name), calls, nth))
        work()
        os._exit(0)
    finally:
        os._exit(1)


def deadly(real: Callable[..., Any], calls: list[int], nth: int) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        number = calls[0]
        calls[0] += 1
        if nth == 2 * number:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return real(*arguments, **named)
        finally:
            if nth == 2 * number + 1:
                os.kill(os.getpid(), signal.SIGKILL)

    return call


@pytest.mark.parametrize(
    ("is_there_before", "in_one_step"), [(False, True), (True, True), (True, False)]
)
def test_is_the_set_whole_or_absent_after_every_kill(
    is_there_before: bool,
    in_one_step: bool,
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A kill does not lose what was written, so syncs are only places to be killed at here.
    monkeypatch.setattr(os, "fsync", lambda _: None)
    if not in_one_step:
        monkeypatch.setattr(publish, "_exchange_in_one_step", lambda *_: False)
    old, new = files_of(made / "first"), files_of(made / "second")
    seen: set[str] = set()
    for nth in range(500):
        target = tmp_path / str(nth) / "data"
        target.parent.mkdir()
        if is_there_before:
            shutil.copytree(made / "first", target)
        chosen = options(target, made, seed=1, overwrite=True)
        was_killed = killed_at(nth, lambda chosen=chosen: prepare(chosen))
        seen.add(state_of(target, old, new))
        if not was_killed:
            break
        prepare(chosen)
        assert files_of(target) == new
        assert os.listdir(target.parent) == ["data"], "the next one removes what was left"
    else:
        pytest.fail("the preparation never came to its end")
    assert nth > 40
    allowed = {"old", "new"} if is_there_before else {"absent", "new"}
    if is_there_before and not in_one_step:
        allowed.add("absent")  # Where directories cannot be exchanged there is a moment of neither.
    assert seen == allowed


def state_of(target: Path, old: dict[str, bytes], new: dict[str, bytes]) -> str:
    if not target.exists():
        return "absent"
    found = files_of(target)
    return "old" if found == old else "new" if found == new else "half"


def test_would_a_half_made_set_be_seen(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "first", tmp_path / "data")
    (tmp_path / "data" / "manifest.json").unlink()
    old, new = files_of(made / "first"), files_of(made / "second")
    assert state_of(tmp_path / "data", old, new) == "half"
