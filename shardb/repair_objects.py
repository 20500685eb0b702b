"""Deciding what becomes of damaged objects, and of the commits that need them.

Owns the choice: taken from elsewhere where that has them; else the snapshots, the branches' heads
and the retained commits that need them are given up, each branch going back to the nearest commit
that is whole. Changes nothing; `shardb.repair_object_acts` does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from shardb import refs
from shardb.errors import NotFoundError, UsageError
from shardb.filesystem import FileSystem
from shardb.fsck_impact import branches_with, digests_of, needed_objects, with_deltas
from shardb.fsck_objects import ObjectFault
from shardb.listing import listed
from shardb.records import Commit, ShardEntry
from shardb.repair_plan import Plan
from shardb.repair_sources import ExchangedFiles, RepairSource, has_object
from shardb.state import DictTables


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user chose to give up; where nothing was chosen, whatever has to be.

    `rewinds` maps a branch to a REF, `drops` names snapshots. `cut` ends a damaged log at its first
    damaged record.
    """

    rewinds: Mapping[str, str] = field(default_factory=dict)
    drops: Sequence[str] = ()
    cut: bool = False

    @property
    def chosen(self) -> bool:
        """Whether only what is named here is given up."""
        return bool(self.rewinds or self.drops)


@dataclass(kw_only=True)
class ObjectPlan:
    """What is taken from where, and what is given up.

    `lost` are damaged objects that nobody has; `dropped` commits that go without having a name.
    """

    restores: dict[str, tuple[ShardEntry, RepairSource]] = field(default_factory=dict)
    lost: dict[str, ObjectFault] = field(default_factory=dict)
    rewinds: dict[str, Commit] = field(default_factory=dict)
    snapshots: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


def plan_objects(
    files: FileSystem,
    root: str,
    tables: DictTables,
    faults: Mapping[str, ObjectFault],
    plan: Plan,
    *,
    source: RepairSource | None,
    wishes: Wishes,
) -> ObjectPlan:
    """Decide, and say it in `plan`. Raises UsageError or NotFoundError for wishes that do not fit.

    `faults` are the damaged objects of the state in `tables`.
    """
    told = ObjectPlan()
    exchanged = ExchangedFiles(files, root, _exchanged(faults))
    sources = [exchanged, *([source] if source is not None else [])]
    unreadable = _plan_restores(told, tables, faults, sources)
    for entry, origin in told.restores.values():
        path = _path_of(root, entry.digest, faults)
        does = f"object {entry.digest} is taken from {origin.name}: {_whose(tables, entry.digest)}"
        plan.add("object_restore", path, does)
    _Giving(root, tables, unreadable, faults, plan, told, wishes).run()
    return told


def _exchanged(faults: Mapping[str, ObjectFault]) -> dict[str, str]:
    """Damaged files whose bytes are those of another damaged object: digest to path."""
    found = {fault.found.removeprefix("digest "): fault.path for fault in faults.values()}
    return {digest: path for digest, path in found.items() if digest in faults}


def _plan_restores(
    told: ObjectPlan,
    tables: DictTables,
    faults: Mapping[str, ObjectFault],
    sources: Sequence[RepairSource],
) -> set[str]:
    """Find what can be taken from elsewhere; return the objects that stay unreadable.

    Bases come first: with its base a difference is whole again.
    """
    needed = needed_objects(tables)

    def restore(digests: Collection[str]) -> set[str]:
        missing = set()
        for digest in (d for d in needed if d in digests):
            entry = ShardEntry(digest=digest, bytes=needed[digest].bytes, step=0)
            origin = next((s for s in sources if has_object(s, entry)), None)
            if origin is None:
                missing.add(digest)
            else:
                told.restores[digest] = (entry, origin)
        return missing

    lost = restore(faults)
    told.lost = {digest: faults[digest] for digest in lost}
    return lost | restore(with_deltas(lost, tables) - set(faults))


