"""Is a pinned commit kept, checked at every reading, and let go by the last holder or by death?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shardb
from serve.pinned import ModelStore, PinnedModel
from shardb.errors import NotFoundError, ObjectCorruptError, UsageError
from tests.support.scripted_store import followers_of, write_scripted_store
from tests.support.small_stores import fill_store, flip_bit, object_of
from tests.support.training import REPOSITORY

HOLD = """
import sys
from serve.pinned import PinnedModel
pinned = PinnedModel.open(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""


def write_step(root: Path, step: int) -> None:
    write_scripted_store(
        root, followers_of([step, step + 1]), vocab_size=32, step=step, tokenizer=b"{}"
    )


def leases(root: Path) -> list[str]:
    return os.listdir(root / "leases")


def test_a_commit_stays_readable_while_a_trainer_goes_on(tmp_path: Path) -> None:
    write_step(tmp_path / "run", 1)
    with ModelStore(tmp_path / "run") as models:
        pinned = models.pin()
        before = pinned.read("params/lm_head").array("weight").copy()
        for step in range(2, 8):
            write_step(tmp_path / "run", step)
        with shardb.open(tmp_path / "run") as store:
            assert [commit.step for commit in store.commits()].count(1) == 0
        assert (pinned.read("params/lm_head").array("weight") == before).all()
        assert (pinned.commit.step, models.pin().commit.step) == (1, 7)
        assert pinned.tokenizer_bytes == b"{}"
        assert pinned.config.vocab_size == 32


def test_the_last_release_gives_the_lease_up(tmp_path: Path) -> None:
    write_step(tmp_path / "run", 1)
    pinned = PinnedModel.open(tmp_path / "run")
    assert pinned.retain() is pinned
    pinned.release()
    assert pinned.is_live
    assert len(leases(tmp_path / "run")) == 1
    pinned.release()
    assert not pinned.is_live
    assert leases(tmp_path / "run") == []
    with pytest.raises(UsageError, match="was released"):
        pinned.retain()


def test_a_killed_server_leaves_no_lease_that_counts(tmp_path: Path) -> None:
    write_step(tmp_path / "run", 1)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    with shardb.open(tmp_path / "run") as store:
        assert len(store.leases.leased_commits()) == 1
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert store.leases.leased_commits() == set()
    assert leases(tmp_path / "run") == []


@pytest.mark.parametrize("again", [False, True])
def test_a_bit_that_flips_while_it_is_served_is_found(tmp_path: Path, again: bool) -> None:
    write_step(tmp_path / "run", 1)
    with ModelStore(tmp_path / "run") as models:
        pinned = models.pin()
        pinned.read("params/lm_head", again=again)
        damaged = object_of(tmp_path / "run", 1, "params/lm_head")
        flip_bit(damaged, 5000)
        with pytest.raises(ObjectCorruptError, match=r"params/lm_head.*shardb fsck") as caught:
            pinned.read("params/lm_head", again=again)
        assert caught.value.path == str(damaged)
        assert pinned.read("params/embeddings").name == "params/embeddings"
        found = []
        for _ in range(8):
            try:
                found.append(pinned.verify_shard())
            except ObjectCorruptError:
                found.append("corrupt")
        assert "corrupt" in found
        assert "params/embeddings" in found


def test_refuses_what_is_no_training_run_and_what_is_not_there(tmp_path: Path) -> None:
    fill_store(tmp_path / "run", [1])
    with pytest.raises(UsageError, match="no shard meta/model"):
        PinnedModel.open(tmp_path / "run")
    with pytest.raises(NotFoundError):
        PinnedModel.open(tmp_path / "run", "nowhere")
    assert leases(tmp_path / "run") == []
