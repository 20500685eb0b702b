"""Is a record that cannot be learned from named by file and line, or left out and counted?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.exports import byte_tokenizer
from trainer.data import chat_template
from trainer.data.chat_template import ChatTemplate, Message
from trainer.data.conversations import ConversationEncoder
from trainer.data.inspect import inspect
from trainer.data.options import PrepareOptions
from trainer.data.prepare import Prepared, prepare
from trainer.data.readers import ReadRules
from trainer.data_cli import run as train_data
from trainer.errors import InputError

CONTROL = "<|endoftext|>"
GOOD = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SILENT = GOOD.replace("{{ m.content }}", "{% if m.role == 'user' %}{{ m.content }}{% endif %}")
NEEDS_SYSTEM = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Give a folder with a tokenizer, a template and a validation file."""
    (tmp_path / "tokenizer.json").write_bytes(byte_tokenizer(300))
    (tmp_path / "good.jinja").write_text(GOOD)
    write(tmp_path / "val.jsonl", chat("x", "yes"))
    return tmp_path


def chat(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]}


def write(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def made(folder: Path, *, template: str = GOOD, val: bool = True, **how: Any) -> Prepared:
    (folder / "asked.jinja").write_text(template)
    options = PrepareOptions(
        text=(folder / "train.jsonl",),
        val_text=(folder / "val.jsonl",) if val else (),
        out=folder / "out",
        tokenizer=folder / "tokenizer.json",
        chat_template=folder / "asked.jinja",
        seq_len=63,
        rules=ReadRules(form="chat", **how),
    )
    return prepare(options)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (chat("Hi </s>".replace("</s>", CONTROL), "Hello"), "message 1 holds .*control token"),
        (chat("q", ""), "message 2, an assistant's, is empty"),
        (chat("q", "half \ud800"), "half a surrogate"),
    ],
)
def test_a_bad_record_is_named_by_line_and_is_skipped_when_asked(
    record: dict[str, Any], words: str, folder: Path
) -> None:
    write(folder / "train.jsonl", chat("a", "b"), record, chat("c", "d"))
    with pytest.raises(InputError, match=words) as refused:
        made(folder)
    assert f"{folder / 'train.jsonl'}: line 2: " in refused.value.message
    assert "mend the line, or use --skip-bad" in refused.value.message
    assert not (folder / "out").exists()
    found = made(folder, skip_bad=True)
    assert found.manifest.train.rows == found.manifest.train.documents == 2
    [source] = [source for source in found.manifest.sources if source.role == "text"]
    assert (source.documents, source.bad_lines) == (2, 1)
    assert "1 bad lines were left out" in found.warnings[0]
    assert inspect(folder / "out", verify=True).findings == ()


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (SILENT, "writes nothing of what message 2, an assistant's, says"),
        ("always the same", "writes nothing of what message 2"),
        (NEEDS_SYSTEM + GOOD, r"refuses this conversation \(no system\)"),
        ("{{ messages | length }}" + GOOD, "another text for the beginning"),
        ("{{ 1 + messages[0].content }}" + GOOD, "refuses this conversation .*unsupported"),
        ("{{ 1 // 0 }}" + GOOD, "refuses this conversation .*zero"),
    ],
)
def test_a_template_at_fault_is_named_with_the_line(
    template: str, words: str, folder: Path
) -> None:
    write(folder / "train.jsonl", chat("a", "why not"))
    with pytest.raises(InputError, match=words) as refused:
        made(folder, template=template)
    assert f"{folder / 'val.jsonl'}: line 1: " in refused.value.message
    assert str(folder / "asked.jinja") in refused.value.message
    assert "mend the line or the template" in refused.value.message
    with pytest.raises(InputError, match=f"--text: every line was left out.*{words}"):
        made(folder, template=template, skip_bad=True)


def test_a_template_that_is_no_template_is_named_with_its_line(folder: Path) -> None:
    write(folder / "train.jsonl", chat("a", "b"))
    with pytest.raises(InputError, match=r"asked.jinja: line 2: .*mend the template"):
        made(folder, template="first\n{{ oh } }}")


def test_records_are_looked_at_before_validation_is_asked_for(folder: Path) -> None:
    write(folder / "train.jsonl", chat("a", "b"), chat(CONTROL, "b"))
    with pytest.raises(InputError, match="line 2: message 1 holds"):
        made(folder, val=False)
    write(folder / "train.jsonl", chat("a", "b"), chat("c", "b"))
    with pytest.raises(InputError, match="give --val-text"):
        made(folder, val=False)


def test_a_template_may_trim_what_is_said_and_leave_thoughts_out(folder: Path) -> None:
    trimming = GOOD.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] | trim }}")
    write(folder / "train.jsonl", chat("a", "<think>so</think>  the answer  "))
    made(folder, template=trimming)
    tokenizer = Tokenizer.from_file(str(folder / "out" / "tokenizer.json"))
    [sample] = inspect(folder / "out" / "train").splits[0].samples
    text = tokenizer.decode([token % (1 << 30) for token in sample.ids])
    assert "assistant: the answer\n" in text
    assert "think" not in text


def test_a_conversation_is_written_out_once_a_pass(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    class Counted(ChatTemplate):
        def __call__(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
            written.append(len(messages))
            return ChatTemplate.__call__(self, messages, add_generation_prompt)

    monkeypatch.setattr(chat_template, "ChatTemplate", Counted)
    write(folder / "train.jsonl", chat("a", "b"), chat("c", "d"))
    made(folder)
    records, passes = 3, 2
    assert sorted(written) == sorted([2, 1, 2] * records * passes)


def test_only_chats_have_faults_of_an_encoder(folder: Path) -> None:
    body = {"prompt": CONTROL, "completion": "x"}
    encoder = ConversationEncoder(
        (folder / "tokenizer.json").read_bytes(), "prompt-completion", 0, None
    )
    assert encoder.fault(body) is None
    assert encoder.encode(json.dumps(body)).counts.any()


def test_what_comes_next_is_said_for_records_and_for_text(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "train.jsonl", chat("a", "b"))
    (folder / "train.txt").write_text("once upon a time. " * 300)
    common = ["--tokenizer", str(folder / "tokenizer.json"), "--seq-len", "32"]
    records = ["--format", "chat", "--chat-template", str(folder / "good.jinja")]
    records += ["--val-text", str(folder / "val.jsonl"), "--text", str(folder / "train.jsonl")]
    said = []
    for number, asked in enumerate((records, ["--text", str(folder / "train.txt")])):
        assert train_data(["prepare", *asked, *common, "--out", str(folder / str(number))]) == 0
        said.append(capsys.readouterr().out.splitlines()[-1])
    assert said[0].startswith("next: import-hf MODEL --store run, then train --store run --lora")
    assert said[1].startswith("next: train --store run --preset demo --vocab-size 300 --data-dir")