class _Giving:
    """What is given up because its objects cannot be read any more."""

    def __init__(
        self,
        root: str,
        tables: DictTables,
        unreadable: Collection[str],
        faults: Mapping[str, ObjectFault],
        plan: Plan,
        told: ObjectPlan,
        wishes: Wishes,
    ) -> None:
        self.root = root
        self.tables = tables
        self.plan = plan
        self.told = told
        self.wishes = wishes
        self.live = refs.live_commits(tables)
        self.damaged = {c.id for c in self.live if not digests_of(c).isdisjoint(unreadable)}
        self.intact = [commit for commit in self.live if commit.id not in self.damaged]
        self.heads = refs.branch_heads(tables)
        self.snapshots = refs.snapshot_commits(tables)
        self.paths = {d: _path_of(root, d, faults) for d in unreadable}
        self.unreadable = unreadable
        kept = {d: fault for d, fault in faults.items() if d in unreadable}
        refused = {d: fault for d, fault in kept.items() if fault.kind == "object_unreadable"}
        self.refused = with_deltas(refused, tables)
        self.whys = {fault.path: fault.found for fault in refused.values()}

    def run(self) -> None:
        self._check_wishes()
        for path, why in sorted(self.whys.items()):
            self.plan.leave(
                path,
                f"the storage does not show this object ({why}), which says nothing of its bytes: "
                "make it readable, or restore it with --from OTHER; what needs it is given up only "
                "if it is named, with --rewind or --drop",
            )
        if self.damaged and not self.intact:
            self._keep_everything()
            return
        for name, commit in self.snapshots.items():
            if commit.id in self.damaged:
                self._give_up_snapshot(name, commit)
        for name, head in self.heads.items():
            if head.id in self.damaged:
                self._give_up_head(name, head)
        self._give_up_rest()

    def _check_wishes(self) -> None:
        for name in self.wishes.drops:
            if name not in self.snapshots:
                raise NotFoundError(refs.no_such("snapshot", name, self.snapshots))
            if self.snapshots[name].id not in self.damaged:
                raise UsageError(f"snapshot {name!r} is whole; `shardb rm` removes it")
        for name in self.wishes.rewinds:
            if name not in self.heads:
                raise NotFoundError(refs.no_such("branch", name, self.heads))
            if self.heads[name].id not in self.damaged:
                raise UsageError(f"branch {name!r} is whole; `shardb rewind` moves it")

    def _keep_everything(self) -> None:
        """Giving up all there is would help nobody: a copy may turn up."""
        why = "no commit of the store is whole; with --from OTHER its objects can be restored"
        for digest, path in sorted(self.paths.items(), key=lambda item: item[1]):
            self.plan.leave(path, f"{_whose(self.tables, digest)} cannot be read, and {why}")

    def _give_up_snapshot(self, name: str, commit: Commit) -> None:
        lost = f"step {commit.step} under the name {name}: {self._lost_shards(commit)}"
        if self._stays(commit) and name not in self.wishes.drops:
            self.plan.leave(self._path(commit), f"snapshot {name} stays damaged: {lost}")
            return
        self.told.snapshots.append(name)
        self.plan.add("snapshot_drop", self._path(commit), f"snapshot {name} is dropped", lost)

    def _give_up_head(self, name: str, head: Commit) -> None:
        lost = f"step {head.step} of {name}: {self._lost_shards(head)}"
        if self._stays(head) and name not in self.wishes.rewinds:
            self.plan.leave(self._path(head), f"branch {name} stays damaged: {lost}")
            return
        target = self._target(name, head)
        self.told.rewinds[name] = target
        does = f"branch {name} moves to step {target.step} (commit {target.id})"
        if target.branch not in {name, head.branch}:
            does += f", which is a step of branch {target.branch} and not of its own"
        self.plan.add("branch_rewind", self._path(head), does, lost)

    def _target(self, name: str, head: Commit) -> Commit:
        """Where a branch goes back to: the newest whole commit that it kept, else the nearest.

        Of the others earlier ones come first: a later one is of another line.
        """
        wish = self.wishes.rewinds.get(name)
        if wish is not None:
            target = refs.resolve(self.tables, wish, branch=name)
            if target.id in self.damaged:
                steps = sorted({commit.step for commit in self.intact})
                raise UsageError(
                    f"step {target.step} is damaged too; whole are steps {listed(steps) or 'none'}"
                )
            return target
        row = self.tables.get("branches", name)
        own = [commit for commit in self.intact if commit.id in row["retained"]]
        if own:
            return max(own, key=lambda commit: commit.step)
        lines = {name, head.branch}
        return min(
            self.intact,
            key=lambda c: (c.step > head.step, c.branch not in lines, abs(c.step - head.step)),
        )

    def _give_up_rest(self) -> None:
        """Commits that no name keeps: those a branch retains, and those a rewind left behind."""
        for commit in self.live:
            if commit.id not in self.damaged or not self._is_free(commit):
                continue
            self.told.dropped.append(commit.id)
            if commit.id in {head.id for head in self.heads.values()}:
                continue  # it was told with its branch
            does = f"step {commit.step} is not kept any more (commit {commit.id})"
            lost = f"step {commit.step} of {commit.branch}: {self._lost_shards(commit)}"
            self.plan.add("commit_drop", self._path(commit), does, lost)

    def _is_free(self, commit: Commit) -> bool:
        """Whether a damaged commit is kept by branches or rewinds alone, and may be given up."""
        heads = [name for name, head in self.heads.items() if head.id == commit.id]
        stuck = [name for name in heads if name not in self.told.rewinds]
        row_of = {name: row["retained"] for name, row in self.tables.items("branches")}
        kept = any(commit.id in retained for retained in row_of.values())
        kept = kept or self.tables.get("abandoned", commit.id) is not None
        if stuck or not kept:
            return False
        return not self._stays(commit) or any(
            commit.id in row_of[name] for name in self.wishes.rewinds
        )

    def _stays(self, commit: Commit) -> bool:
        """Whether a damaged commit is given up only where it is named."""
        return self.wishes.chosen or not digests_of(commit).isdisjoint(self.refused)

    def _lost_shards(self, commit: Commit) -> str:
        names = [n for n, entry in commit.shards.items() if entry.digest in self.unreadable]
        return f"{listed(names)} cannot be read"

    def _path(self, commit: Commit) -> str:
        return next(path for d, path in self.paths.items() if d in digests_of(commit))


def _path_of(root: str, digest: str, faults: Mapping[str, ObjectFault]) -> str:
    return faults[digest].path if digest in faults else f"{root}/objects/{digest}"


def _whose(tables: DictTables, digest: str) -> str:
    """Which shards of which steps an object is, and of which branches if there are several."""
    found: dict[str, set[int]] = {}
    commits = [c for c in refs.live_commits(tables) if digest in digests_of(c)]
    for commit in commits:
        for name, entry in commit.shards.items():
            if entry.digest == digest:
                found.setdefault(name, set()).add(commit.step)
    if not found:
        return "what others are a difference to"
    branches = branches_with({commit.id for commit in commits}, tables)
    where = f" (branches {listed(branches)})" if len(branches) > 1 else ""
    return "; ".join(
        f"{name} of step{'s' if len(steps) > 1 else ''} {listed(sorted(steps))}{where}"
        for name, steps in found.items()
    )
