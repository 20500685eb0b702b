"""Is object storage, in a server process of its own, as safe as a path?"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import shardb
from shardb.errors import (
    NotFoundError,
    ObjectCorruptError,
    RemoteFailedError,
    UsageError,
)
from shardb.remote import layout
from shardb.remote.pull import pull_commit
from shardb.remote.push import push_commit, push_snapshot
from shardb.remote.urls import open_bucket, open_remote
from shardb.transfer_tally import Tally
from tests.support.commands import Ask, check_refused, shardb_command
from tests.support.object_storage import BUCKET, serving
from tests.support.transfer_kill import check_clean, is_staging, killed_when
from tests.support.transfer_race import lost, race
from tests.support.transfer_stores import commit, contents, told_steps

LARGE = 20 << 20
ROUNDS = 20


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture
def url(endpoint: str, request: pytest.FixtureRequest) -> str:
    """A prefix of its own for each test."""
    return f"s3://{BUCKET}/{request.node.name}"


def test_does_a_fresh_machine_go_on_from_what_was_pushed(
    url: str, tmp_path: Path, ask: Ask
) -> None:
    with shardb.open(tmp_path / "run", create=True) as source:
        for step in range(3):
            commit(source, step)
        source.create_snapshot("best", "step-1")
        expected = contents(source)
        pushed = ask("push", source.root, url, "--json")
        assert pushed.code == 0, pushed.err
        assert pushed.json["objects"] == {"copied": 4, "present": 0, "resumed": 0}
        push_snapshot(source, open_remote(url), "best")
        next_shards = commit(source, 3).shards
    pulled = shardb_command("pull", tmp_path / "fresh", url, "--json")
    assert pulled.code == 0, pulled.err
    assert pulled.json["step"] == 2
    with shardb.open(tmp_path / "fresh") as fresh:
        assert contents(fresh) == expected
        assert told_steps(fresh) == [0, 1, 2]
        assert commit(fresh, 3).shards == next_shards
    cloned = ask("clone", url, tmp_path / "cloned")
    assert cloned.code == 0, cloned.err
    with shardb.open(tmp_path / "cloned") as clone:
        assert clone.snapshots()["best"].step == 1


def test_are_conditional_writes_conditional(url: str) -> None:
    bucket = open_bucket(url)
    assert bucket.create("refs/a", b"1")
    assert not bucket.create("refs/a", b"2")
    first = bucket.read("refs/a", limit_bytes=10)
    assert first is not None
    assert bucket.replace("refs/a", b"3", first.version)
    assert not bucket.replace("refs/a", b"4", first.version)
    assert not bucket.replace("refs/b", b"4", first.version)


def test_are_large_objects_moved_in_parts(url: str, tmp_path: Path) -> None:
    with (
        shardb.open(tmp_path / "run", create=True) as source,
        shardb.open(tmp_path / "copy", create=True) as target,
    ):
        commit(source, 0, size=LARGE, shards=("params/block_000",))
        remote = open_remote(url, create=True)
        tally = Tally()
        push_commit(source, remote, tally=tally)
        assert tally.counts.bytes_done == tally.counts.bytes_total > LARGE
        pull_commit(remote, target)
        assert contents(target) == contents(source)


def test_does_a_damaged_source_leave_no_part_behind(url: str, tmp_path: Path) -> None:
    with shardb.open(tmp_path / "run", create=True, cache_bytes=0) as source:
        head = commit(source, 0, size=LARGE, shards=("params/block_000",))
        entry = head.shards["params/block_000"]
        with Path(source.objects.path(entry.digest)).open("r+b") as file:
            file.seek(entry.bytes - 1)
            file.write(b"?")
        remote = open_remote(url, create=True)
        with pytest.raises(ObjectCorruptError, match="nothing was pushed"):
            push_commit(source, remote)
        assert remote.bucket.size(layout.object_key(entry.digest)) is None
        assert remote.branches() == {}


def test_is_no_commit_lost_when_two_push_at_the_same_moment(url: str, tmp_path: Path) -> None:
    told = race(tmp_path, url, ROUNDS)
    heads = {name: ref.commit for name, ref in open_remote(url).branches().items()}
    assert len(heads) == ROUNDS
    assert lost(told, heads) == []
    assert sum(push.moved for push in told) == ROUNDS  # one of two, each time


def test_would_the_race_show_a_lost_commit(url: str, tmp_path: Path) -> None:
    """The control arm: writes without a condition."""
    told = race(tmp_path, url, 3, conditional=False)
    heads = {name: ref.commit for name, ref in open_remote(url).branches().items()}
    assert len(lost(told, heads)) == 3


def test_does_the_loser_get_the_exit_code_of_a_conflict(url: str, tmp_path: Path, ask: Ask) -> None:
    for name, seed in (("one", 1), ("two", 2)):
        with shardb.open(tmp_path / name, create=True) as store:
            commit(store, 0, seed=seed, size=2000)
    assert ask("push", tmp_path / "one", url).code == 0
    check_refused(ask("push", tmp_path / "two", url), 5, "--branch other")
    assert ask("push", tmp_path / "two", url, "--branch", "other").code == 0


def test_does_a_killed_push_or_pull_go_on(url: str, tmp_path: Path, ask: Ask) -> None:
    with shardb.open(tmp_path / "run", create=True) as source:
        commit(source, 0, size=9 << 20)
        root, head = source.root, source.resolve("main").id
        expected = contents(source)
    remote = open_remote(url, create=True)
    chance = random.Random()
    killed_when(
        ["push", root, url],
        lambda: any(True for _ in remote.bucket.keys(layout.OBJECTS)),
        chance.uniform(0, 0.1),
    )
    assert remote.branches() in ({}, {"main": layout.Ref(commit=head, step=0)})
    assert ask("push", root, url).code == 0
    copy = tmp_path / "copy"
    killed_when(["pull", copy, url], lambda: is_staging(copy), chance.uniform(0, 0.1))
    check_clean(copy)
    assert ask("pull", copy, url).code == 0
    with shardb.open(copy) as target:
        assert contents(target) == expected


# What a user gets wrong


def test_is_each_wrong_setting_one_clear_error(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotFoundError, match="there is no bucket 'nowhere'"):
        open_remote("s3://nowhere/run", create=True)
    with pytest.raises(NotFoundError, match="there is no store here"):
        open_remote(url)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9000")
        with pytest.raises(UsageError, match="is no URL"):
            open_remote(url)
    with monkeypatch.context() as patch:
        patch.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(UsageError, match="AWS_SECRET_ACCESS_KEY"):
            open_remote(url)
    with monkeypatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        patch.setattr("shardb.remote.cloud.RETRIES", {"max_retries": 1})
        with pytest.raises(RemoteFailedError, match="run the same command again"):
            open_remote(url)


def test_is_a_profile_read_where_the_environment_has_no_keys(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "credentials"
    shared.write_text("[lab]\naws_access_key_id = k\naws_secret_access_key = s\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(shared))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert open_bucket(url).create("refs/a", b"1")
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(UsageError, match="no profile of that name"):
        open_bucket(url)


def test_do_errors_come_before_any_work(endpoint: str, tmp_path: Path, ask: Ask) -> None:
    run, new = tmp_path / "run", tmp_path / "new"
    with shardb.open(run, create=True) as store:
        commit(store, 0, size=2000)
    check_refused(ask("push", run, "s3://nowhere/x"), 4, "no bucket")
    check_refused(ask("push", run, f"s3://{BUCKET}/x", "--ref", "step-9"), 4, "step 9")
    check_refused(ask("push", run, "ftp://x/y"), 2, "unknown kind of place")
    check_refused(ask("pull", new, f"s3://{BUCKET}/nothing"), 4, "no store here")
    check_refused(ask("clone", f"s3://{BUCKET}/nothing", new), 4, "no store here")
    assert not new.exists()
    with pytest.raises(NotFoundError):
        open_remote(f"s3://{BUCKET}/x")
