"""What the page shows of a run: its curve, its commits, its names, what is in memory.

Owns the choice and the cache. Knows nothing of HTTP. A long log takes seconds to read, so a view is
made again only when the branch has a new head, and at most once a period. Invariants: a branch is
looked up in the store before its name is used; the numbers are finite or null.
"""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

from serve.catalogue import ServedStore
from shardb.errors import NotFoundError, ShardbError
from shardb.records import Commit
from shardb.refs import no_such
from shardb.state import DEFAULT_BRANCH
from trainer.report_html_data import report_data

PERIOD_SECONDS = 2.0
COMMITS_SHOWN_MAX = 200
SERIES = ("loss", "validation_loss", "learning_rate", "grad_norm", "tokens_per_second")


class RunViews:
    """The views made so far, one a store and branch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[str, str], tuple[float, str, dict[str, Any]]] = {}

    def view(self, store: ServedStore, branch: str) -> dict[str, Any]:
        """Give a branch's view.

        Raises:
            NotFoundError: there is no such branch.
        """
        branches = store.models.store.branches()
        head = branches.get(branch)
        if head is None:
            raise NotFoundError(no_such("branch", branch, branches))
        key = (store.role, branch)
        with self._lock:
            made, commit, curves = self._made.get(key, (-math.inf, "", {}))
            is_old = time.monotonic() - made >= PERIOD_SECONDS
            if is_old and commit != head.id:
                curves = _curves(store.models.root, branch)
                self._made[key] = (time.monotonic(), head.id, curves)
        return {
            "store": store.name,
            "role": store.role,
            "branch": branch,
            **curves,
            **_names(store),
        }


def _curves(root: str, branch: str) -> dict[str, Any]:
    try:
        data = report_data(Path(root), branch)
    except ShardbError:
        # A store without training steps, such as an imported one, has commits all the same.
        return {"step": [], "series": {name: [] for name in SERIES}, "events": [], "step_count": 0}
    return {
        "step": data["step"],
        "tokens_seen": data["tokens_seen"],
        "series": {name: finite_json(data["series"][name]) for name in SERIES},
        "events": data["events"],
        "step_count": data["step_count"],
        "left_behind": data["left_behind"],
    }


def _names(store: ServedStore) -> dict[str, Any]:
    looking = store.models.store
    commits = looking.commits()
    return {
        "branches": {name: _row(commit) for name, commit in looking.branches().items()},
        "snapshots": {name: _row(commit) for name, commit in looking.snapshots().items()},
        "commits": [_row(commit) for commit in commits[-COMMITS_SHOWN_MAX:]],
        "commit_count": len(commits),
        "default_branch": DEFAULT_BRANCH,
    }


def _row(commit: Commit) -> dict[str, Any]:
    loss = commit.metrics.get("loss")
    return {
        "commit": commit.id,
        "step": commit.step,
        "branch": commit.branch,
        "time": commit.time,
        "loss": finite_json(loss),
    }


def finite_json(value: Any) -> Any:
    """Put null where a number is not finite: JSON has no word for it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [finite_json(item) for item in value]
    return value
