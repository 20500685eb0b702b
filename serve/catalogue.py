"""Which commit a model id means, and the pins that keep it.

Owns the stores served, the model ids and the leases of the HTTP side. Knows nothing of requests. A
model id is `primary` or `backup`, the name of a store's folder, a REF of a store (branch, snapshot,
`step-N`, commit), or `STORE@REF` with any of these names for the store. Invariants: an id is only
ever compared with names in a store, so none can name a path; what `acquire` gave stays leased until
it is released; with `follow` a role means its branch's newest commit, else the commit it had when
the server began.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve.chat_template import ChatFormat, template_of
from serve.errors import ApiError, model_not_found
from serve.package_files import json_of
from serve.pinned import ModelStore, PinnedModel
from serve.vocabulary import Vocabulary
from shardb.errors import ConflictError, NotFoundError, UsageError
from shardb.records import Commit
from trainer.errors import InputError
from trainer.model.stored import SOURCE_SHARD, TOKENIZER_FILES_SHARD

ID_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-@/]{0,254}\Z")
# Commits pinned by name lately stay open, so that a client's next request finds them ready.
KEPT_PINS = 2
KEPT_VOCABULARIES = 4
FOLLOW_ATTEMPTS = 20
ROLES = ("primary", "backup")
_SMALL_TENSOR = "json"


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreSource:
    """A store to serve, the role it has, and which of its commits the role means."""

    role: str
    path: str
    ref: str | None = None
    allow_network: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """What turns a model's text into tokens: its vocabulary, its chat format, its ends."""

    vocabulary: Vocabulary
    chat: ChatFormat
    stop_ids: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """An acquired model: leased until `release`."""

    id: str
    store: str
    pinned: PinnedModel
    words: Words

    @property
    def fingerprint(self) -> str:
        """Give what `system_fingerprint` says: the commit's id."""
        return self.pinned.commit.id

    @property
    def window(self) -> int:
        """Give the most tokens that prompt and answer have together."""
        return self.pinned.config.max_position_embeddings

    def release(self) -> None:
        """Give the lease back."""
        self.pinned.release()


class ServedStore:
    """One store and the pins held on it."""

    def __init__(self, source: StoreSource, *, follow: bool) -> None:
        self.role = source.role
        self.ref = source.ref
        self.follow = follow
        self.models = ModelStore(source.path, allow_network=source.allow_network)
        self.name = os.path.basename(self.models.root) or self.role
        self._lock = threading.Lock()
        self._moving = threading.Lock()
        self._kept: OrderedDict[str, PinnedModel] = OrderedDict()
        self._current = self.models.pin(source.ref)

    def current(self) -> PinnedModel:
        """Retain what the role means now."""
        if self.follow:
            self._move_on()
        with self._lock:
            return self._current.retain()

    def named(self, ref: str) -> PinnedModel:
        """Retain the commit that a REF means now."""
        for _ in range(FOLLOW_ATTEMPTS):
            commit = self.models.resolve(ref)
            with self._lock:
                known = self._current if self._current.commit.id == commit.id else None
                known = known or self._kept.get(commit.id)
                if known is not None:
                    return known.retain()
            try:
                return self._keep(self.models.pin(commit.id))
            except NotFoundError:
                continue  # the trainer retired it between the two looks
        raise ConflictError(f"{ref}: every commit it meant was retired at once")

    def _keep(self, pinned: PinnedModel) -> PinnedModel:
        with self._lock:
            earlier = self._kept.pop(pinned.commit.id, None)
            self._kept[pinned.commit.id] = pinned.retain()
            dropped = [earlier] if earlier is not None else []
            while len(self._kept) > KEPT_PINS:
                dropped.append(self._kept.popitem(last=False)[1])
        for old in dropped:
            old.release()
        return pinned

    def _move_on(self) -> None:
        """Pin the branch's newest commit where it is another one."""
        with self._moving:  # else two threads could swap a newer commit for an older one
            if self.models.resolve(self.ref).id == self._current.commit.id:
                return
            newest = self.models.pin(self.ref)
            with self._lock:
                earlier, self._current = self._current, newest
        earlier.release()

    def forget_idle(self) -> None:
        """Let go of commits that were named lately, and of a head that is no longer one."""
        if self.follow:
            self._move_on()
        with self._lock:
            dropped = list(self._kept.values())
            self._kept.clear()
        for pinned in dropped:
            pinned.release()

    def close(self) -> None:
        """Give up every pin and close the store."""
        self.follow = False
        self.forget_idle()
        self._current.release()
        self.models.close()


