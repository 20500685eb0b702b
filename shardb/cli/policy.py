"""The verb `policy`: which commits a branch keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

import shardb
from shardb import refs
from shardb.branching import Loss, policy_of, policy_record, set_policy, would_lose
from shardb.cli.places import JsonOption, NetworkOption, StoreArgument, store_path
from shardb.cli.printing import in_bytes, print_json, steps_text, warn
from shardb.errors import UsageError
from shardb.looking import Looking
from shardb.read_only import open_to_look
from shardb.retention import Policy

OFF = "off"
# What a retained commit can be told by; see `Policy`.
COUNTS = ("keep_last", "keep_every", "keep_best")


def policy(
    store: StoreArgument = None,
    keep_last: Annotated[
        str | None, typer.Option("--keep-last", metavar="K", help="The newest K commits.")
    ] = None,
    keep_every: Annotated[
        str | None,
        typer.Option("--keep-every", metavar="N", help="Steps that N divides; `off` for none."),
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option("--keep-best", metavar="N", help="The best N by a metric; `off` for none."),
    ] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", metavar="NAME", help="The metric of --keep-best.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option("--mode", metavar="min|max", help="Which values are the best.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")
    ] = False,
    json: JsonOption = False,
    allow_network: NetworkOption = False,
) -> None:
    """Say or set which commits every branch keeps. What is not said stays as it was.

    A commit stays while any rule keeps it. The newest commit of a branch, what a snapshot pins and
    what a reader holds stay whatever the policy. It is stored in the store, holds for every process
    and takes effect at once: what it no longer keeps cannot be had back, so look with --dry-run.

    \b
    Examples:
      shardb policy run                                  what it is
      shardb policy run --keep-last 5 --dry-run
      shardb policy run --keep-last 2 --keep-every 1000
      shardb policy run --keep-best 3 --metric validation_loss --mode min
      shardb policy run --keep-every off

    0 and negative numbers are refused. It may run beside a live `train`. An interrupt leaves the
    old policy or the new one.
    """
    counts = dict(zip(COUNTS, (keep_last, keep_every, keep_best), strict=True))
    given: dict[str, Any] = {n: _count(n, text) for n, text in counts.items() if text is not None}
    given |= {"best_metric": metric} if metric is not None else {}
    given |= {"best_mode": mode} if mode is not None else {}
    root = store_path(store)
    if not given or dry_run:
        with open_to_look(root, allow_network=allow_network) as looked:
            before = policy_of(looked)
            after = _changed(before, given)
            loss = would_lose(looked, policy_record(after))
            _warn_of_metric(looked, after, given)
    else:
        with shardb.open(root, allow_network=allow_network) as opened:
            before = policy_of(opened)
            after = _changed(before, given)
            loss = would_lose(opened, policy_record(after))
            _warn_of_metric(opened, after, given)
            if after != before:
                set_policy(opened, after)
    _print(before, after, loss, dry_run=dry_run, json=json)


def _count(name: str, text: str) -> int:
    """The number of an option; UsageError for 0, which nobody should mean by accident."""
    option = f"--{name.replace('_', '-')}"
    if text == OFF and name != "keep_last":
        return 0
    if not text.isdecimal() or int(text) < 1:
        off = "" if name == "keep_last" else f", or `{OFF}`"
        raise UsageError(f"{option} {text}: give a whole number from 1 on{off}")
    return int(text)


def _changed(before: Policy, given: dict[str, Any]) -> Policy:
    after = replace(before, **given)
    if not after.keep_best and ("best_metric" in given or "best_mode" in given):
        raise UsageError("--metric and --mode belong to --keep-best N, which is off")
    return after


def _warn_of_metric(store: Looking, after: Policy, given: dict[str, Any]) -> None:
    """A misspelt metric would keep nothing, in silence."""
    known = {name for commit in store.commits() for name in commit.metrics}
    if after.keep_best and given and known and after.best_metric not in known:
        warn(f"{refs.no_such('metric', after.best_metric, sorted(known))}; until a commit has it, "
             "--keep-best keeps none")  # fmt: skip


def _print(before: Policy, after: Policy, loss: Loss, *, dry_run: bool, json: bool) -> None:
    if json:
        dropped = [{"step": c.step, "commit": c.id, "branch": c.branch} for c in loss.commits]
        print_json(
            {
                "policy": after.to_record(),
                "before": before.to_record(),
                "dry_run": dry_run,
                "dropped": dropped,
                "freed_bytes": loss.freed_bytes,
            }
        )
        return
    print(f"keeps {_text(after)}")
    if after == before and not loss.commits:
        return
    if loss.commits:
        verb = "would go" if dry_run else "gone"
        print(f"{verb}: {steps_text(loss.steps)}; {in_bytes(loss.freed_bytes)} for reuse")
    else:
        print("no step goes" if dry_run else "no step went")


def _text(policy: Policy) -> str:
    rules = [f"the last {policy.keep_last} of every branch"]
    if policy.keep_every:
        rules.append(f"every step that {policy.keep_every} divides")
    if policy.keep_best:
        which = "lowest" if policy.best_mode == "min" else "highest"
        rules.append(f"the {policy.keep_best} of the {which} {policy.best_metric}")
    return f"{', '.join(rules)}, and all snapshots"
