"""From training to a package that strangers load, through the commands themselves."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardb
from export.import_run import plan_import, run_import
from export.reference_logits import read_reference
from tests.support.commands import check_refused
from tests.support.export_commands import names_in, run, run_here, start
from tests.support.exports import (
    byte_tokenizer,
    let_commands_load_here,
    make_store,
    replace_weight,
)
from tests.support.tiny_model import TINY
from tests.support.training import arguments, make_data, train_here
from trainer.device import Device
from trainer.engine import Engine, EngineOptions
from trainer.model.stored import read_model

MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a few steps with validation; a tokenizer lies beside the data."""
    folder = tmp_path_factory.mktemp("trained")
    data = make_data(folder / "data", vocab_size=300)
    (data / "tokenizer.json").write_bytes(byte_tokenizer(300))
    flags = arguments(folder / "run", data, "--max-steps", "4", "--snapshot-every", "2")
    flags += ["--val-data-dir", str(data / "val"), "--validate-every", "4"]
    for role in ("bos", "eos", "pad"):  # these rows have no manifest that would name it
        flags += [f"--{role}-token-id", "0"]
    assert train_here([flag if flag != "64" else "300" for flag in flags]) == 0
    return folder / "run"


def test_is_a_trained_store_loaded_by_a_stranger(trained: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install '.[test]'")
    out, file = tmp_path / "package", tmp_path / "logits.npz"
    ended = run("hf", trained, "--out", out, "--reference-logits", file, "--json")
    assert ended.code == 0, ended.err
    report = ended.json
    assert report["check"]["loader"] == "transformers"
    assert report["check"]["bit_equal"] is True
    assert report["check"]["positions"] >= 64
    assert report["notes"] == []
    card = (out / "README.md").read_text()
    assert "held-out loss" in card
    assert "tokens trained on | 256" in card

    model = transformers.AutoModelForCausalLM.from_pretrained(out, local_files_only=True)
    ids_T, logits_TV = read_reference(file)
    with torch.no_grad():
        assert torch.equal(model(ids_T[None]).logits[0], logits_TV)
    prompt = ids_T[None, :5]
    theirs = model.generate(prompt, do_sample=False, max_new_tokens=12, eos_token_id=None)
    with shardb.open(trained) as store, store.at() as view:
        engine = Engine(read_model(view), EngineOptions(), Device.from_name("cpu"))
        ours = prompt
        for _ in range(12):
            best = engine.logits(view, ours, last_only=True)[:, -1].argmax(-1, keepdim=True)
            ours = torch.cat((ours, best), dim=1)
    assert torch.equal(theirs, ours)


def test_does_the_command_refuse_and_leave_nothing(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    out = tmp_path / "package"
    for code, word, *flags in (
        (4, "no store", tmp_path / "nowhere", "--out", out),
        (4, "step 9", trained, "--out", out, "--ref", "step-9"),
        (2, "--dtype", trained, "--out", out, "--dtype", "int8"),
        (2, "--max-shard-size", trained, "--out", out, "--max-shard-size", "much"),
        (2, "no package", trained, "--out", tmp_path / "thesis", "--overwrite"),
        (2, "overlap", trained, "--out", trained / "package"),
        (2, "no embedding", trained, "--out", out, "--tokenizer", _larger_tokenizer(tmp_path)),
    ):  # fmt: skip
        check_refused(run_here(capsys, "hf", *flags), code, word)
    assert names_in(tmp_path) == ["larger", "thesis"]
    assert names_in(tmp_path / "thesis") == ["chapter.txt"]


def _larger_tokenizer(folder: Path) -> Path:
    (folder / "larger").mkdir(exist_ok=True)
    (folder / "larger" / "tokenizer.json").write_bytes(byte_tokenizer(301))
    return folder / "larger"


def test_does_a_kill_leave_the_old_package_and_nothing_for_long(
    trained: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_commands_load_here(monkeypatch)
    out = tmp_path / "package"
    assert run_here(capsys, "hf", trained, "--out", out, "--ref", "step-2").code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for seconds in (0.0, 0.5):
        export = start("hf", trained, "--out", out, "--overwrite")
        while export.poll() is None and len(names_in(tmp_path)) == 1:
            time.sleep(0.005)
        time.sleep(seconds)
        export.send_signal(signal.SIGKILL)
        export.communicate()
        assert export.returncode == -signal.SIGKILL
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        assert len(names_in(tmp_path)) == 2  # the draft of the dead
    assert run_here(capsys, "hf", trained, "--out", out, "--overwrite").code == 0
    assert names_in(tmp_path) == ["package"]
    assert json.loads((out / "export_manifest.json").read_text())["commits"][0]["step"] == 4


def test_does_an_end_asked_for_leave_nothing(trained: Path, tmp_path: Path) -> None:
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        export = start("hf", trained, "--out", tmp_path / "package")
        while export.poll() is None and not names_in(tmp_path):
            time.sleep(0.005)
        export.send_signal(number)
        export.communicate()
        assert export.returncode == code
        assert names_in(tmp_path) == []


@pytest.mark.slow
def test_does_memory_stay_when_the_model_grows(tmp_path: Path) -> None:
    small = replace(TINY, vocab_size=300, num_layers=1)
    wide = replace(small, hidden_size=768, num_heads=12, head_dim=64, intermediate_size=1024)
    large = replace(wide, num_layers=10)
    peaks = {}
    size = holding = 0
    for name, model in (("small", small), ("large", large)):
        store = make_store(tmp_path / name, model)
        ended = run("hf", store, "--out", tmp_path / f"{name}-package", "--json")
        assert ended.code == 0, ended.err
        peaks[name] = ended.json["peak_memory_bytes"]
        size = ended.json["model_bytes"]
        holding = ended.json["check_peak_memory_bytes"]
    # A block has 15 MB: it is mapped, and logits need room for its products.
    assert size > 140 * MEGABYTE
    assert peaks["large"] - peaks["small"] < 64 * MEGABYTE
    assert holding > size  # control: transformers, in the process of the check, holds all of it


def test_is_an_imported_package_given_back_byte_for_byte(
    shared_data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    let_commands_load_here(monkeypatch)
    source = shared_data / "models" / "stories260K"
    run_import(plan_import(source), tmp_path / "store")
    command = ("hf", tmp_path / "store", "--out", tmp_path / "package", "--json")
    ended = run_here(capsys, *command)
    assert ended.code == 0, ended.err
    assert ended.json["check"]["bit_equal"] is True
    ours, theirs = (
        load_file(folder / "model.safetensors") for folder in (tmp_path / "package", source)
    )
    assert set(ours) == set(theirs)
    for name, values in theirs.items():
        assert ours[name].dtype == values.dtype
        assert ours[name].numpy().tobytes() == values.numpy().tobytes()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "package" / name).read_bytes() == (source / name).read_bytes()
    for name in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "package" / name).read_text())
        assert written == json.loads((source / name).read_text())


def test_is_a_value_that_fp16_has_not_refused_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = replace(TINY, vocab_size=300)
    store = make_store(tmp_path / "store", model)
    replace_weight(store, "block_000", "mlp.gate_proj.weight", -70000.0)
    refused = run_here(capsys, "hf", store, "--out", tmp_path / "package", "--dtype", "fp16")
    check_refused(refused, 2, "mlp.gate_proj.weight", "-70000", "--dtype bf16")
    assert names_in(tmp_path) == ["store"]


def test_is_a_gguf_file_made_by_the_command(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gguf = pytest.importorskip("gguf", reason="gguf is not installed: pip install '.[test]'")
    out = tmp_path / "model.gguf"
    ended = run("gguf", trained, "--out", out, "--type", "q8_0", "--json")
    assert ended.code == 0, ended.err
    fields = gguf.GGUFReader(out).fields
    assert len(fields["tokenizer.ggml.tokens"].contents()) == 300
    assert ended.json["tensors_compared"] == len(gguf.GGUFReader(out).tensors)
    check_refused(run_here(capsys, "gguf", trained, "--out", out), 2, "--overwrite")
    check_refused(run_here(capsys, "gguf", trained, "--out", out, "--type", "q4"), 2, "--type")
    assert names_in(tmp_path) == ["model.gguf"]
