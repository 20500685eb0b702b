"""Does an import keep every byte, cost one copy, and survive what kills it?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

import shardb
from export.import_cli import command
from export.import_run import plan_import
from export.source_package import read_source, read_tokenizer_files
from shardb.errors import ConflictError, StorageFullError
from tests.support.commands import shardb_command
from tests.support.exports import byte_tokenizer
from tests.support.packages import (
    change_json,
    config_of,
    import_here,
    random_tensors,
    stored_tensors,
    write_package,
)
from tests.support.training import REPOSITORY
from tests.support.warm_process import WarmProcess
from trainer.errors import InputError
from trainer.model.stored import TOKENIZER_SHARD, read_bytes, read_model

LLAMA = config_of("llama")
BIG = config_of(
    "llama",
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=24,
    num_attention_heads=8,
    vocab_size=4096,
)


def start(*arguments: object) -> WarmProcess:
    return WarmProcess("export.import_cli", arguments)


def shard_digests(store: Path, ref: str | None = None) -> dict[str, str]:
    with shardb.open(store) as opened, opened.at(ref=ref) as view:
        return {name: entry.digest for name, entry in view.commit.shards.items()}


def object_count(store: Path) -> int:
    return len(list((store / "objects").iterdir()))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_is_every_tensor_kept_byte_for_byte(
    dtype: torch.dtype, split: bool, tmp_path: Path
) -> None:
    tensors = random_tensors(LLAMA, dtype=dtype)
    # Values that a way through another form would change.
    tensors["model.norm.weight"][:4] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-40])
    package = write_package(tmp_path / "p", LLAMA, tensors, split=split)
    import_here(package, tmp_path / "s")
    found = stored_tensors(tmp_path / "s")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_mixed_forms_are_kept(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    import_here(write_package(tmp_path / "p", LLAMA, tensors), tmp_path / "s")
    dtypes = {name: tensor.dtype for name, tensor in stored_tensors(tmp_path / "s").items()}
    assert dtypes == {name: tensor.dtype for name, tensor in tensors.items()}


def test_what_the_source_was_is_kept(tmp_path: Path) -> None:
    package = write_package(tmp_path / "p", LLAMA)
    (package / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    tokenizer = byte_tokenizer(300)
    (package / "tokenizer.json").write_bytes(tokenizer)
    (package / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    (package / "chat_template.jinja").write_text("{{ messages }}")
    import_here(package, tmp_path / "s")
    with shardb.open(tmp_path / "s") as store, store.at(ref="imported") as view:
        source = read_source(view)
        assert source is not None
        assert source.config == LLAMA
        assert source.generation_config == {"eos_token_id": [2, 5]}
        assert {entry.name for entry in source.tensors} == set(random_tensors(LLAMA))
        assert all(entry.dtype == "BF16" for entry in source.tensors)
        assert read_tokenizer_files(view) == {
            "tokenizer_config.json": b'{"model_max_length": 128}',
            "chat_template.jinja": b"{{ messages }}",
        }
        assert read_bytes(view, TOKENIZER_SHARD) == tokenizer
        assert read_model(view).vocab_size == 64
        assert view.commit.step == 0
        assert not any(entry.trainable for entry in view.commit.shards.values())


def test_related_models_share_what_they_share(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    import_here(write_package(tmp_path / "a", LLAMA, tensors), tmp_path / "s")
    before = object_count(tmp_path / "s")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones(48, 32, dtype=torch.bfloat16)
    other = write_package(tmp_path / "b", LLAMA, tensors, split=True)
    import_here(other, tmp_path / "s", branch="other")
    assert object_count(tmp_path / "s") == before + 1
    one, two = shard_digests(tmp_path / "s", "imported"), shard_digests(tmp_path / "s", "other")
    assert {name for name in one if one[name] != two[name]} == {"params/block_001"}
    assert torch.equal(
        stored_tensors(tmp_path / "s", "imported-other")["model.layers.1.mlp.up_proj.weight"],
        tensors["model.layers.1.mlp.up_proj.weight"],
    )


def test_a_branch_is_begun_once(tmp_path: Path) -> None:
    package = write_package(tmp_path / "p", LLAMA)
    import_here(package, tmp_path / "s")
    with pytest.raises(ConflictError, match="branch main holds an imported model at step 0"):
        import_here(package, tmp_path / "s")
    with pytest.raises(InputError, match="step-N"):
        import_here(package, tmp_path / "s", branch="step-3")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="holds no store"):
        import_here(package, tmp_path / "folder")
    assert sorted(p.name for p in (tmp_path / "folder").iterdir()) == ["thesis.txt"]


def test_an_import_that_died_before_its_snapshot_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    package = write_package(tmp_path / "p", LLAMA)
    with monkeypatch.context() as patched:
        patched.setattr(shardb.Store, "create_snapshot", dies)
        with pytest.raises(KeyboardInterrupt):
            import_here(package, tmp_path / "s")
    with pytest.raises(ConflictError):
        import_here(package, tmp_path / "s")
    assert shard_digests(tmp_path / "s", "imported") == shard_digests(tmp_path / "s")


@pytest.mark.parametrize("fault", ["config", "weights", "tokenizer"])
def test_a_refused_package_leaves_no_store(fault: str, tmp_path: Path) -> None:
    package = write_package(tmp_path / "p", LLAMA)
    if fault == "config":
        change_json(package / "config.json", lambda config: config.update(hidden_size=40))
    elif fault == "weights":
        os.truncate(package / "model.safetensors", 5000)
    else:
        (package / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=str(package)):
        import_here(package, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_sentencepiece_file_alone_is_refused_with_the_remedy(tmp_path: Path) -> None:
    package = write_package(tmp_path / "p", LLAMA)
    (package / "tokenizer.model").write_bytes(b"\x00 no model")
    with pytest.raises(InputError, match=r"no tokenizer\.json, only tokenizer\.model") as refused:
        import_here(package, tmp_path / "s")
    assert "sentencepiece" in str(refused.value)


def test_an_older_form_of_tokenizer_is_converted_with_a_word(tmp_path: Path) -> None:
    package = write_package(tmp_path / "p", config_of("llama", vocab_size=300))
    model = json.loads(byte_tokenizer(300))["model"]
    (package / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (package / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (package / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    plan = plan_import(package)
    assert "tokenizer.json was made from vocab.json by transformers" in plan.notes
    assert plan.tokenizer.tokenizer is not None
    text = "the cat sat on 12 mats, naïve élève"
    one, other = (
        Tokenizer.from_str(data.decode()).encode(text).ids
        for data in (plan.tokenizer.tokenizer, byte_tokenizer(300))
    )
    assert one == other


def test_too_little_space_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = write_package(tmp_path / "p", LLAMA)
    held = os.statvfs(tmp_path)
    nothing = os.statvfs_result((held.f_bsize, held.f_frsize, held.f_blocks, 0, 0, *held[5:10]))
    monkeypatch.setattr(os, "statvfs", lambda _: nothing)
    with pytest.raises(StorageFullError, match="0 are free"):
        import_here(package, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_another_form_is_rounded_once_and_what_it_cannot_hold_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(LLAMA)
    tensors["model.norm.weight"][0] = 1e-9
    package = write_package(tmp_path / "p", LLAMA, tensors)
    made = import_here(package, tmp_path / "fp16", dtype="fp16")
    found = stored_tensors(tmp_path / "fp16")
    assert all(torch.equal(found[name], t.to(torch.float16)) for name, t in tensors.items())
    assert made.notes == (
        "model.norm.weight: 1 values are too small for the new form and became 0",
    )
    import_here(package, tmp_path / "fp32", dtype="fp32")
    found = stored_tensors(tmp_path / "fp32")
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in tensors.items())
    tensors["model.norm.weight"][1] = 70000.0
    with pytest.raises(InputError, match=r"model\.norm\.weight holds 1 values .*such as 70144"):
        import_here(write_package(package, LLAMA, tensors), tmp_path / "no", dtype="fp16")
    with shardb.open(tmp_path / "no") as store:
        assert store.branches() == {}


def test_the_command_reports_and_answers_with_exit_codes(tmp_path: Path) -> None:
    package = write_package(tmp_path / "p", LLAMA)
    with start(package, "--store", tmp_path / "s", "--json") as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    report = json.loads(out)
    assert report["stages"] == "native"
    assert report["parameters"] == sum(t.numel() for t in random_tensors(LLAMA).values())
    assert report["shards"] == shard_digests(tmp_path / "s")
    with start(package, "--store", tmp_path / "s2", "--dtype", "int3") as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "--dtype is 'int3'" in err


def test_the_command_says_what_to_do_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = write_package(tmp_path / "p", config_of("gemma2"))
    assert command(str(package), str(tmp_path / "s"), branch="b") == 0
    told = capsys.readouterr().out
    assert "note: its blocks are computed by the layers of transformers" in told
    assert f"train --store {tmp_path / 's'} --branch b" in told


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a package of about 220 MB: many times a shard, and more than an interpreter needs."""
    folder = tmp_path_factory.mktemp("big") / "package"
    return write_package(folder, BIG, random_tensors(BIG), split=True)


