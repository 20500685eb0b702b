"""One verb alone, a crash at any of its operations, and many disks of each: is nothing lost?

The walks of test_verbs.py take one disk of each operation; a sync that is missing in a verb may
need more of them to show.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardb.testing.images import ImageLimits
from shardb.testing.verbs import VERBS
from tests.crash.test_verbs import LIMITS, explored

CLOSELY = replace(
    LIMITS,
    images=ImageLimits(point_images=12),
    kill_every=10_000,
    recovery_every=10_000,
    audit_every=2,
    violations=1,
)


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_may_a_verb_be_cut_short_anywhere(verb: str, scratch: str) -> None:
    counts = explored([verb], scratch, CLOSELY)
    assert counts.states > 10
    assert not counts.violations, "\n".join(map(str, counts.violations))
