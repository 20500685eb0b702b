"""A remote store: commits, branches and snapshots below one URL.

Owns the rules: objects first, then the commit's record, the ref last; a branch moves only by
compare-and-swap from the version that was read; a snapshot is written once. So a reader finds a
whole commit behind every ref, and of two pushers only one can move a branch from where it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardb.errors import (
    ConflictError,
    CorruptionError,
    NotFoundError,
    SnapshotExistsError,
    UsageError,
)
from shardb.records import Commit, Record, new_id
from shardb.refs import PREFIX_LENGTH_MIN, STEP_PATTERN, no_such
from shardb.remote import layout
from shardb.remote.bucket import Bucket, Version
from shardb.remote.layout import BRANCHES, COMMITS, FORMAT_KEY, POLICY_KEY, SNAPSHOTS, Ref
from shardb.retention import Policy
from shardb.state import DEFAULT_BRANCH


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Where a branch is, and the version that may be replaced."""

    ref: Ref
    version: Version


class RemoteStore:
    """A store in a bucket; make one with `open_remote`."""

    def __init__(self, bucket: Bucket, *, create: bool) -> None:
        """Read FORMAT, which is the first request: a wrong URL or key ends here, before any work.

        `create` is for pushers: it makes the store, and tries whether conditional writes are kept.
        Raises NotFoundError when there is no store at the URL and `create` is not given.
        """
        self.bucket = bucket
        self.store_id = self._store_id(create=create)

    @property
    def url(self) -> str:
        return self.bucket.url

    def _store_id(self, *, create: bool) -> str:
        where = f"{self.url}/{FORMAT_KEY}"
        for _ in range(2):
            found = self.bucket.read(FORMAT_KEY, limit_bytes=layout.SMALL_LIMIT_BYTES)
            if found is not None:
                store_id = layout.decode_format(found.data, where)
                if create and not self.bucket.keeps_conditions(FORMAT_KEY, found.data):
                    raise UsageError(
                        f"{self.url}: this storage ignores If-None-Match or If-Match on writes, so "
                        "that two pushers could lose each other's commits; use one that keeps them"
                    )
                return store_id
            if not create:
                raise NotFoundError(
                    f"{self.url}: there is no store here; `shardb push STORE {self.url}` makes one",
                    path=self.url,
                )
            self.bucket.create(FORMAT_KEY, layout.encode_format(new_id()))
        raise CorruptionError(f"{where}: written, and not there", path=where)

    # Refs

    def branches(self) -> dict[str, Ref]:
        """Branch names and what they point to."""
        return dict(self._refs(BRANCHES))

    def snapshots(self) -> dict[str, Ref]:
        """Snapshot names and what they pin."""
        return dict(self._refs(SNAPSHOTS))

    def _refs(self, kind: str) -> Iterator[tuple[str, Ref]]:
        for key in self.bucket.keys(kind):
            head = self._head(key)
            if head is not None:
                yield layout.ref_name(kind, key), head.ref

    def head(self, branch: str) -> Head | None:
        """Where a branch is; None where there is none."""
        return self._head(layout.ref_key(BRANCHES, branch))

    def _head(self, key: str) -> Head | None:
        found = self.bucket.read(key, limit_bytes=layout.SMALL_LIMIT_BYTES)
        if found is None:
            return None
        ref = layout.decode_ref(found.data, f"{self.url}/{key}")
        return Head(ref=ref, version=found.version)

    def move_branch(self, branch: str, head: Head | None, commit: Commit) -> bool:
        """Move a branch from `head` (None: make it); False when it is not there any more."""
        key, value = layout.ref_key(BRANCHES, branch), layout.encode_ref(commit)
        if head is None:
            return self.bucket.create(key, value)
        return self.bucket.replace(key, value, head.version)

    def create_snapshot(self, name: str, commit: Commit) -> None:
        """Pin a commit that is there; SnapshotExistsError when the name pins another one."""
        key = layout.ref_key(SNAPSHOTS, name)
        if self.bucket.create(key, layout.encode_ref(commit)):
            return
        existing = self._head(key)
        if existing is None or existing.ref.commit != commit.id:
            raise SnapshotExistsError(
                f"{self.url}: snapshot {name!r} exists and pins "
                f"{f'commit {existing.ref.commit}' if existing else 'another commit'}, not "
                f"{commit.id} (step {commit.step}); leave it out, or give yours another name"
            )

    # Commits

    def commit_ids(self, prefix: str = "") -> list[str]:
        """Ids of the commits that are there."""
        keys = self.bucket.keys(COMMITS)
        ids = (key.removeprefix(COMMITS) for key in keys)
        return [commit for commit in ids if commit.startswith(prefix)]

    def record(self, commit: str) -> Record | None:
        """A commit's record; None where it is not there."""
        key = layout.commit_key(commit)
        found = self.bucket.read(key, limit_bytes=layout.COMMIT_LIMIT_BYTES)
        if found is None:
            return None
        return layout.decode_commit(found.data, commit, f"{self.url}/{key}")

    def create_commit(self, record: Record) -> None:
        """Write a commit's record; its objects are there. One that is there already stays.

        Raises ConflictError when that one has other shards: ids are unique, so it is not the same.
        """
        commit = record["id"]
        if self.bucket.create(layout.commit_key(commit), layout.encode_commit(record)):
            return
        existing = self.record(commit)
        if existing is None or existing["shards"] != record["shards"]:
            raise ConflictError(f"{self.url}: commit {commit} is there with other shards")

    def resolve(self, ref: str | None) -> Record:
        """The record of the commit that `ref` names: a branch, a snapshot, step-N, an id.

        Raises NotFoundError with near matches.
        """
        commit = self._commit_of(ref or DEFAULT_BRANCH)
        record = self.record(commit)
        if record is None:
            raise CorruptionError(
                f"{self.url}/{layout.commit_key(commit)}: missing, though {ref or DEFAULT_BRANCH} "
                "points to it",
                path=layout.commit_key(commit),
            )
        return record

    def _commit_of(self, ref: str) -> str:
        branches, snapshots = self.branches(), self.snapshots()
        found = snapshots.get(ref) or branches.get(ref)
        if found is not None:
            return found.commit
        match = STEP_PATTERN.match(ref)
        if match:
            at_step = (
                r for r in (*snapshots.values(), *branches.values()) if f"step-{r.step}" == ref
            )
            found = next(at_step, None)
            if found is not None:
                return found.commit
        elif len(ref) >= PREFIX_LENGTH_MIN and (ids := self.commit_ids(ref.lower())):
            if len(ids) == 1:
                return ids[0]
            raise UsageError(f"{ref!r} is the beginning of {len(ids)} commit ids; give more of it")
        steps = [f"step-{r.step}" for r in (*snapshots.values(), *branches.values())]
        known = [*branches, *snapshots, *steps]
        raise NotFoundError(
            f"{self.url}: {no_such('branch, snapshot, step or commit', ref, known)}"
        )

    # The policy

    def policy(self) -> Policy | None:
        """The retention policy that a clone takes over; None where none was written."""
        found = self.bucket.read(POLICY_KEY, limit_bytes=layout.SMALL_LIMIT_BYTES)
        if found is None:
            return None
        fields = layout.decode_policy(found.data, f"{self.url}/{POLICY_KEY}")
        try:
            return Policy.from_record(fields)
        except TypeError as error:
            raise CorruptionError(f"{self.url}/{POLICY_KEY}: {error}", path=POLICY_KEY) from error

    def set_policy(self, policy: Policy) -> None:
        """Write the retention policy, over any other."""
        data = layout.encode_policy(policy.to_record())
        self.bucket.upload(POLICY_KEY, len(data), iter([data]))
