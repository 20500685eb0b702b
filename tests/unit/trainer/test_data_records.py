from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.training import step_lines, step_records, train_here
from trainer.data.chat_template import read_template
from trainer.data.conversations import ConversationEncoder
from trainer.data.inspect import inspect
from trainer.data.manifest import MASKED_FORMAT_VERSION, Manifest, load_manifest
from trainer.data.masked import MASKED, begins_record, ids_of, is_masked, with_marks
from trainer.data.options import PrepareOptions
from trainer.data.prepare import prepare
from trainer.data.readers import ReadRules
from trainer.data.rows import TokenRows
from trainer.device import Device
from trainer.errors import InputError
from trainer.head import IGNORED_LABEL
from trainer.model.config import ModelConfig
from trainer.tokens import Tokens

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SIZE = 256 + len(CONTROLS)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer of single bytes and three control tokens, with a chat template beside it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in CONTROLS])
    folder = tmp_path / "model"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder / "tokenizer.json"


def chat(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return {"messages": messages}


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def options(tmp_path: Path, tokenizer: Path, form: str, **how: Any) -> PrepareOptions:
    skip_bad = how.pop("skip_bad", False)
    rules = ReadRules(form=form, skip_bad=skip_bad)
    values = {"seq_len": 63, "val_text": (tmp_path / "val.jsonl",), **how}
    text = (tmp_path / "train.jsonl",)
    return PrepareOptions(
        text=text, out=tmp_path / "out", tokenizer=tokenizer, rules=rules, **values
    )


def learned(rows: TokenRows, decoder: Tokenizer) -> list[str]:
    """Give the text that counts, row by row."""
    found = []
    for index in range(rows.row_count):
        row = rows.row(index)
        ids = [int(token) for token in row if token < MASKED]
        found.append(decoder.decode(ids, skip_special_tokens=False))
    return found


def test_only_what_the_assistant_says_is_learned(tmp_path: Path, tokenizer: Path) -> None:
    write(tmp_path / "train.jsonl", [chat("Hi?", "Yes.", "More", "No!"), chat("a", "b")])
    write(tmp_path / "val.jsonl", [chat("x", "zz")])
    made = prepare(options(tmp_path, tokenizer, "chat", seq_len=150))
    assert made.manifest.masked
    rows = TokenRows.open(tmp_path / "out" / "train", SIZE)
    decoder = Tokenizer.from_file(str(tokenizer))
    # The control token that ends a turn is learned with it, and so is the line end after it.
    assert learned(rows, decoder) == ["Yes.<|im_end|>\nNo!<|im_end|>\n", "b<|im_end|>\n"]
    whole = decoder.decode(ids_of(rows.row(0)).tolist(), skip_special_tokens=False)
    assert whole.startswith(
        "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>"
    )
    assert whole.endswith("<|endoftext|>" * 5)
    assert int(ids_of(rows.row(0))[0]) == decoder.token_to_id("<|im_start|>")


def test_a_completion_is_learned_with_the_end_of_the_document(
    tmp_path: Path, tokenizer: Path
) -> None:
    records = [
        {"prompt": "2+2=", "completion": "4"},
        {"prompt": "say <|im_end|> ", "completion": "k"},
    ]
    write(tmp_path / "train.jsonl", records)
    write(tmp_path / "val.jsonl", [{"prompt": "", "completion": "v w"}])
    prepare(options(tmp_path, tokenizer, "prompt-completion"))
    rows = TokenRows.open(tmp_path / "out" / "train", SIZE)
    decoder = Tokenizer.from_file(str(tokenizer))
    assert learned(rows, decoder) == ["4<|endoftext|>", "k<|endoftext|>"]
    # What a prompt spells is letters, not a control token.
    assert decoder.token_to_id("<|im_end|>") not in ids_of(rows.row(1))[:20]


def test_packed_records_are_whole_and_share_rows(tmp_path: Path, tokenizer: Path) -> None:
    records = [{"prompt": f"p{n} ", "completion": "c" * (8 + n)} for n in range(6)]
    write(tmp_path / "train.jsonl", records)
    write(tmp_path / "val.jsonl", [records[0], {"prompt": "q", "completion": "r"}])
    counts, digests = {}, set()
    for pack, across in ((False, False), (True, True), (True, False)):
        how = {"pack": pack, "attend_across": across, "overwrite": True}
        made = prepare(options(tmp_path, tokenizer, "prompt-completion", **how))
        counts[pack] = made.manifest.train.rows
        assert made.manifest.apart == (pack and not across)
        assert load_manifest(tmp_path / "out" / "manifest.json") == made.manifest
        rows = TokenRows.open(tmp_path / "out" / "train", SIZE)
        text = "".join(learned(rows, Tokenizer.from_file(str(tokenizer))))
        wanted = "".join(r["completion"] + "<|endoftext|>" for r in records[1:])
        assert text == wanted  # the first one is validation's too
        begins = [int(begins_record(rows.row(i)).sum()) for i in range(rows.row_count)]
        # As many marks as records, and one for what fills the row; no mark is part of an id.
        assert sum(begins) == (5 + rows.row_count if made.manifest.apart else 0)
        digests.add(rows.digest())
    assert len(digests) == 3
    with pytest.raises(InputError, match="give --pack too"):
        options(tmp_path, tokenizer, "prompt-completion", attend_across=True)
    assert counts[True] < counts[False] == 5


def test_a_marked_token_is_read_and_no_label(tmp_path: Path) -> None:
    del tmp_path
    config = ModelConfig(
        vocab_size=10, hidden_size=4, num_layers=1, num_heads=1, intermediate_size=4
    )
    row = with_marks(np.array([1, 2, 3, 4], np.uint32), np.array([False, False, True, True]))
    assert ids_of(row).tolist() == [1, 2, 3, 4]
    assert is_masked(row).tolist() == [True, True, False, False]
    tokens = Tokens.from_rows(row[None].astype(np.int64), config, Device.from_name("cpu"))
    assert tokens.ids.tolist() == [[1, 2, 3]]
    assert tokens.labels.tolist() == [[IGNORED_LABEL, 3, 4]]
    assert tokens.valid_count == 2
    plain = Tokens.from_rows(np.array([[1, -100, 3]]), config, Device.from_name("cpu"))
    assert torch.equal(plain.labels, torch.tensor([[-100, 3]]))


def test_marks_are_refused_where_no_manifest_tells_of_them(tmp_path: Path, tokenizer: Path) -> None:
    write(tmp_path / "train.jsonl", [chat("a", "b")])
    write(tmp_path / "val.jsonl", [chat("x", "zz")])
    made = prepare(options(tmp_path, tokenizer, "chat"))
    path = tmp_path / "out" / "manifest.json"
    assert json.loads(path.read_text())["format_version"] == MASKED_FORMAT_VERSION
    assert load_manifest(path) == made.manifest
    assert Manifest.from_json(made.manifest.to_json(), path=path) == made.manifest
    assert inspect(tmp_path / "out", verify=True).findings == ()
    path.unlink()
    with pytest.raises(InputError, match="vocabulary"):
        TokenRows.open(tmp_path / "out" / "train", SIZE).row(0)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"text": "x"}, 'field "messages"'),
        ({"messages": []}, "no list of messages"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 1 has no role and content"),
        ({"messages": [{"role": "user", "content": "q"}]}, "nothing to learn"),
        (chat("q", "a <|im_end|> b"), "control token"),
    ],
)
def test_records_that_cannot_be_learned_from_are_refused(
    record: dict[str, Any], words: str, tmp_path: Path, tokenizer: Path
) -> None:
    write(tmp_path / "train.jsonl", [chat("a", "b"), record])
    write(tmp_path / "val.jsonl", [chat("x", "zz")])
    with pytest.raises(InputError, match=words):
        prepare(options(tmp_path, tokenizer, "chat"))
    assert not (tmp_path / "out").exists()


