"""Does the comparison with a store find what no look at a package alone can find?"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from export import doctor_against
from export.doctor_findings import ERROR, Examined
from export.doctor_run import Against, examine
from export.gguf_export import GgufRequest, export_gguf
from export.hf_export import export_package
from export.hf_plan import ExportRequest
from shardb.errors import NotFoundError
from tests.support.ailing import MODEL, SINGLE, Q, set_json, set_weights
from tests.support.exports import (
    byte_tokenizer,
    interleaved_rotary,
    load_here,
    make_store,
    rewrite_tensors,
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("against")
    return make_store(folder / "store", MODEL, steps=2, tokenizer=byte_tokenizer(300))


def package_of(store: Path, folder: Path, dtype: str = "fp32") -> Path:
    export_package(ExportRequest(store=str(store), out=folder, dtype=dtype), load_here)
    (folder / "export_manifest.json").unlink()
    return folder


def compared(package: Path, store: Path, ref: str | None = None) -> Examined:
    return examine(package, Against(store=str(store), ref=ref), load_here)


def errors_of(examined: Examined) -> list[tuple[str, str]]:
    return [(f.field, f.what) for f in examined.findings if f.severity == ERROR]


@pytest.mark.parametrize("by", ["transformers", "stages"])
def test_is_a_wrong_rotary_layout_found_by_name(
    by: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MODEL has two queries' heads for each of keys, so both are laid out by their own number."""
    assert MODEL.num_heads != MODEL.num_kv_heads
    if by == "stages":
        monkeypatch.setattr(doctor_against, "choose_loader", lambda _: ("stages", "of a test"))
    else:
        pytest.importorskip("transformers", reason="pip install '.[test]'")
    package = package_of(store, tmp_path / "package")
    sound = compared(package, store)
    assert errors_of(sound) == []
    assert sound.against is not None
    assert "bit-equal over 64 positions" in sound.against
    assert by in sound.against
    rewrite_tensors(package / SINGLE, interleaved_rotary(MODEL.head_dim))
    assert errors_of(examine(package)) == []  # looked at alone it is as sound as before
    found = errors_of(compared(package, store))
    assert [field for field, _ in found] == ["logits", "rotary layout"]
    assert "over 64 positions" in found[0][1]
    assert f"interleaved in {2 * MODEL.num_layers} tensors" in found[1][1]


def test_is_a_changed_tensor_or_setting_told_apart(store: Path, tmp_path: Path) -> None:
    package = package_of(store, tmp_path / "package", "bf16")
    assert errors_of(compared(package, store)) == []
    set_json("config.json", rope_theta=50.0, rope_parameters={"rope_theta": 50.0})(package)
    found = errors_of(compared(package, store))
    assert "the configuration makes another model" in found[1][1]
    package = package_of(store, tmp_path / "other", "bf16")
    set_weights(lambda tensors: tensors[Q].neg_())(package)
    found = errors_of(compared(package, store))
    assert found[1][1].startswith("1 of ")
    assert Q in found[1][1]


def test_is_another_commit_or_model_found(store: Path, tmp_path: Path) -> None:
    package = package_of(store, tmp_path / "package")
    found = errors_of(compared(package, store, "step-0"))
    assert "another model than the store" in found[0][1]
    with pytest.raises(NotFoundError):
        compared(package, store, "step-9")
    rewrite_tensors(package / SINGLE, lambda name, t: t[:200] if "embed" in name else t)
    afresh = examine(package, Against(store=str(store), ref=None))
    assert "cannot load the package" in dict(errors_of(afresh))["logits"]


@pytest.mark.parametrize("form", ["f32", "q8_0"])
def test_is_a_gguf_file_compared(
    form: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf", reason="pip install '.[test]'")
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda n: None if n == "llama_cpp" else find(n)
    )
    file = tmp_path / "model.gguf"
    export_gguf(GgufRequest(store=str(store), out=file, form=form))
    sound = compared(file, store)
    assert errors_of(sound) == []
    assert sound.against is not None
    assert "over 64 positions" in sound.against
    assert errors_of(compared(file, store, "step-0"))[0][0] == "logits"
    reader = gguf.GGUFReader(file, "r+")
    wrong = next(t for t in reader.tensors if t.name == "blk.0.attn_q.weight")
    rows = torch.from_numpy(wrong.data.copy())
    wrong.data[:] = doctor_against.halved(rows, MODEL.num_heads).numpy()
    reader.data.flush()
    assert errors_of(examine(file)) == []
    assert errors_of(compared(file, store))[0][0] == "logits"
