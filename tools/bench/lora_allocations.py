"""What lives at the fullest moment of each phase of a step with adapters: predicted and allocated.

Owns both lists, in the order of allocation: that of the walk, and that of a CUDA device by its
allocator's history. Set beside one another they say which tensors a prediction lacks. Models have
three blocks here, which the walk goes through one by one. Knows nothing of the grid's table.

    python -m tools.bench.lora_allocations --out lists --cases "8,000 1 x 128;8,000 1 x 2048"
    python -m tools.bench.lora_allocations --out lists --walk-only
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch

from tools.bench.lora_grid import MODELS, Case, cases
from tools.bench.lora_grid_steps import Peaks, PhasePeaks, Trained
from trainer.device import Device
from trainer.lora import walk
from trainer.lora.exact_trace import ExactTrace, exact_bytes
from trainer.lora.residency import STEPS_SEEN

CASES = "8,000 1 x 128;8,000 4 x 128;8,000 1 x 2048;8,000 16 x 512;plain base 4 x 512"
LAYERS = 3
FRAMES, REPEATED_FRAMES = 4, 400
# Sizes that mark where a phase begins in the history: no tensor of a step has them.
START, MARK = 9_999, 10_001


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One piece of memory: bytes asked for, and who asked."""

    size: int
    who: str


@dataclass(kw_only=True)
class Fullest:
    """The most that a phase held, and its pieces."""

    held: int = 0
    pieces: Sequence[Allocation] = ()


class ListedTrace(ExactTrace):  # type: ignore[no-untyped-call]
    """A walk's trace that remembers what lived at each phase's fullest moment."""

    found: dict[str, Fullest]

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, Allocation] = {}
        self.found = {}
        ListedTrace.made.append(self)

    made: ClassVar[list[ListedTrace]] = []

    def moment(self, extra_bytes: int) -> None:
        """See `MemoryTrace`."""
        super().moment(extra_bytes)
        held = self.live_bytes + extra_bytes
        known = self.found.setdefault(self._phase, Fullest())
        if held > known.held:
            inside = [Allocation(size=extra_bytes, who="inside a kernel")] if extra_bytes else []
            known.held, known.pieces = held, [*self._live.values(), *inside]

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known and self._counts:
            stack = traceback.extract_stack(limit=REPEATED_FRAMES)
            self._live[key] = Allocation(size=storage.nbytes(), who=_who(_of_stack(stack)))
        super()._meet(storage)

    def _gone(self, key: int, size: int) -> None:
        self._live.pop(key, None)
        super()._gone(key, size)


def walked(case: Case) -> dict[str, Fullest]:
    """Give what the walk holds at each phase's fullest moment."""
    walk._walked.cache_clear()
    ListedTrace.made.clear()
    with patch.object(walk, "ExactTrace", ListedTrace):
        walk.predicted_adapter_phases(case.shape, case.lora, is_host=False)
    walk._walked.cache_clear()
    # Recordings are walked through by themselves.
    [whole] = [trace for trace in ListedTrace.made if "update" in trace.found]
    return whole.found


class MarkedPeaks(PhasePeaks):
    """Marks the beginning of each phase in the allocator's history."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.names: list[str] = []

    def switch(self, phase: str) -> None:
        """See `PhasePeaks`."""
        super().switch(phase)
        size = MARK + 2 * len(self.names)
        self.names.append(phase)
        torch.empty(size, dtype=torch.uint8, device=self._device.torch_device)


def allocated(case: Case, device: Device) -> tuple[dict[str, Fullest], Peaks]:
    """Train with a history; give what lived at each phase's fullest moment, and the peaks."""
    taken = device.record_allocations()
    torch.empty(START, dtype=torch.uint8, device=device.torch_device)
    trained, peaks = Trained(device), Peaks()
    trained.open(case.kind)
    # Compiled passes are recorded once they were done as they are.
    for _ in range(STEPS_SEEN + 1 if case.shape.options.compile_blocks else 1):
        trained.step(case.shape)
    device.forget_peak()
    watched = MarkedPeaks(trained.engine, peaks)
    with watched.watching():
        trained.step(case.shape)
    events = taken()
    trained.close()
    return fullest_of(events, watched.names), peaks