def test_bad_lines_and_what_is_cut_are_counted(tmp_path: Path, tokenizer: Path) -> None:
    long = {"prompt": "p", "completion": "c" * 100}
    lost = {"prompt": "p" * 100, "completion": "c"}
    write(tmp_path / "train.jsonl", [{"prompt": 1}, long, lost, {"prompt": "a", "completion": "b"}])
    write(tmp_path / "val.jsonl", [{"prompt": "x", "completion": "y"}])
    made = prepare(options(tmp_path, tokenizer, "prompt-completion", skip_bad=True))
    assert made.manifest.train.rows == 2
    told = " ".join(made.warnings)
    assert "1 bad lines" in told
    assert "1 records of the train split were left out" in told
    assert "38 tokens of the train split were cut off" in told


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"form": "chats"}, "--format 'chats'"),
        ({"form": "text", "pack": True}, "--pack"),
        ({"form": "prompt-completion", "chat_template": Path("t")}, "--chat-template"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    how: dict[str, Any], words: str, tmp_path: Path, tokenizer: Path
) -> None:
    with pytest.raises(InputError, match=words):
        options(tmp_path, tokenizer, how.pop("form"), **how)
    with pytest.raises(InputError, match="--tokenizer"):
        PrepareOptions(
            text=(tmp_path / "a.jsonl",),
            out=tmp_path / "o",
            seq_len=8,
            vocab_size=300,
            rules=ReadRules(form="chat"),
        )


