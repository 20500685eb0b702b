"""`export_manifest.json`: where every tensor of a package came from, and what every file is.

Owns the document's form. Knows nothing of how files are made. It lists every file but itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import shardb
from export.hf_plan import ExportPlan
from export.hf_weights import Written
from export.package_tensors import TORCH_NAMES
from export.package_weights import Weights
from export.verify import Check

MANIFEST_FILE = "export_manifest.json"
MANIFEST_FORMAT = 1


def write_manifest(
    plan: ExportPlan, weights: Weights, folder: Path, written: Written, check: Check
) -> None:
    """Write the manifest beside the files that it lists."""
    files = {
        path.name: {
            "bytes": path.stat().st_size,
            "sha256": written.file_digests.get(path.name) or _sha256(path),
        }
        for path in sorted(folder.iterdir())
    }
    place = {tensor.name: file.name for file in plan.files for tensor in file.tensors}
    tensors = {
        tensor.name: {
            "file": place[tensor.name],
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "xxh3_128": written.tensor_digests[tensor.name],
            "shard": tensor.shard,
            "tensor": tensor.tensor or None,
            "objects": weights.objects(tensor.shard),
        }
        for tensor in plan.tensors
    }
    write_json(
        folder / MANIFEST_FILE,
        {
            "format": MANIFEST_FORMAT,
            "tool": {"name": "shardb", "version": shardb.__version__},
            "store_id": weights.store.format.store_id,
            "commits": [
                {"id": c.id, "branch": c.branch, "step": c.step, "recipe": c.recipe}
                for c in weights.commits
            ],
            "mean_of_commits": len(weights.commits) > 1,
            "dtype": TORCH_NAMES[plan.dtype],
            "merged_into": weights.merged_into,
            "weights_rounded_to_zero": plan.rounding.to_zero,
            "check": check.to_json(),
            "files": files,
            "tensors": tensors,
        },
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a document for people and programs."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
