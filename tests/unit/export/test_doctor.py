"""Does the doctor name what is wrong with a package, and nothing where nothing is?"""

from __future__ import annotations

import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from export.doctor_findings import ERROR, NOTE, WARNING, Examined, UnreadablePackageError
from export.doctor_run import examine
from export.doctor_values import CHUNK_BYTES, Extent, not_finite
from tests.support.ailing import (
    INDEX,
    MODEL,
    ONE,
    SINGLE,
    TWO,
    Q,
    Spoil,
    hostile_header,
    overflowing,
    rename_key,
    set_json,
    set_weights,
    sound_package,
    without_format,
)
from tests.support.exports import make_store
from tests.support.packages import FAMILY_NAMES, change_json, config_of, write_package
from trainer.errors import InputError

CONFIG, GENERATION, SETTINGS = "config.json", "generation_config.json", "tokenizer_config.json"
HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound_package(tmp_path_factory.mktemp("sound") / "package")


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sound_package(tmp_path_factory.mktemp("split") / "package", split=True)


def spoilt(package: Path, folder: Path, *spoils: Spoil) -> Examined:
    shutil.copytree(package, folder)
    for spoil in spoils:
        spoil(folder)
    return examine(folder)


def test_is_nothing_said_of_a_sound_package(sound: Path, split: Path) -> None:
    for package, files in ((sound, 1), (split, 2)):
        examined = examine(package)
        assert list(examined.findings) == []
        assert examined.exit_code == 0
        assert len(list(package.glob("*.safetensors"))) == files
        assert examined.values_read * 4 == examined.weight_bytes > 0


def untie(tensors: dict[str, torch.Tensor]) -> None:
    tensors[HEAD] = tensors[EMBEDDINGS].clone()


def drop_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors.pop(HEAD)


def put_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[Q].view(-1)[[1, 5, 7]] = torch.nan


def narrow_keys(tensors: dict[str, torch.Tensor]) -> None:
    name = Q.replace("q_proj", "k_proj")
    tensors[name] = tensors[name][:8].clone()


