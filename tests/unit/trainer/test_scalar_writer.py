"""Do a run's numbers reach TensorBoard, and is a missing writer told with its remedy?"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trainer.errors import InputError
from trainer.scalar_writer import check_folder, open_scalars, scalars, writer_class

LINE = {
    "step": 4,
    "loss": 2.5,
    "validation_loss": 2.75,
    "tokens_per_second": 100,
    "batch_digest": "d",
    "rebuilt": True,
    "timings": {"h2d_seconds": 0.5, "name": "x"},
    "grad_norm": None,
}


def test_every_number_has_a_tag_and_nothing_else_has() -> None:
    assert scalars(LINE) == {
        "train/loss": 2.5,
        "validation/validation_loss": 2.75,
        "run/tokens_per_second": 100.0,
        "timings/h2d_seconds": 0.5,
    }


class Recorder:
    """A writer that keeps what it is given."""

    made: list[Recorder]

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step = folder, purge_step
        self.points: list[tuple[str, float, int]] = []
        self.closed = False
        Recorder.made.append(self)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.points.append((tag, scalar_value, global_step))

    def close(self) -> None:
        self.closed = True


def test_the_second_writer_is_taken_where_the_first_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Recorder.made = []
    other = ModuleType("tensorboardX")
    other.SummaryWriter = Recorder  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", other)
    writer = open_scalars("events", 3)
    writer.append(LINE)
    writer.close()
    [made] = Recorder.made
    # Steps beyond the one that a run resumes at are made again.
    assert (made.folder, made.purge_step, made.closed) == ("events", 4, True)
    assert ("train/loss", 2.5, 4) in made.points
    assert len(made.points) == len(scalars(LINE))


def test_without_a_writer_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("torch.utils.tensorboard", "tensorboardX"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=r"pip install .*\.\[tensorboard\]'") as caught:
        writer_class()
    assert caught.value.exit_code == 2


def test_is_a_file_in_the_place_of_the_folder_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other: Any = ModuleType("tensorboardX")
    other.SummaryWriter = Recorder
    monkeypatch.setitem(sys.modules, "tensorboardX", other)
    check_folder(str(tmp_path))
    check_folder(str(tmp_path / "not-there-yet"))
    (tmp_path / "letters").write_text("mine")
    with pytest.raises(InputError, match=r"--tensorboard .*letters: exists and is no folder"):
        check_folder(str(tmp_path / "letters"))


def test_real_event_files_hold_the_points(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, last in ((1, 4), (3, 6)):
        writer = open_scalars(str(tmp_path), first - 1)
        for step in range(first, last + 1):
            writer.append({**LINE, "step": step, "loss": 10.0 * first + step})
        writer.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    points = {event.step: event.value for event in found.Scalars("train/loss")}
    # The second run went on after step 2 and made steps 3 and 4 again.
    assert points == {1: 11.0, 2: 12.0, 3: 33.0, 4: 34.0, 5: 35.0, 6: 36.0}
