"""Does a package hold exactly the tensors that its configuration asks for?

Owns the comparison of names, shapes and forms, and the decision about a tied head. Knows nothing of
stores. Invariants: nothing is trained that was not read; nothing that was read is dropped unless
it equals what is kept; every fault is told with its nearest match, before a byte is written.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from export.families import Place
from export.import_files import StoredTensor
from shardb.listing import listed
from trainer.errors import InputError

HEAD, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
# Tables of angles that old versions stored; they follow from the configuration.
DERIVED = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")
PREFIXES = ("_orig_mod.", "module.", "base_model.model.", "model.language_model.")
FORMS = ("F32", "BF16", "F16")
NAMED_MAX = 5
CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """Which tensor goes where; `aliases` are names of values that are kept under another."""

    places: Mapping[str, Place]
    aliases: Mapping[str, str]
    notes: tuple[str, ...]


def match(places: Mapping[str, Place], stored: Mapping[str, StoredTensor], *, tied: bool) -> Match:
    """Pair what is wanted with what is there; InputError names what does not fit."""
    derived = [name for name in stored if DERIVED.fullmatch(name)]
    found = {name: tensor for name, tensor in stored.items() if name not in set(derived)}
    aliases: dict[str, str] = {}
    if tied and HEAD in found and EMBEDDINGS in found:
        _check_tied(found.pop(HEAD), found[EMBEDDINGS])
        aliases[HEAD] = EMBEDDINGS
    _check_names(places, found, tied=tied)
    _check_forms(places, found)
    notes = [f"{len(derived)} stored tables of angles are not needed"] if derived else []
    if not tied and _equal_heads(found):
        notes.append(
            f"{HEAD} equals {EMBEDDINGS}, but tie_word_embeddings is false: they are trained apart"
        )
    return Match(places=places, aliases=aliases, notes=tuple(notes))


def _equal_heads(found: Mapping[str, StoredTensor]) -> bool:
    return HEAD in found and EMBEDDINGS in found and equal_bytes(found[HEAD], found[EMBEDDINGS])


def _check_tied(head: StoredTensor, embeddings: StoredTensor) -> None:
    """A head that says it is tied must be: else a trained tensor would be dropped."""
    if not equal_bytes(head, embeddings):
        raise InputError(
            f"config.json: tie_word_embeddings is true (or left out, where true is the family's"
            f" default), but {HEAD} differs from {EMBEDDINGS}: a trained head would be lost: set"
            " it to false"
        )


def equal_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Compare two tensors' bytes, a piece at a time."""
    if one.spec != other.spec:
        return False
    with one.path.open("rb") as a, other.path.open("rb") as b:
        a.seek(one.offset)
        b.seek(other.offset)
        left = one.spec.bytes
        while left:
            size = min(left, CHUNK_BYTES)
            if a.read(size) != b.read(size):
                return False
            left -= size
    return True


def _check_names(
    places: Mapping[str, Place], found: Mapping[str, StoredTensor], *, tied: bool
) -> None:
    missing, extra = sorted(places.keys() - found.keys()), sorted(found.keys() - places.keys())
    if missing == [HEAD] and not extra:
        raise InputError(
            f"config.json: tie_word_embeddings is {str(tied).lower()}, but the package holds no"
            f" {HEAD}: it would be random: set tie_word_embeddings to true, or fetch the missing"
            " file"
        )
    if not missing and not extra:
        return
    prefix = _common_prefix(missing, extra)
    if prefix is not None:
        raise InputError(
            f"every tensor's name begins with {prefix!r} (such as {extra[0]!r}): the model was"
            f" saved from inside a wrapper: take the prefix away and save it again"
        )
    parts = []
    if missing:
        parts.append(f"{len(missing)} tensors are missing: {_named(missing, extra)}")
    if extra:
        parts.append(f"{len(extra)} are not of this model: {_named(extra, missing)}")
    raise InputError(
        f"{'; '.join(parts)}: config.json and weights are of different models, or tensors were"
        " renamed: fetch both again, or mend the names"
    )


def _common_prefix(missing: list[str], extra: list[str]) -> str | None:
    for prefix in PREFIXES:
        stripped = {name.replace(prefix, "", 1) for name in extra if prefix in name}
        if stripped and set(missing) <= stripped:
            return prefix
    return None


def _named(names: list[str], others: list[str]) -> str:
    """Name the first few, each with the most similar name on the other side."""
    told = list(names)
    for index, name in enumerate(names[:NAMED_MAX]):
        near = difflib.get_close_matches(name, others, n=1, cutoff=0.75)
        told[index] = f"{name} (nearest: {near[0]})" if near else name
    return listed(told, most=NAMED_MAX)


def _check_forms(places: Mapping[str, Place], found: Mapping[str, StoredTensor]) -> None:
    wrong = [
        f"{name} has {list(found[name].spec.shape)}, config.json asks for {list(place.shape)}"
        for name, place in places.items()
        if found[name].spec.shape != place.shape
    ]
    if wrong:
        raise InputError(
            f"{len(wrong)} tensors have another shape: {'; '.join(_few(wrong))}: see hidden_size,"
            " head_dim, num_key_value_heads and vocab_size in config.json"
        )
    forms = [
        f"{name} is {found[name].spec.dtype}"
        for name in places
        if found[name].spec.dtype not in FORMS
    ]
    if forms:
        raise InputError(
            f"{'; '.join(_few(forms))}: weights must be {', '.join(FORMS)}: fetch the package that"
            " is not quantised"
        )


def _few(lines: Iterable[str]) -> list[str]:
    first = list(lines)
    return first[:NAMED_MAX] + ([f"and {len(first) - NAMED_MAX} more"] * (len(first) > NAMED_MAX))
