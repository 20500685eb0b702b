"""The control of the evidence: the same recipe with everything in the device's memory.

Owns a loop over ordinary autograd with the blocks, rows, rates and first values that `train` uses,
and nothing of stores or streaming. Prints a line of JSON a step, then the digests of all parameters
and moments, by which the two ways are compared.

    python -m tools.evidence_resident --given flags.json --steps 3000 --out resident.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench.gpu_arms import Resident
from tools.bench.gpu_product import rows_of
from tools.exactness_trace import digests_of
from trainer.found import find_run
from trainer.plan import Plan, make_plan


def plan_of(given: dict[str, Any]) -> Plan:
    """Plan the run that a control is for; nothing of it is made."""
    return make_plan(find_run(given), given, [])


def step_line(plan: Plan, trainer: Resident, step: int) -> dict[str, Any]:
    """Train one step and give what it was."""
    began = time.perf_counter()
    seen = step * plan.recipe.rows_per_step * plan.recipe.seq_len
    rate = plan.recipe.schedule.learning_rate(seen)
    made = trainer.step(rows_of(plan, step), rate)
    assert made is not None, "a gradient was not finite"
    return {
        "step": step,
        "loss": made.loss,
        "grad_norm": made.grad_norm,
        "clip_scale": made.clip_scale,
        "learning_rate": rate,
        "seconds": time.perf_counter() - began,
    }


def main(words: Sequence[str] | None = None) -> int:
    """Train; what was made so far is kept if this is stopped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--given", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(words)
    plan = plan_of(json.loads(arguments.given.read_text()))
    trainer = Resident(plan, checkpointed=False)
    with arguments.out.open("w", buffering=1) as out:
        for step in range(1, arguments.steps + 1):
            out.write(json.dumps(step_line(plan, trainer, step)) + "\n")
        digests = digests_of(trainer.arrays())
        out.write(json.dumps({"step": arguments.steps, "digests": digests}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
