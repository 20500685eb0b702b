"""Does every answer come from one commit while another process goes on committing?

The model of step s counts in strides of s, so one token of another commit's weights, or of a
prefix that another commit computed, shows at once.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import shardb
from serve.pinned import ModelStore, PinnedModel
from tests.support.served import Answer, ask, scheduler
from tests.support.training import REPOSITORY

VOCAB = 61
COMMITS = 25
SECONDS_MAX = 12

WRITER = f"""
import sys, time
from pathlib import Path
from tests.support.scripted_store import write_scripted_store
for step in range(2, {COMMITS + 1}):
    strides = {{token: (token + step) % {VOCAB} for token in range({VOCAB})}}
    write_scripted_store(Path(sys.argv[1]), strides, vocab_size={VOCAB}, step=step)
    print(step, flush=True)
"""


def strides(step: int, first: int, count: int) -> list[int]:
    return [(first + step * place) % VOCAB for place in range(1, count + 1)]


def test_no_answer_is_mixed_from_two_commits(tmp_path: Path) -> None:
    root = tmp_path / "run"
    first = WRITER.replace(f"range(2, {COMMITS + 1})", "range(1, 2)")
    subprocess.run([sys.executable, "-c", first, str(root)], cwd=REPOSITORY, check=True)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root)], cwd=REPOSITORY, stdout=subprocess.DEVNULL
    )
    asked: list[tuple[PinnedModel, int, Answer]] = []
    ends = time.monotonic() + SECONDS_MAX
    with ModelStore(root) as models, scheduler(max_resident_bytes=100_000) as to:
        while writer.poll() is None and time.monotonic() < ends:
            pinned = models.pin()
            for _ in range(4):
                start = len(asked) % VOCAB
                prompt = [start] * 20  # a page of it is the same for every commit
                asked.append((pinned, start, ask(to, pinned, prompt, 5 + len(asked) % 9)))
            pinned.release()
            asked[max(0, len(asked) - 12)][2].wait()
        for pinned, start, answer in asked:
            tokens = answer.wait().tokens
            assert answer.finished.error is None
            assert tokens == strides(pinned.commit.step, start, len(tokens))
        to.forget_prefixes()  # the worker has gone on
    assert writer.wait() == 0
    served = {pinned.commit.step for pinned, _, _ in asked}
    assert len(served) >= 3, "the writer was meant to go on meanwhile"
    assert all(not pinned.is_live for pinned, _, _ in asked)
    with shardb.open(root) as store:
        assert store.leases.leased_commits() == set()
        assert store.resolve().step == COMMITS
