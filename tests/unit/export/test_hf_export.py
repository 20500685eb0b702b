"""Does an export check everything first, say what it made, and make the same bytes again?"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import shardb
from export import hf_export, verify
from export.hf_export import ExportReport, export_package
from export.hf_plan import ExportRequest
from export.reference_logits import check_ids, read_reference, stage_logits
from export.verify import BY_STAGES, Loaded, VerificationError
from shardb.errors import NotFoundError
from tests.support.exports import (
    byte_tokenizer,
    load_here,
    make_store,
    params_of,
    replace_weight,
)
from tests.support.tiny_model import TINY
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.errors import InputError

MODEL = replace(TINY, vocab_size=300, pad_token_id=0, bos_token_id=0, eos_token_id=0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a store of three commits with a tokenizer; nobody changes it."""
    path = tmp_path_factory.mktemp("export") / "store"
    return make_store(path, MODEL, steps=3, tokenizer=byte_tokenizer(MODEL.vocab_size))


@pytest.fixture(autouse=True)
def only_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load by this project's stages: what transformers gives is asked elsewhere."""
    monkeypatch.setattr(hf_export, "choose_loader", lambda _: (BY_STAGES, "only stages here"))


def exported(store: Path, out: Path, **more: Any) -> ExportReport:
    return export_package(ExportRequest(store=str(store), out=out, **more), load_here)