def fullest_of(events: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Fullest]:
    """Go through a history; give what lived at each phase's fullest moment.

    Twice: the first time finds where the peaks are, the second lists them.
    """
    known = list(events)
    at: dict[str, tuple[int, int]] = {}
    for index, phase, held, _ in _moments(known, names):
        if held > at.get(phase, (0, 0))[0]:
            at[phase] = held, index
    wanted = {index: phase for phase, (_, index) in at.items()}
    return {
        wanted[index]: Fullest(
            held=held,
            pieces=[Allocation(size=each["size"], who=_frames(each)) for each in live],
        )
        for index, _, held, live in _moments(known, names)
        if index in wanted
    }


def _moments(
    events: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> Iterator[tuple[int, str, int, Iterable[Mapping[str, Any]]]]:
    live: dict[int, Mapping[str, Any]] = {}
    held, phase = 0, "before"
    for index, event in enumerate(events):
        size, address = event["size"], event["addr"]
        if event["action"] == "alloc":
            if size == START:  # an earlier history is not this one's
                live.clear()
                held = 0
                continue
            if MARK <= size < MARK + 2 * len(names) and size % 2:
                phase = names[(size - MARK) // 2]
                continue
            live[address] = event
            held += exact_bytes(size)
            yield index, phase, held, live.values()
        elif event["action"] == "free_requested" and address in live:
            held -= exact_bytes(live.pop(address)["size"])


def _frames(event: Mapping[str, Any]) -> str:
    frames = [(f["filename"], f["line"], f["name"]) for f in event.get("frames", ())]
    kernels = [name for _, _, name in frames if "at::native::" in name or "at::_ops::" in name]
    return f"{_who(frames)} {kernels[0][:100] if kernels else ''}"


def _of_stack(stack: Sequence[traceback.FrameSummary]) -> list[tuple[str, int, str]]:
    return [(f.filename, f.lineno or 0, f.name) for f in reversed(stack)]


def _who(frames: Iterable[tuple[str, int, str]]) -> str:
    """Give the innermost frames of this project, and the one above them."""
    found = [
        f"{Path(filename).name}:{line} {name}"
        for filename, line, name in frames
        if ("/trainer/" in filename and "vram_trace" not in filename)
        or filename.endswith("torch/nn/functional.py")
    ]
    return " < ".join(found[:FRAMES]) or "?"


def text_of(title: str, found: Mapping[str, Fullest]) -> str:
    """Write lists down: a line a piece, those alike that follow one another as one."""
    lines = [title]
    for phase, fullest in found.items():
        lines.append(f"== {phase}: {fullest.held:,} bytes in {len(fullest.pieces)} pieces")
        counted: list[tuple[Allocation, int]] = []
        for piece in fullest.pieces:
            if counted and counted[-1][0] == piece:
                counted[-1] = piece, counted[-1][1] + 1
            else:
                counted.append((piece, 1))
        lines += [f"{piece.size:>14,} {count:>3} x {piece.who}" for piece, count in counted]
    return "\n".join(lines) + "\n"


def _shallow(case: Case) -> Case:
    model = replace(case.shape.model, num_layers=LAYERS)
    return replace(case, shape=replace(case.shape, model=model))


def main(words: Sequence[str] | None = None) -> int:
    """Write two lists a case: that of the walk, and that of the device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--walk-only", action="store_true")
    parser.add_argument("--cases", default=CASES, help="names of the grid, separated by semicolons")
    parser.add_argument("--model", choices=sorted(MODELS), default="small")
    parser.add_argument("--out", type=Path, required=True, help="folder of the lists")
    given = parser.parse_args(words)
    given.out.mkdir(parents=True, exist_ok=True)
    known = {case.name: _shallow(case) for case in cases(MODELS[given.model])}
    for name in given.cases.split(";"):
        case, file = known[name], name.replace(" ", "_").replace(",", "")
        text = text_of(f"{name}, the walk", walked(case))
        (given.out / f"{file}.walk.txt").write_text(text)
        if not given.walk_only:
            found, peaks = allocated(case, Device.from_name(given.device))
            text = text_of(f"{name}, the device; {peaks}", found)
            (given.out / f"{file}.device.txt").write_text(text)
        print(f"{name}: written", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