def test_few_records_need_their_own_validation(tmp_path: Path, tokenizer: Path) -> None:
    write(tmp_path / "train.jsonl", [chat("a", "b"), chat("c", "d")])
    with pytest.raises(InputError, match="--val-text"):
        prepare(options(tmp_path, tokenizer, "chat", val_text=()))
    write(tmp_path / "train.jsonl", [chat(f"a{n}", f"b{n}") for n in range(40)])
    made = prepare(options(tmp_path, tokenizer, "chat", val_text=(), val_fraction=0.2))
    assert made.manifest.val.rows > 0


def test_a_template_that_changes_what_was_said_is_refused(tmp_path: Path, tokenizer: Path) -> None:
    changing = tmp_path / "changing.jinja"
    changing.write_text("{{ messages | length }}" + TEMPLATE)
    encoder = ConversationEncoder(
        tokenizer.read_bytes(), "chat", 0, read_template(tokenizer, changing)
    )
    with pytest.raises(InputError, match="another text for the beginning"):
        encoder.encode(json.dumps(chat("a", "b")))
    with pytest.raises(InputError, match="cannot be read"):
        read_template(tokenizer, tmp_path / "none.jinja")
    (tokenizer.parent / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="--chat-template"):
        read_template(tokenizer, None)


def test_training_counts_the_learned_tokens_alone(tmp_path: Path, tokenizer: Path) -> None:
    write(tmp_path / "train.jsonl", [chat(f"ask {n}", f"answer {n}") for n in range(16)])
    write(tmp_path / "val.jsonl", [chat("x", "zz")])
    prepare(options(tmp_path, tokenizer, "chat"))
    size = ("--hidden-size", "16", "--num-layers", "1", "--num-heads", "2")
    flags = [
        *("--store", str(tmp_path / "run"), "--data-dir", str(tmp_path / "out" / "train")),
        *("--vocab-size", str(SIZE), *size, "--intermediate-size", "16", "--device", "cpu"),
        *("--val-data-dir", str(tmp_path / "out" / "val"), "--validate-every", "1"),
        *("--threads", "1", "--micro-batch-size", "4", "--max-steps", "1"),
    ]
    assert train_here(flags) == 0
    [line] = step_lines(tmp_path / "run")
    # "zz", the token that ends the turn, and the line end.
    assert line["validation_tokens"] == 4


def test_a_run_on_packed_records_resumes_and_differs_from_one_that_attends_across(
    tmp_path: Path, tokenizer: Path
) -> None:
    write(tmp_path / "train.jsonl", [chat(f"ask {n}", f"answer {n}") for n in range(32)])
    write(tmp_path / "val.jsonl", [chat("x", "zz")])
    size = ("--hidden-size", "16", "--num-layers", "1", "--num-heads", "2")
    found = {}
    for name, across, stops in (
        ("whole", False, (3,)),
        ("cut", False, (2, 3)),
        ("mixed", True, (3,)),
    ):
        out = tmp_path / f"rows-{across}"
        how = {"pack": True, "attend_across": across, "overwrite": True, "seq_len": 255}
        prepare(replace(options(tmp_path, tokenizer, "chat", **how), out=out))
        flags = [
            *("--store", str(tmp_path / name), "--data-dir", str(out / "train")),
            *("--vocab-size", str(SIZE), *size, "--intermediate-size", "16", "--device", "cpu"),
            *("--threads", "1", "--micro-batch-size", "2"),
        ]
        for stop in stops:
            assert train_here([*flags, "--max-steps", str(stop)]) == 0
        found[name] = step_records(tmp_path / name)[3]
    assert found["whole"] == found["cut"]
    assert found["whole"].loss != found["mixed"].loss