@pytest.fixture(scope="module")
def whole(big: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Import it without a stop; nobody writes to the store."""
    store = tmp_path_factory.mktemp("whole") / "store"
    import_here(big, store)
    return store


@pytest.mark.parametrize("moment", [0.1, 0.5, 0.9])
def test_killed_at_any_moment_and_run_again_is_never_having_been_killed(
    big: Path, whole: Path, moment: float, tmp_path: Path
) -> None:
    size = sum(p.stat().st_size for p in (whole / "objects").iterdir())
    store = tmp_path / "killed"
    with start(big, "--store", store) as process:
        while process.poll() is None and written_bytes(store) < moment * size:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    with shardb.open(store) as opened:
        assert opened.branches() == {}
    import_here(big, store)
    assert shard_digests(store) == shard_digests(whole)
    assert sorted(p.name for p in (store / "objects").iterdir()) == sorted(
        p.name for p in (whole / "objects").iterdir()
    )
    assert shardb_command("fsck", store).code == 0


def written_bytes(store: Path) -> int:
    total = 0
    for folder in ("objects", "spare"):
        try:
            total += sum(entry.stat().st_size for entry in os.scandir(store / folder))
        except FileNotFoundError:
            continue
    return total


def peak_bytes(work: str) -> int:
    """Give the peak of a fresh process; unlike `ru_maxrss` it does not begin with its parent's."""
    script = (
        "from pathlib import Path\nfrom export.import_run import plan_import, run_import\n"
        f"{work}\nstatus = Path('/proc/self/status').read_text()\n"
        "print(int(status.split('VmHWM:')[1].split()[0]) * 1024)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


def test_is_memory_one_shard_however_large_the_package_is(big: Path, tmp_path: Path) -> None:
    """Peak memory of fresh processes: an import against planning alone, and a control arm."""
    plan = plan_import(big)
    whole = sum(t.spec.bytes for t in plan.stored.values())
    largest = max(sum(s.bytes for s in shard.values()) for shard in plan.specs().values())
    assert whole > 20 * largest
    idle = peak_bytes(f"plan_import(Path({str(big)!r}))")
    used = peak_bytes(f"run_import(plan_import(Path({str(big)!r})), Path({str(tmp_path / 's')!r}))")
    assert used - idle < 4 * largest + (32 << 20) < whole / 2
    keeps = "import shardb\nshardb.Transaction.let_go = lambda *_: None\n"
    kept = peak_bytes(
        f"{keeps}run_import(plan_import(Path({str(big)!r})), Path({str(tmp_path / 'k')!r}))"
    )
    assert kept - idle > whole / 2
