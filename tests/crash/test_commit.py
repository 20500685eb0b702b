"""Killed or out of power at any moment: is the store at the old or the new step, nothing else?"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardb.testing.explorer import Counts, ExploreLimits, explore
from shardb.testing.workloads import WORKLOADS

# With the walks of test_verbs.py more than 2,000 in the suite.
STATES_MIN = 1_200


def _explored(name: str, scratch: str, limits: ExploreLimits, capsys: object) -> Counts:
    counts = explore(WORKLOADS[name], scratch=scratch, limits=limits)
    with capsys.disabled():  # type: ignore[attr-defined]
        print(f"\ncrash exploration of {name!r}: {counts}")
    assert not counts.violations, "\n".join(map(str, counts.violations))
    return counts


@pytest.mark.slow
def test_every_operation_of_a_run_may_be_the_last(
    scratch: str, suite_limits: ExploreLimits, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commits, a snapshot, reuse of objects and a resume: kept, dropped, torn, partly kept."""
    counts = _explored("commits", scratch, suite_limits, capsys)
    assert counts.states >= STATES_MIN
    assert counts.operations > 80
    assert 0 < counts.processes_killed < counts.recoveries_crashed
    everything = counts.states + counts.recovery_states
    assert counts.faults.total() == counts.indexes.total() == everything, "the tables come to it"
    assert counts.recovery_states > 100
    assert counts.further_commits > 100


# The other workloads take their turn in `make crash`: the suite has its minutes.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["history", "threads"])
def test_a_slice_of_every_other_workload(
    name: str, scratch: str, suite_limits: ExploreLimits, capsys: pytest.CaptureFixture[str]
) -> None:
    images = replace(
        suite_limits.images,
        exhaustive_operations=1,
        single_operations=1,
        torn_writes=1,
        random_subsets=1,
        every_index=False,
    )
    images = replace(images, point_images=3)
    sparse = replace(suite_limits, images=images, kill_every=40, recovery_every=10_000)
    counts = _explored(name, scratch, sparse, capsys)
    assert counts.states > 150
