"""`README.md` of a package: what the model is and what was measured, and nothing else.

Owns the wording. Knows nothing of how facts came about. Every number is one that the store, its log
or the check of the package gave; what nobody measured is not mentioned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from export.hf_weights import Rounding
from export.package_history import Measured
from export.verify import BY_STAGES, Check
from shardb import Commit
from trainer.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFacts:
    """Everything that a card tells."""

    name: str
    model: ModelConfig
    config: Mapping[str, Any]
    parameters: int
    dtype: str
    commits: tuple[Commit, ...]
    measured: Measured
    check: Check
    rounding: Rounding
    begins_with: str | None
    vocabulary: int | None
    notes: tuple[str, ...] = ()


def model_card(facts: CardFacts) -> str:
    """Give the card as Markdown with the metadata that model hubs read."""
    parts = [
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---",
        f"# {facts.name}",
        _opening(facts),
        "## Use",
        _use(facts),
        "## Training",
        _table(_training(facts)),
        "## Geometry",
        _table(_geometry(facts)),
        "## How this package was checked",
        _checked(facts),
    ]
    return "\n\n".join(parts) + "\n"


def check_text(check: Check) -> str:
    """Say in one sentence what the check of a package found."""
    named = "this project's own stages" if check.loader == BY_STAGES else check.loader
    by = " ".join(f"{name} {version}" for name, version in check.versions.items())
    found = (
        "bit-equal" if check.bit_equal else f"the largest difference is {check.difference_max:.3g}"
    )
    return (
        f"Loaded by {named} in a fresh offline process ({by}), logits at {check.dtype} over"
        f" {check.positions} positions against the store's own stages: {found}."
    )


def _opening(facts: CardFacts) -> str:
    family = facts.config["architectures"][0] if facts.config.get("architectures") else "decoder"
    steps = ", ".join(f"{commit.step:,}" for commit in facts.commits)
    what = (
        f"step {steps}" if len(facts.commits) == 1 else f"the mean of the weights of steps {steps}"
    )
    return (
        f"A `{family}` of {facts.parameters:,} parameters in {facts.dtype}, exported from {what}"
        " of a shardb store. `export_manifest.json` names the commit and the stored object behind"
        " every tensor."
    )


def _use(facts: CardFacts) -> str:
    code = (
        "```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n'
        'model = AutoModelForCausalLM.from_pretrained("FOLDER", dtype="auto")\n'
        "```"
    )
    if facts.vocabulary is None:
        code = code.replace(", AutoTokenizer", "").replace(
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n', ""
        )
        return code + "\n\nThe package has no tokenizer: the run was given token ids."
    if facts.begins_with is None:
        return code
    return (
        f"{code}\n\nA text begins with `{facts.begins_with}`; the tokenizer adds it only if its"
        " `tokenizer.json` says so."
    )


def _training(facts: CardFacts) -> Iterator[tuple[str, str]]:
    for commit in facts.commits:
        yield "commit", f"{commit.id} (step {commit.step:,}, branch {commit.branch})"
    measured = facts.measured
    if measured.tokens_seen is not None:
        yield "tokens trained on", f"{measured.tokens_seen:,}"
    for name, pair in (
        ("training loss, first step", measured.first_loss),
        ("training loss, last step", measured.last_loss),
        ("held-out loss", measured.validation),
    ):
        if pair is not None:
            yield name, f"{pair[1]:.4f} (step {pair[0]:,})"
    if len(facts.commits) > 1:
        yield "the mean itself", "its loss was not measured: the losses are those of the last one"
    for name, value in measured.recipe.items():
        yield name, f"{value}"


def _geometry(facts: CardFacts) -> Iterator[tuple[str, str]]:
    config = facts.config
    for name in (
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "intermediate_size", "max_position_embeddings"),
        *("rope_theta", "rope_scaling", "tie_word_embeddings"),
    ):
        if config.get(name) is not None:
            yield name, f"{config[name]}"


def _checked(facts: CardFacts) -> str:
    check, rounding = facts.check, facts.rounding
    lines = [check_text(check)]
    if check.dtype != "float32":
        lines.append(
            f"Against the store's logits in fp32 the largest difference is"
            f" {check.rounding_max:.3g}: that is what {check.dtype} costs."
        )
    if rounding.to_zero:
        lines.append(
            f"{rounding.to_zero:,} of {rounding.elements:,} weights are too small for"
            f" {facts.dtype} and became 0."
        )
    if check.not_checked:
        lines.append(f"Not checked: {check.not_checked}.")
    lines += [f"As imported: {each}." for each in check.disagreements]
    return "\n\n".join([*lines, *facts.notes])


def _table(rows: Iterator[tuple[str, str]]) -> str:
    body = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"| | |\n|---|---|\n{body}"