def digests(folder: Path) -> Mapping[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_is_the_package_complete_and_its_manifest_true(store: Path, tmp_path: Path) -> None:
    report = exported(store, tmp_path / "package", max_file_bytes=200_000)
    folder = tmp_path / "package"
    manifest = json.loads((folder / "export_manifest.json").read_text())
    found = digests(folder)
    assert {name: entry["sha256"] for name, entry in manifest["files"].items()} == {
        name: digest for name, digest in found.items() if name != "export_manifest.json"
    }
    assert {
        *("README.md", "config.json", "generation_config.json", "tokenizer.json"),
        *("tokenizer_config.json", "special_tokens_map.json", "model.safetensors.index.json"),
        *report.files,
    } == set(manifest["files"])
    with shardb.open(store) as opened:
        head = opened.resolve()
        assert manifest["store_id"] == opened.format.store_id
    assert manifest["commits"] == [
        {"id": head.id, "branch": "main", "step": 2, "recipe": head.recipe}
    ]
    tensor = manifest["tensors"]["model.layers.2.mlp.down_proj.weight"]
    assert tensor["objects"] == [head.shards["params/block_002"].digest]
    assert (tensor["shard"], tensor["tensor"]) == ("params/block_002", "mlp.down_proj.weight")
    assert report.peak_memory_bytes > 0
    assert manifest["check"] == json.loads(json.dumps(report.check.to_json()))
    assert report.check.bit_equal


def test_does_the_same_commit_give_the_same_bytes(store: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        exported(store, tmp_path / name / "package", ref="step-1", dtype="bf16")
    assert digests(tmp_path / "one" / "package") == digests(tmp_path / "two" / "package")
    exported(store, tmp_path / "other" / "package", ref="step-2", dtype="bf16")
    assert digests(tmp_path / "one" / "package") != digests(tmp_path / "other" / "package")


def test_is_configuration_written_in_every_form(store: Path, tmp_path: Path) -> None:
    exported(store, tmp_path / "package", dtype="fp16")
    config = json.loads((tmp_path / "package" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["torch_dtype"] == config["dtype"] == "float16"
    assert config["head_dim"] == 16
    assert config["num_key_value_heads"] == 2
    assert config["tie_word_embeddings"] is False
    generation = json.loads((tmp_path / "package" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    settings = json.loads((tmp_path / "package" / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["eos_token"] == "<|endoftext|>"
    assert settings["model_max_length"] == MODEL.max_position_embeddings


def test_does_the_card_tell_what_was_measured(store: Path, tmp_path: Path) -> None:
    exported(store, tmp_path / "package", dtype="bf16")
    card = (tmp_path / "package" / "README.md").read_text()
    assert "training loss, last step | 3.0000 (step 2)" in card
    assert "training loss, first step | 5.0000 (step 0)" in card
    assert "held-out" not in card  # nobody measured it
    assert "bit-equal" in card
    assert "that is what bfloat16 costs" in card
    assert "Not checked: only stages here." in card


def test_are_reference_logits_those_of_the_engine(store: Path, tmp_path: Path) -> None:
    exported(store, tmp_path / "package", dtype="fp16", reference_logits=tmp_path / "logits.npz")
    ids_T, logits_TV = read_reference(tmp_path / "logits.npz")
    with np.load(tmp_path / "logits.npz") as arrays:
        assert arrays["logits"].dtype == np.float32
        assert arrays["logits"].shape == (64, MODEL.vocab_size)
    with shardb.open(store) as opened, opened.at() as view:
        for dtype in ("fp32", "bf16", "fp16"):
            engine = Engine(MODEL, EngineOptions(dtype=dtype), Device.from_name("cpu"))
            expected = engine.logits(view, ids_T[None])[0].float()
            precise = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
            params = params_of(store)
            ours = stage_logits(MODEL, lambda s, p=params: p[s], ids_T, precise[dtype])
            assert torch.equal(ours, expected)
            assert torch.equal(ours, logits_TV) is (dtype == "fp32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logits.npz", "package"]


def test_are_the_ids_of_a_check_those_of_the_tokenizer() -> None:
    ids_T = check_ids(MODEL, "0" * 32, 17)
    assert len(ids_T) == 64
    assert int(ids_T.max()) < 17
    assert torch.equal(ids_T, check_ids(MODEL, "0" * 32, 17))
    assert not torch.equal(ids_T, check_ids(MODEL, "0" * 31 + "1", 17))


def test_is_a_mean_exported_with_all_its_sources(store: Path, tmp_path: Path) -> None:
    report = exported(store, tmp_path / "mean", average=("step-0", "step-2"))
    manifest = json.loads((tmp_path / "mean" / "export_manifest.json").read_text())
    assert [commit["step"] for commit in manifest["commits"]] == [0, 2]
    assert manifest["mean_of_commits"] is True
    assert all(len(entry["objects"]) == 2 for entry in manifest["tensors"].values())
    assert report.check.bit_equal
    card = (tmp_path / "mean" / "README.md").read_text()
    assert "the mean of the weights of steps 0, 2" in card


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"ref": "step-9"}, NotFoundError, "step"),
        ({"tokenizer": Path("nowhere")}, InputError, "--tokenizer nowhere"),
        ({"chat_template": Path("nowhere")}, InputError, "--chat-template nowhere"),
    ],
)
def test_is_bad_input_refused_before_anything_is_made(
    store: Path, tmp_path: Path, more: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        exported(store, tmp_path / "package", **more)
    assert list(tmp_path.iterdir()) == []


def test_is_fp16_overflow_refused_before_anything_is_made(tmp_path: Path) -> None:
    path = make_store(tmp_path / "store", MODEL, tokenizer=byte_tokenizer(300))
    replace_weight(path, "lm_head", "weight", 70000.0)
    with pytest.raises(InputError, match=r"params/lm_head: tensor weight .*--dtype bf16"):
        exported(path, tmp_path / "package", dtype="fp16")
    assert [each.name for each in tmp_path.iterdir()] == ["store"]
    assert exported(path, tmp_path / "package", dtype="bf16").check.bit_equal


def test_is_a_broken_template_refused_and_a_good_one_at_both_places(
    store: Path, tmp_path: Path
) -> None:
    pytest.importorskip("jinja2", reason="jinja2 is not installed: pip install '.[test]'")
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}")
    with pytest.raises(InputError, match="line 1"):
        exported(store, tmp_path / "package", chat_template=template)
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    exported(store, tmp_path / "package", chat_template=template)
    settings = json.loads((tmp_path / "package" / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == template.read_text()
    assert (tmp_path / "package" / "chat_template.jinja").read_text() == template.read_text()


def test_does_a_full_disk_leave_the_old_package(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported(store, tmp_path / "package", ref="step-0")
    before = digests(tmp_path / "package")

    def write_half(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hf_export, "write_weights", write_half)
    with pytest.raises(OSError, match="No space"):
        exported(store, tmp_path / "package", overwrite=True)
    assert digests(tmp_path / "package") == before
    assert [path.name for path in tmp_path.iterdir()] == ["package"]


def test_are_logits_beyond_the_bound_never_published(store: Path, tmp_path: Path) -> None:
    def load_off(folder: Path, ids_T: Tensor, loader: str, plan: Any) -> Loaded:
        loaded = load_here(folder, ids_T, loader, plan)
        return replace(loaded, logits_TV=loaded.logits_TV + off)

    for off, is_fine in ((1e-6, True), (0.01, False), (float("nan"), False)):
        out = tmp_path / f"package-{off}"
        request = ExportRequest(store=str(store), out=out, reference_logits=tmp_path / f"{off}.npz")
        if is_fine:
            assert not export_package(request, load_off).check.bit_equal
        else:
            with pytest.raises(VerificationError, match="another model"):
                export_package(request, load_off)
        assert out.exists() is is_fine
        assert (tmp_path / f"{off}.npz").exists() is is_fine


def test_is_a_place_inside_the_package_refused(store: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="inside the package"):
        exported(store, tmp_path / "p", reference_logits=tmp_path / "p" / "logits.npz")
    with pytest.raises(InputError, match="overlap"):
        exported(store, store / "package")


def test_is_what_was_not_checked_said(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("transformers") is not None:
        assert verify.choose_loader(1000) == ("transformers", "")
        loader, why = verify.choose_loader(1 << 60)
        assert loader == "stages"
        assert "at once" in why
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    loader, why = verify.choose_loader(1000)
    assert loader == "stages"
    assert "transformers is not installed" in why
