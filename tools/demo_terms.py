"""What the parts of the demo agree on: its error, its plan, and the folder it may touch.

Owns `demo-run/`: it is made, continued and deleted here, and only when the marker file in it says
that the demo made it. Knows nothing of text or training.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

MARKER = "DEMO.json"
# Everything the demo puts into its folder. Nothing else is ever deleted.
MADE = (
    *(MARKER, "DEMO.partial", "text.txt", "text.partial", "data", "run", "speed", "train.log"),
    "package",
)


class DemoError(Exception):
    """The demo cannot go on; the message says what to do."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large the demo is: the three-minute one, or the one a test runs."""

    vocab_size: int
    seq_len: int
    val_fraction: float
    batch_rows: int
    model_flags: tuple[str, ...]
    training_seconds: float
    steps: int | None
    learning_rate: float
    prompt: str
    sample_tokens: int


FULL = Size(
    vocab_size=2000,
    seq_len=128,
    val_fraction=0.05,
    batch_rows=4,
    model_flags=("--preset", "demo"),
    training_seconds=170.0,
    steps=None,
    learning_rate=2e-3,
    prompt="KING HENRY.",
    sample_tokens=160,
)
QUICK = Size(
    vocab_size=300,
    seq_len=32,
    val_fraction=0.1,
    batch_rows=4,
    model_flags=(
        *("--hidden-size", "32", "--num-layers", "2", "--num-heads", "2", "--num-kv-heads", "2"),
        *("--intermediate-size", "64", "--vocab-size", "300"),
    ),
    training_seconds=0.0,
    steps=80,
    learning_rate=3e-3,
    prompt="the",
    sample_tokens=24,
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What this demo trains, kept in the marker file so that a second `make demo` goes on."""

    text: str
    quick: bool
    steps: int | None = None
    kill_step: int | None = None
    killed_step: int | None = None

    @property
    def size(self) -> Size:
        return QUICK if self.quick else FULL


@dataclass(frozen=True, kw_only=True)
class Folder:
    """The demo's folder and the paths in it."""

    root: Path

    @property
    def marker(self) -> Path:
        return self.root / MARKER

    @property
    def text(self) -> Path:
        return self.root / "text.txt"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def package(self) -> Path:
        return self.root / "package"

    def read_plan(self) -> Plan:
        """Read the marker; raises DemoError when this is not the demo's folder."""
        try:
            return Plan(**json.loads(self.marker.read_text()))
        except FileNotFoundError:
            message = f"{self.root}/ was not made by this demo (no {MARKER}): nothing is touched."
            raise DemoError(f"{message}\n  Move it away, or choose: --folder OTHER") from None
        except (ValueError, TypeError) as error:
            raise DemoError(f"{self.marker} cannot be read ({error}): make demo-clean") from None

    def write_plan(self, plan: Plan) -> Plan:
        """Keep the plan in the marker file, whole or not at all."""
        partial = self.marker.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(plan), indent=2) + "\n")
        partial.replace(self.marker)
        return plan

    def open(self, text: str, *, quick: bool) -> tuple[Plan, bool]:
        """Make the folder or go on with it; gives the plan and whether there was one."""
        if self.root.exists() and any(self.root.iterdir()):
            plan = self.read_plan()
            if (plan.text, plan.quick) != (text, quick):
                message = f"{self.root}/ holds a model of another text ({plan.text})."
                raise DemoError(f"{message}\n  Start anew: make demo-clean, and this command again")
            return plan, True
        self.root.mkdir(parents=True, exist_ok=True)
        return self.write_plan(Plan(text=text, quick=quick)), False

    def clean(self) -> Sequence[str]:
        """Delete what the demo made; gives what is left because somebody else put it there."""
        if not self.root.exists():
            return []
        if any(self.root.iterdir()):
            self.read_plan()
        for name in reversed(MADE):
            path = self.root / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        left = sorted(path.name for path in self.root.iterdir())
        if not left:
            self.root.rmdir()
        return left


def planned(plan: Plan, seconds_a_step: float) -> Plan:
    """Choose how many steps fit the time: a multiple of 40, at least 80, at most 2,000."""
    steps = plan.size.steps
    if steps is None:
        fitting = int(plan.size.training_seconds / seconds_a_step)
        steps = max(80, min(2000, fitting // 40 * 40))
    # Not on a round number, where a validation makes the step a long one.
    return replace(plan, steps=steps, kill_step=steps // 2 + 3)
