"""What are adapters over a base in NF4 merged into, and how far is that from what was trained?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from export.doctor_run import Against, examine
from export.hf_export import ExportRequest, export_package
from export.package_weights import open_weights
from tests.integration.test_lora_run import IDS, flags, store_logits
from tests.support.adapters import imported_store
from tests.support.packages import resident
from tests.support.training import make_data, train_here
from trainer.errors import InputError
from trainer.model import packed

# Sums in another order, in fp32: what merging itself may change.
ROUNDING_MAX = 2e-5
HERE = "this needs the extra `nf4`"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a store with two steps of adapters over a packed base."""
    pytest.importorskip("bitsandbytes", reason=HERE)
    root = tmp_path_factory.mktemp("nf4")
    _, store = imported_store(root, "llama")
    more = ("--base-quant", "nf4", "--lora-targets", "all-linear", "--max-steps", "2")
    assert train_here(flags(store, make_data(root / "data"), *more)) == 0
    return store


def merged(store: Path, out: Path, into: str | None) -> Any:
    """Export in fp32; give the manifest."""
    request = ExportRequest(store=str(store), out=out, dtype="fp32", merge=True, merge_into=into)
    export_package(request)
    return json.loads((out / "export_manifest.json").read_text())


def logits_of(package: Path) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = resident(package)(IDS).logits
    return found


@pytest.fixture(scope="module")
def packages(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with one package of each base; `packed` is what no flag gives."""
    root = tmp_path_factory.mktemp("packages")
    assert merged(trained, root / "packed", None)["merged_into"] == "packed"
    assert merged(trained, root / "imported", "imported")["merged_into"] == "imported"
    return root


def test_by_default_a_merged_model_is_the_one_that_was_trained(
    trained: Path, packages: Path
) -> None:
    ours = store_logits(trained)  # the packed base, and the adapters beside it
    near = float((logits_of(packages / "packed") - ours).abs().max())
    far = float((logits_of(packages / "imported") - ours).abs().max())
    assert near <= ROUNDING_MAX
    assert far > 1000 * ROUNDING_MAX, "control: the base as it was imported is another model"


def test_does_the_doctor_know_which_base_it_was(trained: Path, packages: Path) -> None:
    store = Against(store=str(trained), ref=None)
    told = examine(packages / "packed", store).against
    assert told is not None
    assert told.startswith("logits")
    assert told.endswith("adapters merged into the packed base")
    (packages / "imported" / "export_manifest.json").unlink()  # then it tries both
    told = examine(packages / "imported", store).against
    assert told is not None
    assert told.startswith("logits")
    assert told.endswith("adapters merged into the imported base")
    manifest = packages / "packed" / "export_manifest.json"
    manifest.write_text(json.dumps({"merged_into": "imported"}))
    said = examine(packages / "packed", store).against
    assert said is not None
    assert said.startswith("it is another model"), "control: a manifest that lies"


def test_objects_in_the_manifest_are_those_that_were_merged(trained: Path) -> None:
    found = {}
    for into in ("packed", "imported"):
        with open_weights(str(trained), ref=None, merge_into=into) as weights:
            shards = weights.commit.shards
            found[into] = weights.objects("params/block_000")
            assert weights.objects("params/embeddings") == [shards["params/embeddings"].digest]
    beside = shards["adapters/block_000"].digest
    assert found["packed"] == [shards["nf4/block_000"].digest, beside]
    assert found["imported"] == [shards["params/block_000"].digest, beside]


def test_without_the_library_the_other_base_is_named(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(packed.importlib, "import_module", missing)
    with pytest.raises(InputError, match="--merge-into imported"):
        merged(trained, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_a_base_that_was_not_packed_is_refused_as_such(tmp_path: Path) -> None:
    _, store = imported_store(tmp_path, "llama")
    more = ("--lora-targets", "q_proj", "--max-steps", "1")
    assert train_here(flags(store, make_data(tmp_path / "data"), *more)) == 0
    for into, words in (("packed", "was not packed"), ("other", "choose from")):
        with (
            pytest.raises(InputError, match=words),
            open_weights(str(store), ref=None, merge_into=into),
        ):
            pass
    with open_weights(str(store), ref=None, merge_into="imported") as weights:
        assert weights.merged_into == "imported"
    with (
        pytest.raises(InputError, match="no adapters"),
        open_weights(str(store), ref="imported", merge_into="imported"),
    ):
        pass
