"""Is a run ended, and nothing wrong published, when somebody writes into its active store?"""

from __future__ import annotations

from pathlib import Path

import pytest

import shardb
from shardb.cli import run as shardb_command
from tests.support.active_runs import head
from tests.support.training import arguments, train_here
from trainer.run import Run


# With a fourth copy the active store has an older step that a repair can go back to.
@pytest.mark.parametrize("copies", [4, 3])
def test_is_a_changed_weight_neither_trained_on_nor_published(
    copies: int,
    data: Path,
    store: Path,
    active: Path,
    plain: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The weights of step 5 are changed below the live trainer; the user does as it says."""
    true_step = Run.step

    def disturbed(run: Run) -> dict[str, object]:
        line = true_step(run)
        if run.head.step == 5:
            digest = run.head.shards["params/block_000"].digest
            with open(active / "objects" / f"{digest}.safetensors", "r+b") as file:
                file.seek(-60, 2)
                file.write(b"\x00\x00\x80\x3f")
        return line

    flags = ("--max-steps", "8", "--active", str(active), "--durable-every", "2")
    flags += ("--active-copies", str(copies))
    with monkeypatch.context() as patch:
        patch.setattr(Run, "step", disturbed)
        assert train_here(arguments(store, data, *flags)) == 3
    said = capsys.readouterr().err
    assert "the bytes have digest" in said
    assert f"move that folder away: the run goes on after step 4, which is in {store}" in said
    with shardb.open(plain) as opened:
        right = {row.step: row.shards for row in opened.commits()}
    assert head(store).step == 4
    assert shardb_command(["fsck", str(active)]) == 1
    assert "shards params/block_000" in capsys.readouterr().out
    assert shardb_command(["repair", str(active), "--yes"]) == 1
    if copies == 3:
        assert "no commit of the store is whole" in capsys.readouterr().out
        active.rename(active.with_name("damaged"))
    assert train_here(arguments(store, None, "--max-steps", "8")) == 0
    assert head(store).shards == right[8]