SCALED = {"rope_type": "linear", "factor": 2.0}
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
# What is done to a sound package -> grade, file, field, words that must be said.
SINGLE_CASES: dict[str, tuple[Spoil, str, str, str, tuple[str, ...]]] = {
    "wrong tie flag, head differs": (
        set_json(CONFIG, tie_word_embeddings=True), ERROR, CONFIG, "tie_word_embeddings",
        ("differs", "set it to false"),
    ),
    "wrong tie flag, no head": (
        set_weights(drop_head), ERROR, CONFIG, "tie_word_embeddings", ("random",),
    ),
    "equal head apart": (
        set_weights(untie), WARNING, CONFIG, "tie_word_embeddings", ("equals",),
    ),
    "renamed key": (
        rename_key(Q, Q.replace("q_proj", "qproj")), ERROR, SINGLE, Q,
        ("qproj.weight is there instead", f"rename it to {Q}"),
    ),
    "wrapped": (
        set_weights(lambda t: [t.update({f"_orig_mod.{n}": t.pop(n)}) for n in list(t)]),
        ERROR, SINGLE, f"_orig_mod.{HEAD}", ("'_orig_mod.'", "wrapper"),
    ),
    "stray tensor": (
        set_weights(lambda t: t.update(ghost=torch.zeros(2))), ERROR, SINGLE, "ghost", ("drop",),
    ),
    "truncated": (
        lambda f: os.truncate(f / SINGLE, 5000), ERROR, SINGLE, "", ("again",),
    ),
    "cut by a byte": (
        lambda f: os.truncate(f / SINGLE, (f / SINGLE).stat().st_size - 1), ERROR, SINGLE, "",
        ("tensors end at",),
    ),
    "hostile header": (hostile_header, ERROR, SINGLE, "", ("1099511627776",)),
    "no weights": (lambda f: (f / SINGLE).unlink(), ERROR, SINGLE, "", ("not there",)),
    "stray file": (
        lambda f: shutil.copy(f / SINGLE, f / ONE), WARNING, ONE, "", ("no index names it",),
    ),
    "fp16 overflow": (overflowing, ERROR, SINGLE, Q, ("0 NaN and 2 infinite", "65504", "bf16")),
    "NaN": (set_weights(put_nan), ERROR, SINGLE, Q, ("3 NaN and 0 infinite",)),
    "no format": (without_format, ERROR, SINGLE, "__metadata__.format", ("missing",)),
    "unreadable by others": (
        lambda f: os.chmod(f / SINGLE, 0o600), WARNING, SINGLE, "mode", ("0600", "chmod 644"),
    ),
    "leftover": (
        lambda f: (f / "model.safetensors.tmp").touch(), WARNING, "model.safetensors.tmp", "",
        ("leftover",),
    ),
    "pickle": (
        lambda f: (f / "pytorch_model.bin").touch(), WARNING, "pytorch_model.bin", "", ("pickle",),
    ),
    "dangling link": (
        lambda f: (f / "vocab.json").symlink_to("nowhere"), ERROR, "vocab.json", "", ("nowhere",),
    ),
    "no config": (lambda f: (f / CONFIG).unlink(), ERROR, CONFIG, "", ("not there",)),
    "broken config": (lambda f: (f / CONFIG).write_text("{"), ERROR, CONFIG, "", ("JSON",)),
    "theta of version 5 alone": (
        set_json(CONFIG, rope_theta=None), WARNING, CONFIG, "rope_theta", ("version 4", "10000"),
    ),
    "two thetas": (
        set_json(CONFIG, rope_theta=500000.0), ERROR, CONFIG, "rope_theta", ("500000", "10000"),
    ),
    "scaling of version 5 alone": (
        set_json(CONFIG, rope_parameters={**ROPE, **SCALED}), WARNING, CONFIG, "rope_scaling",
        ("linear", "version 4"),
    ),
    "two scalings": (
        set_json(CONFIG, rope_scaling={**SCALED, "factor": 4.0},
                 rope_parameters={**ROPE, **SCALED}),
        ERROR, CONFIG, "rope_scaling", ("differs", "factor"),
    ),
    "two dtypes": (set_json(CONFIG, dtype="bfloat16"), ERROR, CONFIG, "dtype", ("float32",)),
    "new dtype alone": (
        set_json(CONFIG, torch_dtype=None), WARNING, CONFIG, "torch_dtype", ("missing",),
    ),
    "another dtype than the weights": (
        set_json(CONFIG, dtype="bfloat16", torch_dtype="bfloat16"), WARNING, CONFIG, "dtype",
        ("most weights are float32",),
    ),
    "head_dim wrong": (
        set_json(CONFIG, head_dim=32), ERROR, SINGLE, Q, ("config.json asks for",),
    ),
    "kv heads left out": (
        set_json(CONFIG, num_key_value_heads=None), NOTE, CONFIG, "num_key_value_heads",
        ("derive",),
    ),
    "kv heads uneven": (
        set_json(CONFIG, num_key_value_heads=3), ERROR, CONFIG, "num_key_value_heads", ("evenly",),
    ),
    "a narrow key": (
        set_weights(narrow_keys), ERROR, SINGLE, Q.replace("q_proj", "k_proj"),
        ("num_key_value_heads", "8 rows"),
    ),
    "no architecture": (
        set_json(CONFIG, architectures=None), WARNING, CONFIG, "architectures", ("vLLM",),
    ),
    "unknown family": (
        set_json(CONFIG, model_type="mamba"), NOTE, CONFIG, "model_type", ("not compared",),
    ),
    "no family": (set_json(CONFIG, model_type=None), ERROR, CONFIG, "model_type", ("nobody",)),
    "quantised": (
        set_json(CONFIG, quantization_config={"quant_method": "awq"}), NOTE, CONFIG,
        "quantization_config", ("awq",),
    ),
    "vocabulary too small": (
        set_json(CONFIG, vocab_size=290), ERROR, "tokenizer.json", "model.vocab", ("300", "290"),
    ),
    "another end": (
        set_json(GENERATION, eos_token_id=2), ERROR, GENERATION, "eos_token_id", ("it is 2",),
    ),
    "an end that the tokenizer has not": (
        set_json(CONFIG, eos_token_id=7), ERROR, GENERATION, "eos_token_id", ("has 7",),
    ),
    "never stops": (
        lambda f: [set_json(n, eos_token_id=7)(f) for n in (CONFIG, GENERATION)],
        ERROR, SETTINGS, "eos_token", ("never stop",),
    ),
    "an id out of range": (
        set_json(CONFIG, pad_token_id=300), ERROR, CONFIG, "pad_token_id", ("300",),
    ),
    "an end left out": (
        set_json(CONFIG, eos_token_id=None), NOTE, CONFIG, "eos_token_id", ("fills in 2",),
    ),
    "a token that is not there": (
        set_json(SETTINGS, bos_token="<begin>"), ERROR, SETTINGS, "bos_token", ("<begin>",),
    ),
    "class of version 5": (
        set_json(SETTINGS, tokenizer_class="TokenizersBackend"), WARNING, SETTINGS,
        "tokenizer_class", ("version 4", "PreTrainedTokenizerFast"),
    ),
    "class nobody knows": (
        set_json(SETTINGS, tokenizer_class="MyTokenizer"), NOTE, SETTINGS, "tokenizer_class",
        ("MyTokenizer",),
    ),
    "template at one place": (
        lambda f: (f / "chat_template.jinja").write_text("{{ x }}"), WARNING, SETTINGS,
        "chat_template", ("alone",),
    ),
    "no tokenizer": (
        lambda f: (f / "tokenizer.json").unlink(), WARNING, "tokenizer.json", "", ("no tokenizer",),
    ),
    "broken tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("[1]"), ERROR, "tokenizer.json", "",
        ("cannot read",),
    ),
    "qwen2 that cuts otherwise": (
        set_json(CONFIG, model_type="qwen2"), ERROR, CONFIG, "model_type", ("ids differ silently",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SINGLE_CASES)
def test_is_it_found_with_its_place(case: str, sound: Path, tmp_path: Path) -> None:
    spoil, grade, file, field, words = SINGLE_CASES[case]
    examined = spoilt(sound, tmp_path / "package", spoil)
    found = [f for f in examined.findings if (f.file, f.field) == (file, field)]
    assert [f.severity for f in found][:1] == [grade], examined.findings
    told = f"{found[0].what}: {found[0].remedy}"
    assert [word for word in words if word not in told] == []
    assert examined.exit_code == int(any(f.severity != NOTE for f in examined.findings))
    assert examined.exit_code == 1 or grade == NOTE


def in_index(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    return lambda folder: change_json(folder / INDEX, change)


SPLIT_CASES: dict[str, tuple[Spoil, str, str, str, tuple[str, ...]]] = {
    "missing shard": (lambda f: (f / TWO).unlink(), ERROR, TWO, "", ("names it",)),
    "stray shard": (
        lambda f: shutil.copy(f / TWO, f / "model-00003-of-00003.safetensors"), WARNING,
        "model-00003-of-00003.safetensors", "", ("merge",),
    ),
    "single file beside the index": (
        lambda f: shutil.copy(f / TWO, f / SINGLE), ERROR, SINGLE, "", ("disagree",),
    ),
    "index of a ghost": (
        in_index(lambda d: d["weight_map"].update(ghost=ONE)), ERROR, INDEX, "weight_map",
        ("ghost",),
    ),
    "index outside the folder": (
        in_index(lambda d: d["weight_map"].update(ghost="../x")), ERROR, INDEX, "weight_map",
        ("'../x'",),
    ),
    "index without a tensor": (
        in_index(lambda d: d["weight_map"].pop(Q)), ERROR, INDEX, "weight_map", (Q, "does not put"),
    ),
    "wrong total": (
        in_index(lambda d: d["metadata"].update(total_size=5)), WARNING, INDEX,
        "metadata.total_size", ("it is 5",),
    ),
    "no map": (in_index(lambda d: d.pop("weight_map")), ERROR, INDEX, "weight_map", ("none",)),
    "no JSON": (lambda f: (f / INDEX).write_text("{"), ERROR, INDEX, "", ("JSON",)),
    "truncated shard": (lambda f: os.truncate(f / TWO, 900), ERROR, TWO, "", ("again",)),
}  # fmt: skip


@pytest.mark.parametrize("case", SPLIT_CASES)
def test_is_it_found_in_a_split_package(case: str, split: Path, tmp_path: Path) -> None:
    spoil, grade, file, field, words = SPLIT_CASES[case]
    examined = spoilt(split, tmp_path / "package", spoil)
    found = [f for f in examined.findings if (f.file, f.field) == (file, field)]
    assert [f.severity for f in found][:1] == [grade], examined.findings
    told = " ".join(f"{f.what}: {f.remedy}" for f in found)
    assert [word for word in words if word not in told] == []
    assert examined.exit_code == 1


def test_are_all_faults_told_and_not_the_first_alone(split: Path, tmp_path: Path) -> None:
    examined = spoilt(
        split,
        tmp_path / "package",
        lambda folder: (folder / TWO).unlink(),
        set_json(CONFIG, rope_theta=5.0),
        set_json(GENERATION, eos_token_id=2),
        lambda folder: os.chmod(folder / ONE, 0o600),
    )
    places = {(f.file, f.field) for f in examined.findings}
    wanted = {(TWO, ""), (CONFIG, "rope_theta"), (GENERATION, "eos_token_id"), (ONE, "mode")}
    assert wanted <= places
    grades = [f.severity for f in examined.findings]
    assert grades == sorted(grades, key=(ERROR, WARNING, NOTE).index)


def test_is_a_changed_file_known_by_the_manifest(tmp_path: Path) -> None:
    package = sound_package(tmp_path / "package", keep_manifest=True)
    assert list(examine(package).findings) == []
    (package / "README.md").write_text("something else")
    [finding] = examine(package).findings
    assert "README.md was changed" in finding.what


@pytest.mark.parametrize("model_type", FAMILY_NAMES)
def test_is_every_family_known(model_type: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install '.[test]'")
    config = config_of(model_type, architectures=["X"])
    examined = examine(write_package(tmp_path / "package", config))
    errors = [f for f in examined.findings if f.severity == ERROR]
    assert errors == []
    assert examined.tensors > 20


def test_is_memory_one_chunk_whatever_the_size(tmp_path: Path) -> None:
    values = torch.ones(8 * CHUNK_BYTES // 4)
    values[-1] = torch.inf
    save_file({"x": values}, tmp_path / SINGLE)
    extent = Extent(
        name="x",
        path=tmp_path / SINGLE,
        offset=(tmp_path / SINGLE).stat().st_size - values.nbytes,
        bytes=values.nbytes,
        form="F32",
    )
    tracemalloc.start()
    [finding], looked = not_finite([extent])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert looked == values.numel()
    assert "0 NaN and 1 infinite" in finding.what
    assert peak < 4 * CHUNK_BYTES < values.nbytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_are_values_counted_in_every_form(dtype: torch.dtype, tmp_path: Path) -> None:
    largest = torch.finfo(dtype).max
    values = torch.tensor([0.0, largest, torch.inf, -torch.inf, torch.nan, -1.0], dtype=dtype)
    save_file({"x": values}, tmp_path / SINGLE)
    [finding] = [f for f in examine(tmp_path).findings if f.field == "x"]
    assert "1 NaN and 2 infinite of 6" in finding.what


def test_is_what_is_no_package_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder or file"):
        examine(tmp_path / "nothing")
    (tmp_path / "a.gguf").write_bytes(b"GGML")
    for path, words in (
        (tmp_path, r"give the file .*a\.gguf itself"),
        (tmp_path / "a.gguf", "GGUF"),
    ):
        with pytest.raises(UnreadablePackageError, match=words):
            examine(path)
    make_store(tmp_path / "store", MODEL)
    with pytest.raises(UnreadablePackageError, match="a store: `export-hf"):
        examine(tmp_path / "store")
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(UnreadablePackageError, match="adapter"):
        examine(tmp_path)
