"""Is memory counted without torch's compiler, to the same number, and is that whole later?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, torch
from tests.unit.trainer.test_walks_bounded import SHAPE
from trainer import host_walk, vram
from trainer.meta_kernels import COMPILER, without_compiler

def predicted():
    for walk in (host_walk, vram):
        walk._walked.cache_clear()
    return host_walk.predicted_host_phases(SHAPE), vram.predicted_phases(SHAPE)

found = predicted()
assert COMPILER not in sys.modules, "the compiler was loaded"
assert "_dynamo" not in vars(torch)
with without_compiler():
    torch.ones(2, device="meta") * 2
    stand_in = sys.modules[COMPILER]
    # Whoever wants more than a mark gets the compiler.
    assert stand_in.is_compiling() is False
    assert sys.modules[COMPILER] is not stand_in
assert sys.modules[COMPILER].__file__, "it is the compiler itself"
assert predicted() == found, "counted with the compiler there"

@torch.compile(backend="eager")
def doubled(x):
    return torch.add(x, x) * 2
assert doubled(torch.ones(2)).tolist() == [4, 4]
print("fine")
"""


def test_is_memory_counted_without_the_compiler(repository: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=repository,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert (answer.returncode, answer.stdout) == (0, "fine\n"), answer.stderr
