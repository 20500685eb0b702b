"""A `tokenizer.json` as llama.cpp needs it: tokens, their kinds, merges or scores, cutting.

Owns the recognition of the two kinds of tokenizer that decoders have, and of how texts are cut into
words. Knows nothing of weights. A tokenizer whose ids llama.cpp would not give is refused.

byte-level BPE: every token is written in the 256 letters that stand for bytes; llama.cpp knows the
way of cutting by a name (`tokenizer.ggml.pre`). SentencePiece-style BPE: words are not cut, spaces
are `▁`, what has no token is spelt in bytes; llama.cpp merges the pair of the highest score first,
so a token's score is the negative rank of the merge that makes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from export.package_tokenizer import QWEN2_PATTERN, SETTINGS_FILE, PackageTokenizer
from trainer.errors import InputError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
BYTE_LEVEL, SENTENCE_PIECE = "gpt2", "llama"
LLAMA3_PATTERN = json.dumps(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS: Mapping[str, str] = MappingProxyType({QWEN2_PATTERN: "qwen2", LLAMA3_PATTERN: "llama-bpe"})
# A token that no merge makes is never merged into; its score only has to be low.
UNMERGED_SCORE = -1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTokenizer:
    """What the file says of the tokenizer; `merges` are for byte-level, `scores` for the other."""

    model: str
    pre: str
    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str]
    scores: Sequence[float]
    adds_bos: bool
    adds_eos: bool
    adds_space: bool
    unknown: int | None
    chat_template: str | None


def gguf_tokenizer(
    tokenizer: PackageTokenizer, vocab_size: int, pre: str | None = None
) -> GgufTokenizer:
    """Translate a tokenizer; `pre` names the way of cutting where it is not recognised.

    Ids of the model without a token are filled up with unused ones.
    """
    document = json.loads(tokenizer.json_bytes)
    model = document["model"]
    if model.get("type", "BPE") != "BPE":
        raise InputError(
            f"the tokenizer is a {model['type']}: llama.cpp's kinds that can be written are BPE,"
            " byte-level or with byte fallback"
        )
    is_pieces = bool(model.get("byte_fallback"))
    tokens, types = _tokens(document, tokenizer.size, is_pieces=is_pieces)
    missing = range(len(tokens), vocab_size)
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    scores = _scores([*tokens], merges) if is_pieces else []
    single = (document.get("post_processor") or {}).get("single") or []
    unknown = model["vocab"].get(model.get("unk_token"))
    return GgufTokenizer(
        model=SENTENCE_PIECE if is_pieces else BYTE_LEVEL,
        pre=pre or ("default" if is_pieces else _cutting(document)),
        tokens=[*tokens, *(f"[PAD{index}]" for index in missing)],
        types=[*types, *(UNUSED for _ in missing)],
        merges=[] if is_pieces else merges,
        scores=[*scores, *(UNMERGED_SCORE for _ in missing)] if is_pieces else [],
        adds_bos=bool(single) and "SpecialToken" in single[0],
        adds_eos=bool(single) and "SpecialToken" in single[-1] and len(single) > 1,
        adds_space=is_pieces and _adds_space(document),
        unknown=unknown,
        chat_template=_template(tokenizer),
    )


def _tokens(
    document: Mapping[str, Any], size: int, *, is_pieces: bool
) -> tuple[list[str], list[int]]:
    tokens = [f"[PAD{index}]" for index in range(size)]
    types = [UNUSED] * size
    for token, index in document["model"]["vocab"].items():
        tokens[index] = token
        is_byte = is_pieces and len(token) == 6 and token.startswith("<0x") and token[5] == ">"
        types[index] = BYTE if is_byte else NORMAL
    for added in document.get("added_tokens") or []:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    unknown = document["model"].get("unk_token")
    if unknown in document["model"]["vocab"]:
        types[document["model"]["vocab"][unknown]] = UNKNOWN
    return tokens, types


def _scores(tokens: Sequence[str], merges: Sequence[str]) -> list[float]:
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", "", 1), rank)
    return [-float(ranks[token]) if token in ranks else UNMERGED_SCORE for token in tokens]


def _cutting(document: Mapping[str, Any]) -> str:
    """Name the way of cutting texts as llama.cpp does; InputError where it has none like it."""
    cutter = document.get("pre_tokenizer") or {}
    parts = cutter["pretokenizers"] if cutter.get("type") == "Sequence" else [cutter]
    last = parts[-1]
    normalizer = document.get("normalizer")
    is_byte_level = last.get("type") == "ByteLevel" and not last.get("add_prefix_space")
    if is_byte_level and normalizer in (None, {"type": "NFC"}):
        cuts = last.get("use_regex", True)
        if len(parts) == 1 and cuts and normalizer is None:
            return "gpt-2"
        first = {key: value for key, value in parts[0].items() if key != "type"}
        kind = parts[0].get("type")
        if (len(parts), kind, cuts) == (2, "Digits", True) and first.get("individual_digits"):
            return "smollm"
        if (len(parts), kind, cuts) == (2, "Split", False):
            pattern = json.dumps(first.get("pattern", {}).get("Regex"))
            if pattern in _SPLITS:
                return _SPLITS[pattern]
    raise InputError(
        "the tokenizer cuts texts in a way that is not recognised (pre_tokenizer"
        f" {json.dumps(cutter)[:200]}, normalizer {json.dumps(normalizer)[:80]}): name llama.cpp's"
        " equal with --pre"
    )


def _adds_space(document: Mapping[str, Any]) -> bool:
    text = json.dumps([document.get("normalizer"), document.get("pre_tokenizer")])
    return '"Prepend"' in text or ('"Metaspace"' in text and '"never"' not in text)


def _template(tokenizer: PackageTokenizer) -> str | None:
    settings = json.loads(tokenizer.files.get(SETTINGS_FILE, b"{}"))
    template = settings.get("chat_template")
    return template if isinstance(template, str) else None
