"""Killing the preparation of data at every point where a kill could matter, one after the other.

A process of its own: it forks for every kill, and forking a test session of a gigabyte takes ten
times as long as preparing the few rows. Prints what was found as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
POINTS_MAX = 500


def make(folder: Path) -> None:
    """Make a text, and what an undisturbed preparation makes of it, with two seeds."""
    stories = [f"Story {n}: " + f"the {n % 7} cats of {n * n} " * (n % 9 + 1) for n in range(80)]
    (folder / "text.txt").write_text("".join(f"{story}\n{END}\n" for story in stories))
    prepare(options(folder / "first", folder, seed=0, tokenizer=None))
    prepare(options(folder / "second", folder, seed=1))


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


def kill_everywhere(
    made: Path, folder: Path, *, is_there_before: bool, in_one_step: bool
) -> dict[str, Any]:
    """Kill it at its first point, its second, and so on until it comes to its end undisturbed.

    Gives how many points there were, the states that a kill left, and whether the next preparation
    always made the set whole and removed what was left.
    """
    # A kill does not lose what was written, so syncs are only places to be killed at here.
    os.fsync = lambda _: None
    if not in_one_step:
        publish._exchange_in_one_step = lambda *_: False
    old, new = files_of(made / "first"), files_of(made / "second")
    seen: set[str] = set()
    wrong = []
    for nth in range(POINTS_MAX):
        target = folder / str(nth) / "data"
        target.parent.mkdir()
        if is_there_before:
            shutil.copytree(made / "first", target)
        chosen = options(target, made, seed=1, overwrite=True)
        was_killed = killed_at(nth, lambda chosen=chosen: prepare(chosen))
        seen.add(state_of(target, old, new))
        if not was_killed:
            return {"points": nth, "seen": sorted(seen), "wrong": wrong}
        prepare(chosen)
        if files_of(target) != new or os.listdir(target.parent) != ["data"]:
            wrong.append(nth)
    raise AssertionError("the preparation never came to its end")


def state_of(target: Path, old: dict[str, bytes], new: dict[str, bytes]) -> str:
    if not target.exists():
        return "absent"
    found = files_of(target)
    return "old" if found == old else "new" if found == new else "half"


def main() -> None:
    """Take the made folder, one to work in, and two switches."""
    made, folder, is_there_before, in_one_step = sys.argv[1:]
    found = kill_everywhere(
        Path(made),
        Path(folder),
        is_there_before=is_there_before == "True",
        in_one_step=in_one_step == "True",
    )
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