class Catalogue:
    """Every store served."""

    def __init__(
        self,
        sources: Sequence[StoreSource],
        *,
        follow: bool,
        chat: ChatFormat,
        template: ChatFormat | None = None,
        tokenizer_files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Open the stores; `template` goes before the models' own, `chat` is for those without.

        `tokenizer_files` take the place of what the stores hold.
        """
        self._chat = chat
        self._template = template
        self._files = tokenizer_files
        self._lock = threading.Lock()
        self._words: OrderedDict[str, Words] = OrderedDict()
        self.stores: list[ServedStore] = []
        try:
            for source in sources:
                self.stores.append(ServedStore(source, follow=follow))
        except BaseException:
            self.close()
            raise

    def acquire(self, model: str) -> Model:
        """Pin what a model id means; release what it gives.

        Raises:
            ApiError: 404 where nothing has this name.
            ShardbError: the commit's own description cannot be read.
        """
        if not ID_PATTERN.match(model):
            raise model_not_found(model[:80])
        store, pinned = self._find(model)
        try:
            return Model(id=model, store=store.name, pinned=pinned, words=self._words_of(pinned))
        except InputError as error:
            pinned.release()
            raise ApiError(500, error.message, code="tokenizer_unreadable") from error
        except BaseException:
            pinned.release()
            raise

    def _find(self, model: str) -> tuple[ServedStore, PinnedModel]:
        name, at, ref = model.partition("@")
        if at:
            store = self.store(name)
            if store is None:
                served = ", ".join(sorted({s.name for s in self.stores}))
                raise model_not_found(model, f"the stores served are {served}")
            return store, _named(store, ref, model)
        store = self.store(model)
        if store is not None:
            return store, store.current()
        failures = []
        for candidate in self.stores:
            try:
                return candidate, _named(candidate, model, model)
            except ApiError as error:
                failures.append(error)
        raise failures[0]

    def store(self, name: str) -> ServedStore | None:
        """Give a store by its role or its folder's name; None when none is called so."""
        by_role = {store.role: store for store in self.stores}
        by_name = {store.name: store for store in reversed(self.stores)}
        return by_role.get(name) or by_name.get(name)

    def _words_of(self, pinned: PinnedModel) -> Words:
        key = _words_key(pinned)
        with self._lock:
            known = self._words.get(key)
            if known is not None:
                self._words.move_to_end(key)
                return known
            words = self._read_words(pinned)
            self._words[key] = words
            while len(self._words) > KEPT_VOCABULARIES:
                self._words.popitem(last=False)
            return words

    def _read_words(self, pinned: PinnedModel) -> Words:
        files = self._files
        if files is None:
            files = _stored_files(pinned)
        if "tokenizer.json" not in files:
            raise ApiError(
                400,
                "this model has no tokenizer: start the server with --tokenizer DIR",
                code="tokenizer_missing",
                param="model",
            )
        is_trained_here = SOURCE_SHARD not in pinned.commit.shards
        begin_id = pinned.config.bos_token_id if is_trained_here else None
        try:
            vocabulary = Vocabulary(files["tokenizer.json"], begin_id=begin_id)
        except Exception as error:  # the library raises plain Exception
            raise InputError(f"tokenizer.json cannot be read: {error}") from error
        chat = self._template or template_of(files) or self._chat
        return Words(vocabulary=vocabulary, chat=chat, stop_ids=_stop_ids(pinned, files))

    def refs(self) -> list[tuple[ServedStore, str, Commit]]:
        """Give every name that a branch or snapshot has, with its commit."""
        found = []
        for store in self.stores:
            for names in (store.models.store.branches(), store.models.store.snapshots()):
                found += [(store, name, commit) for name, commit in names.items()]
        return found

    def forget_idle(self) -> None:
        """Let go of leases that no request needs any more."""
        for store in self.stores:
            store.forget_idle()

    def close(self) -> None:
        """Give up every lease."""
        for store in self.stores:
            store.close()
        self.stores.clear()


def _named(store: ServedStore, ref: str, model: str) -> PinnedModel:
    try:
        return store.named(ref)
    except NotFoundError as error:
        raise model_not_found(model) from error
    except UsageError as error:
        raise ApiError(400, error.message, code="ambiguous_model", param="model") from error


def _words_key(pinned: PinnedModel) -> str:
    """Give what tells the words of two commits apart: nothing of it is read."""
    shards = pinned.commit.shards
    names = ("meta/tokenizer", "meta/model", SOURCE_SHARD, TOKENIZER_FILES_SHARD)
    return "/".join(shards[name].digest if name in shards else "" for name in names)


def _stored_files(pinned: PinnedModel) -> dict[str, bytes]:
    files = {}
    if TOKENIZER_FILES_SHARD in pinned.commit.shards:
        shard = pinned.read(TOKENIZER_FILES_SHARD)
        files = {name: shard.array(name).tobytes() for name in shard.specs}
    if pinned.tokenizer_bytes is not None:
        files["tokenizer.json"] = pinned.tokenizer_bytes
    return files


def _stop_ids(pinned: PinnedModel, files: Mapping[str, bytes]) -> frozenset[int]:
    """Give every id that ends an answer besides the model's own end token.

    A chat model ends its turns with a token that is not the end of a text; its package says so in
    `generation_config.json`.
    """
    config: Any = {}
    if SOURCE_SHARD in pinned.commit.shards:
        data = pinned.read(SOURCE_SHARD).array(_SMALL_TENSOR).tobytes()
        config = json.loads(data).get("generation_config") or {}
    elif "generation_config.json" in files:
        config = json_of(files, "generation_config.json")
    ends = config.get("eos_token_id")
    ids = ends if isinstance(ends, list) else [ends]
    return frozenset(token for token in ids if type(token) is int and token >= 0)
