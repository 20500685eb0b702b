"""`python -m export.verify_cli`: the fresh process that loads a package, for `export.verify`.

Not for people: `export-hf` and its kin start it. It reads `ids.npy` and `plan.json` in the exchange
folder and writes `logits.npy` and `facts.json` there; the package is only read.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch


def main() -> None:
    """Load, compute, write; any exception is the answer that the package cannot be loaded."""
    from export.package_memory import peak_bytes
    from export.verify_loading import by_llama_cpp, by_stages, by_transformers

    folder, exchange, loader, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    place = Path(exchange)
    ids_T = torch.from_numpy(np.load(place / "ids.npy"))
    plan = json.loads((place / "plan.json").read_text())
    if loader == "transformers":
        outcome = by_transformers(Path(folder), ids_T)
    elif loader == "llama.cpp":
        outcome = by_llama_cpp(Path(folder), ids_T, plan)
    else:
        outcome = by_stages(Path(folder), ids_T, plan)
    np.save(place / "logits.npy", outcome.logits_TV.numpy())
    facts = {
        "versions": outcome.versions,
        "faults": outcome.faults,
        "disagreements": outcome.disagreements,
        "peak_memory_bytes": peak_bytes(),
    }
    (place / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
