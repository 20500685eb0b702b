"""Whatever the policy, do the head, what a snapshot pins and what a reader holds stay?

The histories are random, the policies too; a store must agree with the rule written down anew here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardb
from shardb import branching, state
from shardb.branching import policy_of, set_policy
from shardb.errors import LogDamagedError, UsageError
from shardb.records import new_record
from shardb.retention import Policy, kept
from tests.support.log_records import applied, commit, live, record
from tests.support.small_stores import fsck
from tests.support.stores import commit_step, values_of

policies = st.builds(
    Policy,
    keep_last=st.integers(1, 5),
    keep_every=st.integers(0, 4),
    keep_best=st.integers(0, 3),
    best_metric=st.sampled_from(["loss", "validation_loss"]),
    best_mode=st.sampled_from(["min", "max"]),
)
numbers = st.floats(allow_nan=True, allow_infinity=True) | st.none()


@given(st.integers(-3, 0), st.integers(-3, -1))
def test_is_a_number_that_would_delete_everything_refused(none: int, negative: int) -> None:
    with pytest.raises(UsageError):
        Policy(keep_last=none)
    with pytest.raises(UsageError):
        Policy(keep_every=negative)
    with pytest.raises(UsageError):
        Policy(keep_best=negative)


@given(policies, st.lists(numbers, min_size=1, max_size=12))
def test_does_a_policy_keep_the_head_and_no_more_than_it_says(
    policy: Policy, losses: Sequence[float | None]
) -> None:
    rows = {
        f"c{step}": {"step": step, "metrics": {} if loss is None else {policy.best_metric: loss}}
        for step, loss in enumerate(losses)
    }
    names = list(rows)
    found = kept(policy, names, lambda name: rows[name])
    assert names[-1] in found
    assert set(names[-policy.keep_last :]) <= set(found)
    assert found == [name for name in names if name in found], "in order"
    more = [name for name in found if name not in names[-policy.keep_last :]]
    every = [n for n in more if policy.keep_every and rows[n]["step"] % policy.keep_every == 0]
    assert len(more) - len(every) <= policy.keep_best


@st.composite
def histories(draw: st.DrawFn) -> list[Any]:
    """Records that a store may have written: commits, snapshots, branches, rewinds, policies."""
    log: list[Any] = [record("init", store_id="ab")]
    heads: dict[str, tuple[str, int]] = {}
    for number in range(draw(st.integers(1, 25))):
        tables = applied(log)
        alive = sorted(live(tables))
        kind = draw(st.sampled_from(["commit"] * 4 + ["snapshot", "branch", "rewind", "policy"]))
        if kind == "commit" or not alive:
            name = draw(st.sampled_from(sorted(heads) or ["main"]))
            parent, step = heads.get(name, (None, 0))
            made = f"{number:032x}"
            log.append(commit(made, step + 1, parent, number % 200, branch=name))
            heads[name] = (made, step + 1)
            continue
        target = draw(st.sampled_from(alive))
        step = tables.get("commits", target)["step"]
        if kind == "snapshot":
            log.append(record("snapshot", name=f"s{number}", commit=target))
        elif kind == "branch":
            log.append(record("branch", name=f"b{number}", commit=target))
            heads[f"b{number}"] = (target, step)
        elif kind == "rewind":
            name = draw(st.sampled_from(sorted(heads)))
            log.append(record("rewind", branch=name, to=target, origin=heads[name][0]))
            heads[name] = (target, step)
        else:
            log.append(record("policy", policy=draw(policies).to_record()))
    return log


@settings(max_examples=150, deadline=None)
@given(histories(), policies, st.data())
def test_does_nothing_go_that_somebody_needs(
    log: list[Any], policy: Policy, data: st.DataObject
) -> None:
    tables = applied(log)
    needed = {row["head"] for _, row in tables.items("branches")}
    needed |= {row["commit"] for _, row in tables.items("snapshots")}
    leased = set(data.draw(st.lists(st.sampled_from(sorted(tables.tables["commits"])))))
    state.apply(tables, record("policy", policy=policy.to_record()))
    assert needed <= live(tables)
    retired = state.sweep(tables, leased)
    assert needed | leased <= set(tables.tables["commits"])
    still = {bytes(d).hex() for c in tables.tables["commits"].values() for d, *_ in
             c["shards"].values()}  # fmt: skip
    assert still.isdisjoint(item.digest for item in retired)
    assert still == set(tables.tables["objects"])


@settings(max_examples=12, deadline=None)
@given(st.lists(policies, min_size=1, max_size=3), st.integers(3, 8), st.integers(0, 2))
def test_does_a_store_keep_what_it_must(
    chosen: Sequence[Policy], last_step: int, pinned: int
) -> None:
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        root = Path(folder) / "run"
        with shardb.open(root, create=True) as store:
            for step in range(last_step):
                commit_step(store, step, metrics={"loss": (step * 7) % 5})
                if step == pinned:
                    store.create_snapshot("pinned")
            with store.at() as view:
                held = view.commit
                for number, policy in enumerate(chosen):
                    foreseen = branching.would_lose(store, branching.policy_record(policy))
                    before = {commit.id for commit in store.commits()}
                    set_policy(store, policy)
                    after = {commit.id for commit in store.commits()}
                    assert {commit.id for commit in foreseen.commits} == before - after
                    commit_step(store, last_step + number, metrics={"loss": number})
                assert policy_of(store) == chosen[-1]
                assert set(values_of(view).values()) == {held.step, held.step + 0.25}
                assert store.resolve().step == last_step + len(chosen) - 1
                assert store.snapshots()["pinned"].step == pinned
                for commit_id in (store.resolve().id, store.snapshots()["pinned"].id):
                    with store.at(commit=commit_id) as other:
                        values_of(other)
        assert not fsck(root).has_errors


def test_can_a_lost_head_be_seen() -> None:
    """The control: with a rule that forgets the head, these checks fail."""
    log = [record("init", store_id="ab"), commit("a" * 32, 1, None, 1)]
    tables = applied(log)
    row = tables.get("branches", "main")
    tables.put("branches", "main", {**row, "retained": []})
    with pytest.raises(LogDamagedError):
        state.apply(tables, new_record("policy", policy=Policy(keep_last=1).to_record()))
