"""Do calls go down only, and does everything go through the seams?"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.tidy.imports import (
    IMPORT_RULES,
    command_imports,
    cuda_beside_the_seam,
    files_beside_the_seam,
    misplaced_libraries,
    private_imports,
    undeclared_libraries,
    upward_imports,
)
from tests.tidy.source import Rule, findings, parse, python_sources

BAD = [
    (upward_imports, "shardb/store.py", "import trainer.engine"),
    (upward_imports, "shardb/store.py", "from trainer import engine"),
    (upward_imports, "trainer/engine.py", "from serve import server"),
    (upward_imports, "trainer/model/layers.py", "from tools import demo"),
    (upward_imports, "export/write.py", "from trainer.engine import Engine"),
    (upward_imports, "serve/server.py", "def f() -> None:\n    import trainer.run"),
    (upward_imports, "serve/server.py", "from trainer import engine"),
    (command_imports, "shardb/store.py", "from shardb import cli"),
    (command_imports, "trainer/run.py", "from trainer.data_cli import main"),
    (command_imports, "trainer/run.py", "from .data_cli import main"),
    (command_imports, "shardb/store.py", "from shardb.testing.files import SimulatedFileSystem"),
    (private_imports, "trainer/run.py", "from shardb.wal import _frame"),
    (private_imports, "trainer/run.py", "from shardb import _wal"),
    (undeclared_libraries, "shardb/store.py", "import safetensors"),
    (undeclared_libraries, "shardb/store.py", "import torch"),
    (undeclared_libraries, "trainer/run.py", "import pandas"),
    (undeclared_libraries, "tools/demo.py", "import pandas"),
    (undeclared_libraries, "trainer/run.py", "import starlette"),
    (misplaced_libraries, "shardb/store.py", "from torch import Tensor"),
    (misplaced_libraries, "shardb/store.py", "import lmdb"),
    (misplaced_libraries, "shardb/store.py", "import typer"),
    (misplaced_libraries, "trainer/engine.py", "from rich.live import Live"),
    (files_beside_the_seam, "shardb/wal.py", "def f() -> None:\n    open('x')"),
    (files_beside_the_seam, "shardb/wal.py", "import os\nos.rename('a', 'b')"),
    (files_beside_the_seam, "shardb/wal.py", "import os\nos.path.exists('a')"),
    (files_beside_the_seam, "shardb/wal.py", "from os import replace"),
    (files_beside_the_seam, "shardb/wal.py", "import shutil"),
    (files_beside_the_seam, "shardb/wal.py", "import numpy as np\nnp.memmap('a')"),
    (files_beside_the_seam, "shardb/wal.py", "from pathlib import Path\nPath('a').read_bytes()"),
    (files_beside_the_seam, "shardb/wal.py", "import mmap\nmmap.mmap(file, 1)"),
    (cuda_beside_the_seam, "trainer/engine.py", "import torch\ntorch.cuda.synchronize()"),
    (cuda_beside_the_seam, "trainer/engine.py", "from torch.cuda import Stream"),
    (cuda_beside_the_seam, "trainer/engine.py", "def f(x):\n    return x.cuda()"),
    (cuda_beside_the_seam, "serve/server.py", "def f(x):\n    return x.pin_memory()"),
]
GOOD = [
    ("shardb/store.py", "from shardb.wal import Log\nimport os\nos.path.join('a', 'b')"),
    ("shardb/torch_adaptor.py", "import torch"),
    ("tools/bench/store_peers.py", "import zarr"),
    ("shardb/buffers.py", "import mmap\nmmap.mmap(-1, 4096)"),
    ("shardb/index.py", "import lmdb"),
    ("shardb/filesystem.py", "import fcntl, os\nos.rename('a', 'b')"),
    ("shardb/cli.py", "import typer\nfrom shardb.store import open_store"),
    ("trainer/device.py", "import torch\ntorch.cuda.synchronize()"),
    ("trainer/run.py", "import shardb\nfrom trainer.engine import Engine"),
    ("serve/server.py", "from trainer.device import Device\nfrom trainer.model import stages"),
]


@pytest.mark.parametrize("rule", IMPORT_RULES)
def test_does_the_tree_keep_the_rule(rule: Rule) -> None:
    assert len(python_sources()) > 10, "the rules looked at no files"
    assert findings(rule) == []


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_is_a_bad_import_caught(rule: Rule, path: str, text: str) -> None:
    assert findings(rule, [parse(path, text)]) != []


@pytest.mark.parametrize(("path", "text"), GOOD)
def test_is_a_good_import_let_through(path: str, text: str) -> None:
    source = parse(path, text)
    assert [finding for rule in IMPORT_RULES for finding in rule(source)] == []


def test_has_every_rule_a_control_arm() -> None:
    assert {rule for rule, _, _ in BAD} == set(IMPORT_RULES)


HEAVY = ("torch", "trainer", "export", "serve", "typer", "rich", "tokenizers", "transformers")


def loaded_by(statement: str) -> tuple[set[str], float]:
    """Run a statement in a new interpreter; give the packages it loaded and its CPU seconds."""
    script = (
        "import sys, time\nbefore = time.process_time()\n"
        f"{statement}\n"
        "print(time.process_time() - before, *{name.split('.')[0] for name in sys.modules})"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    seconds, *names = answer.stdout.decode().split()
    return set(names), float(seconds)


def test_does_importing_the_store_stay_light() -> None:
    names, seconds = loaded_by("import shardb")
    assert "shardb" in names
    assert names & set(HEAVY) == set()
    assert seconds < 1.5


def test_would_a_heavy_import_be_seen() -> None:
    names, seconds = loaded_by("import shardb, typer")
    assert "typer" in names & set(HEAVY)
    assert seconds > 0.0
