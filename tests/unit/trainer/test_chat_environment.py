"""Does a chat template write what transformers writes with it, for training rows and prompts?"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.exports import byte_tokenizer
from trainer.data.chat_environment import FAULTS, ChatText, special_tokens_of, template_in
from trainer.data.chat_template import read_template
from trainer.errors import InputError

TOKENS = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind & <b>brief</b>."},
    {"role": "user", "content": 'Qué?\n  "Wie\'s" '},
    {
        "role": "assistant",
        "content": "猫",
        "tool_calls": [{"arguments": {"z": "é<", "a": [1, None]}}],
    },
    {"role": "user", "content": "stop"},
    {"role": "assistant", "content": "never written"},
]
EACH = "{%- for m in messages %}\n"
TEMPLATES = {
    "chatml": EACH
    + """
    {{- '<|im_start|>' + m['role'] + '\\n' + m['content'] | trim + '<|im_end|>' + '\\n' }}
    {%- endfor %}
    {%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "lines and blocks": "{% for m in messages %}\n"
    "  {% if loop.first %}\n{{ bos_token }}\n  {% endif %}\n"
    "{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}\n",
    "json": EACH + "{{ m | tojson }}{{ m | tojson(indent=2) }}"
    "{{ m | tojson(separators=(',', ':'), sort_keys=true) }}"
    "{{ m.content | tojson(ensure_ascii=true) }}{% endfor %}",
    "date": "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}never{% endif %}",
    "generation": EACH
    + "{% if m.role == 'assistant' %}{% generation %}{% set x = 'in' %}{{ m.content }}{{ x }}"
    "{% endgeneration %}{{ x }}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "loops": EACH
    + "{% if m.role == 'system' %}{% continue %}{% endif %}{% if m.content == 'stop' %}{% break %}"
    "{% endif %}{{ m.content }}{% endfor %}",
    "memory": "{% set ns = namespace(last='', seen=dict(a=1)) %}"
    + EACH
    + "{% set ns.last = m.role %}{% endfor %}{{ ns.last }}{{ ns.seen.a }}",
    "what is there": "{{ tools is none }}{{ documents is none }}{{ pad_token is defined }}"
    "{{ bos_token is defined }}{{ messages is mapping }}{{ add_generation_prompt }}",
    "macro": "{% macro turn(m) %}[{{ m.role }}{{ caller() if caller }}]{% endmacro %}"
    + EACH
    + "{{ turn(m) }}{% call turn(m) %}!{% endcall %}{% endfor %}",
}
REFUSED = {
    "asked for": "{{ raise_exception('no system') }}",
    "not there": "{{ pad_token + bos_token }}",
    "changes": "{{ messages.append(1) }}",
    "looks around": "{{ ''.__class__.__mro__ }}",
}


@pytest.fixture(scope="module")
def theirs() -> Any:
    transformers = pytest.importorskip("transformers", reason="pip install '.[test]'")
    plain = Tokenizer.from_str(byte_tokenizer(300).decode())
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **TOKENS)


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_is_it_the_text_of_transformers(name: str, asks: bool, theirs: Any) -> None:
    source = TEMPLATES[name]
    wanted = theirs.apply_chat_template(
        MESSAGES, chat_template=source, tokenize=False, add_generation_prompt=asks
    )
    written = ChatText(source, TOKENS, name=name).write(MESSAGES, add_generation_prompt=asks)
    assert written == wanted
    assert written


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_what_transformers_refuses(name: str, theirs: Any) -> None:
    with pytest.raises(FAULTS):
        theirs.apply_chat_template(MESSAGES, chat_template=REFUSED[name], tokenize=False)
    with pytest.raises(FAULTS):
        ChatText(REFUSED[name], TOKENS, name=name).write(MESSAGES, add_generation_prompt=False)


def test_is_the_time_that_of_whoever_asks() -> None:
    source, then = "{{ strftime_now('%d %b %Y') }}", datetime(2024, 7, 26)
    text = ChatText(source, {}, name="dated", now=lambda: then)
    assert text.write([], add_generation_prompt=False) == "26 Jul 2024"


def test_is_it_one_time_for_all_rows(tmp_path: Path) -> None:
    """Rows that were written at midnight must not begin otherwise than they go on."""
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%H:%M:%S.%f') }}")
    template = read_template(tmp_path / "tokenizer.json", None)
    assert template([], False) == template([], True) != ""


def test_is_a_broken_template_named_with_its_line() -> None:
    with pytest.raises(InputError, match=r"^mine: line 2: .*mend the template"):
        ChatText("one\n{% generation %}{{ 1 }}", {}, name="mine")


def test_what_a_configuration_gives() -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True}
    assert special_tokens_of(config) == {"bos_token": "<s>", "eos_token": "</s>"}
    listed = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    assert [template_in({"chat_template": each}) for each in ("old", listed, None, 3)] == [
        *("old", "yes"),
        *(None, None),
    ]
