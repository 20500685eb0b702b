"""Train and serve at once for minutes, and hold every answer to the commit that it names.

    python -m tools.serve_soak --seconds 180

A trainer commits step after step, each of them pinned; a server follows it, streaming its stages
from the store; clients ask without a pause. Afterwards the trainer's own engine says what each
commit should have answered. Exit code 1 when one answer differs, or when the control, answers moved
to the next commit, is not noticed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from tests.support.live_serving import (
    Offline,
    Told,
    ask_while,
    following_server,
    wait_for_commit,
    word_tokenizer,
)
from tests.support.training import TrainProcess, arguments, make_data

PROMPTS = ([5, 6, 7], [40], [9, 9, 10, 12, 13], [63, 0, 1, 2], [30] * 20)

CONTROLS = 500


def main() -> None:
    """Run it and exit."""
    parser = argparse.ArgumentParser(description="Train and serve at once, then check answers.")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="serve-soak-") as folder:
        told = asked(Path(folder), options.seconds, options.clients)
        sys.exit(report(Path(folder) / "run", told))


def asked(folder: Path, seconds: float, clients: int) -> list[Told]:
    """Train and ask for so long; give every answer."""
    data, run = make_data(folder / "data"), folder / "run"
    flags = arguments(run, data, "--max-steps", "20000", "--snapshot-every", "1")
    with TrainProcess(flags) as trainer:
        trainer.wait_for_step(2)
        wait_for_commit(run, 2)
        tokenizer = word_tokenizer(64)
        with following_server(run, tokenizer=tokenizer, max_resident_bytes=0) as client:
            return ask_while(client, seconds, PROMPTS, clients=clients)


def report(run: Path, told: list[Told]) -> int:
    """Check and print; give the exit code."""
    offline = Offline(run)
    wrong = offline.differing(told)
    commits = list(dict.fromkeys(each.commit for each in told))
    following = dict(pairwise(commits))
    sample = told[:: max(1, len(told) // CONTROLS)]
    moved = [replace(each, commit=following.get(each.commit, commits[0])) for each in sample]
    noticed = len(offline.differing(moved))
    print(f"{len(told):,} answers over {len(commits):,} commits: {len(wrong)} differ from offline")
    print(f"control: of {len(moved):,} moved to the next commit {noticed:,} differ")
    return 0 if not wrong and noticed else 1


if __name__ == "__main__":
    main()
