"""`python -m export.verify_cli`: the fresh process that loads a package, for `export.verify`.

Not for people: `export-hf` and its kin start it. It reads ids and plan from standard input as JSON,
and writes a line of facts and the logits (fp32, little-endian) to standard output. No file is
written, so a kill leaves none.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch


def main() -> None:
    """Load, compute, answer; any exception is the answer that the package cannot be loaded."""
    from export.package_memory import peak_bytes
    from export.verify_loading import by_llama_cpp, by_stages, by_transformers

    # What a library prints must not get into the answer.
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    folder, loader, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    asked = json.load(sys.stdin)
    ids_T, plan = torch.tensor(asked["ids"]), asked["plan"]
    if loader == "transformers":
        outcome = by_transformers(Path(folder), ids_T)
    elif loader == "llama.cpp":
        outcome = by_llama_cpp(Path(folder), ids_T, plan)
    else:
        outcome = by_stages(Path(folder), ids_T, plan)
    facts = {
        "shape": list(outcome.logits_TV.shape),
        "versions": outcome.versions,
        "faults": outcome.faults,
        "disagreements": outcome.disagreements,
        "peak_memory_bytes": peak_bytes(),
    }
    with answer:
        answer.write(json.dumps(facts).encode() + b"\n")
        answer.write(outcome.logits_TV.contiguous().numpy().astype("<f4").tobytes())


if __name__ == "__main__":
    main()
