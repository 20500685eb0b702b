"""A model of transformers, built without memory, whose parts run as stages.

Owns every use of transformers by stages: reading a configuration, building the model on `meta`, and
asking its own code what each layer is handed. Knows nothing of stores or shards. Needs the extra
`hf`; InputError says so where it is missing.

Nothing of a family is written down here. The backbone runs with its layers replaced by ones that
note what they are handed, so masks, the kinds of rotary positions and the scale of embeddings are
whatever the family's own code makes of the configuration. The head runs below a backbone that gives
back what it was given, so soft caps are the family's own too.

Invariants: no parameter has memory here; each call gets its own from the caller, and may run twice
with the same bits. One call at a time: a lock guards the borrowed modules.
"""

from __future__ import annotations

import copy
import inspect
import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_iter, tree_map_only

from shardb.extras import install
from trainer.errors import InputError
from trainer.model.micro_batch import Documents

# Shapes of inputs for which masks and angles are kept.
HANDED_MAX = 4


def filled_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Give a configuration with every field that its family fills in."""
    return dict(read_config(config).to_dict())


def read_config(config: Mapping[str, Any]) -> Any:
    """Read a configuration as transformers does; InputError for what it refuses."""
    values = {key: value for key, value in config.items() if key != "model_type"}
    auto = _transformers().AutoConfig
    try:
        return auto.for_model(config["model_type"], **copy.deepcopy(values))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"transformers cannot read this {config['model_type']} configuration ({error}): mend"
            " config.json"
        ) from error


@lru_cache(maxsize=4)
def hf_model(hf_config: str) -> HfModel:
    """Give the model of a configuration as JSON; it is built once."""
    # Tables that are made while only inferring could not serve a backward pass later.
    with torch.inference_mode(False):
        return HfModel(json.loads(hf_config))


@dataclass(frozen=True, kw_only=True, slots=True)
class Handed:
    """What the backbone hands a layer beside the hidden states."""

    args: tuple[Any, ...]
    named: Mapping[str, Any]

    def on_meta(self) -> Handed:
        """Give the same without content."""
        args, named = tree_map_only(Tensor, _to_meta, (self.args, dict(self.named)))
        return Handed(args=args, named=named)


class HfModel:
    """The parts of one model: embeddings, layers, the final norm and the head."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = read_config(config)
        with torch.device("meta"):
            model = _transformers().AutoModelForCausalLM.from_config(self.config)
        model.eval().requires_grad_(False)
        # Gemma3's prefix is that of its model of pictures and text.
        place = "model" if hasattr(model, "model") else model.base_model_prefix
        self._backbone = backbone = getattr(model, place)
        if not hasattr(backbone, "layers") or not hasattr(backbone, "embed_tokens"):
            raise InputError(
                f"the layers of {self.config.model_type} models are not known here: the families"
                " that are can be read in docs/import.md"
            )
        self.layers: list[nn.Module] = list(backbone.layers)
        self.norm_name = "norm" if hasattr(backbone, "norm") else "final_layernorm"
        self.norm: nn.Module = getattr(backbone, self.norm_name)
        self.embeddings: nn.Module = backbone.embed_tokens
        self.head: nn.Module = model.lm_head
        _fill_tables(backbone)
        # Version 5.24 gave the argument another name.
        accepted = inspect.signature(backbone.forward).parameters
        self._past_keyword = "cache" if "cache" in accepted else "past_key_values"
        self._notes = [_NotingLayer() for _ in self.layers]
        for index, layer in enumerate(self.layers):
            # Some backbones ask a layer for its kind.
            self._notes[index].attention_type = getattr(layer, "attention_type", None)
        backbone.layers = nn.ModuleList(self._notes)
        setattr(backbone, self.norm_name, nn.Identity())
        setattr(model, place, _Echo())
        self._model = model
        self._lock = threading.Lock()
        self._handed: OrderedDict[Any, list[Handed]] = OrderedDict()
        self._forms: dict[Any, tuple[list[Handed], int]] = {}
        self._apart: WeakKeyDictionary[Documents, list[Handed]] = WeakKeyDictionary()

    def embed(self, weights: Mapping[str, Tensor], ids_BT: Tensor) -> Tensor:
        """Give what the first layer is handed for token ids: [B, T, D]."""
        if ids_BT.is_meta:
            # Masks are made from values, which are not there; memory is that of the look-up.
            found: Tensor = functional_call(self.embeddings, dict(weights), (ids_BT,))
            return found
        named = {f"embed_tokens.{name}": tensor for name, tensor in weights.items()}
        with self._lock, self._tables_on(ids_BT.device):
            functional_call(self._backbone, named, kwargs={"input_ids": ids_BT, **_PLAIN})
            handed = [note.take()[0] for note in self._notes]  # no note outlives the call
        return handed[0]

    def run_layer(
        self,
        index: int,
        weights: Mapping[str, Tensor],
        x_BTD: Tensor,
        documents: Documents | None = None,
    ) -> Tensor:
        """Compute one layer: [B, T, D] to [B, T, D]."""
        with self._lock:
            return self._called(index, weights, x_BTD, self._handed_to(x_BTD, documents)[index])

    def keeps_apart(self) -> bool:
        """Say whether every layer is handed a mask between records of one row.

        The backbone's own code makes it, from positions that begin again.
        """
        found = Documents(positions_BT=torch.arange(4)[None] % 2)
        stand_in = torch.zeros(1, 4, self.config.hidden_size)
        with self._lock:
            handed = self._asked(stand_in, found.positions_BT)
        return all(_parts(each) for each in handed)

    def new_past(self) -> Any:
        """Give transformers' own cache of keys and values for this configuration, empty."""
        return _transformers().cache_utils.DynamicCache(config=self.config)

    def embed_after(
        self, weights: Mapping[str, Tensor], ids_BT: Tensor, past: Any
    ) -> tuple[Tensor, list[Handed]]:
        """Give what the first layer is handed for ids that follow `past`, and each layer beside."""
        named = {f"embed_tokens.{name}": tensor for name, tensor in weights.items()}
        asked = {"input_ids": ids_BT, "use_cache": True, self._past_keyword: past}
        with self._lock, self._tables_on(ids_BT.device):
            functional_call(self._backbone, named, kwargs=asked)
            noted = [note.take() for note in self._notes]
        return noted[0][0], [Handed(args=args, named=named) for _, args, named in noted]

    def run_layer_after(
        self, index: int, weights: Mapping[str, Tensor], x_BTD: Tensor, handed: Handed
    ) -> Tensor:
        """Compute one layer with what `embed_after` gave for it, the past among it."""
        with self._lock:
            return self._called(index, weights, x_BTD, handed)

    def run_norm(self, weights: Mapping[str, Tensor], x_BTD: Tensor) -> Tensor:
        """Compute the norm after the last layer."""
        with self._lock:
            result: Tensor = functional_call(self.norm, dict(weights), (x_BTD,))
        return result

    def run_head(self, weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Score every vocabulary entry: [..., D] to [..., V]."""
        named = {f"lm_head.{name}": tensor for name, tensor in weights.items()}
        x_BTD = x if x.dim() == 3 else x[None]
        with self._lock:
            output = functional_call(
                self._model, named, kwargs={"inputs_embeds": x_BTD, "use_cache": False}
            )
        logits: Tensor = output.logits
        return logits if x.dim() == 3 else logits[0]

    def _called(
        self, index: int, weights: Mapping[str, Tensor], x_BTD: Tensor, handed: Handed
    ) -> Tensor:
        output = functional_call(
            self.layers[index], dict(weights), (x_BTD, *handed.args), dict(handed.named)
        )
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    def _handed_to(self, x_BTD: Tensor, documents: Documents | None) -> list[Handed]:
        """Ask the backbone what it hands each layer for an input of this form."""
        if documents is not None:
            return self._handed_within(x_BTD, documents)
        if x_BTD.is_meta:
            return self._without_content(x_BTD)[0]
        key = (tuple(x_BTD.shape), x_BTD.dtype, x_BTD.device)
        found = self._handed.get(key)
        if found is None:
            found = self._handed[key] = self._asked(x_BTD)
            if len(self._handed) > HANDED_MAX:
                self._handed.popitem(last=False)
        return found

    def handed_bytes(self, x_BTD: Tensor) -> int:
        """Give what is kept of what layers are handed for an input of this form, on `meta`."""
        with self._lock:
            return self._without_content(x_BTD)[1]

    def _without_content(self, x_BTD: Tensor) -> tuple[list[Handed], int]:
        """Give what is handed to layers on `meta`, and the bytes that it has elsewhere."""
        key = (tuple(x_BTD.shape), x_BTD.dtype)
        if key not in self._forms:
            asked = self._asked(x_BTD)
            self._forms[key] = [each.on_meta() for each in asked], _storage_bytes(asked)
        return self._forms[key]

    def _handed_within(self, x_BTD: Tensor, documents: Documents) -> list[Handed]:
        """Ask once a micro-batch; what was handed lives as long as its record does."""
        found = self._apart.get(documents)
        if found is None:
            found = self._asked(x_BTD, documents.positions_BT)
            if x_BTD.is_meta:
                found = [each.on_meta() for each in found]
            self._apart[documents] = found
        return found

    def _asked(self, x_BTD: Tensor, positions_BT: Tensor | None = None) -> list[Handed]:
        """Pass a stand-in through the backbone: what it hands on depends on the form alone.

        And on where records begin, which it tells by their positions. For an input on `meta` it is
        asked on the host.
        """
        device = torch.device("cpu") if x_BTD.is_meta else x_BTD.device
        within = {} if positions_BT is None else {"position_ids": positions_BT.to(device)}
        stand_in = torch.zeros((), dtype=x_BTD.dtype, device=device).expand(x_BTD.shape)
        with torch.no_grad(), self._tables_on(device):
            self._backbone(inputs_embeds=stand_in, **within, **_PLAIN)
        noted = [note.take() for note in self._notes]
        return [Handed(args=args, named=named) for _, args, named in noted]

    @contextmanager
    def _tables_on(self, device: torch.device) -> Iterator[None]:
        """Give the backbone fresh tables on a device: some kinds change theirs while they run."""
        kept = {name: buffer.clone() for name, buffer in self._backbone.named_buffers()}
        attributes = _rotary_states(self._backbone)
        _put_tables(self._backbone, {name: buffer.to(device) for name, buffer in kept.items()})
        try:
            yield
        finally:
            _put_tables(self._backbone, kept)
            for module, state in attributes:
                module.__dict__.update(state)


_PLAIN = {"use_cache": False}


def _parts(handed: Handed) -> bool:
    """Say whether a layer's mask hides the first of two records of 2 tokens from the second."""
    masks = [
        each
        for each in (*handed.args, *handed.named.values())
        if isinstance(each, Tensor) and each.dim() == 4 and each.shape[-2:] == (4, 4)
    ]
    seen = [mask if mask.dtype == torch.bool else mask == 0 for mask in masks]
    return bool(seen) and not any(bool(each[..., 2:, :2].any()) for each in seen)


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def _storage_bytes(handed: Sequence[Handed]) -> int:
    """Give the bytes of all tensors, each storage once: layers of a kind share theirs."""
    sizes = {}
    for tensor in tree_iter([(each.args, dict(each.named)) for each in handed]):
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


class _NotingLayer(nn.Module):
    """Stands in a backbone for a layer, and notes what it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_type: Any = None
        self._noted: tuple[Tensor, tuple[Any, ...], dict[str, Any]] | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **named: Any) -> Tensor:
        self._noted = (hidden_states, args, named)
        return hidden_states

    def take(self) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
        """Give what was noted, and hold it no longer."""
        assert self._noted is not None, "the backbone passes every layer"
        noted, self._noted = self._noted, None
        return noted


class _Echo(nn.Module):
    """Stands in a model for its backbone, and gives back what it was given."""

    def forward(self, *_args: Any, inputs_embeds: Tensor, **_named: Any) -> Any:
        output = _transformers().modeling_outputs.BaseModelOutputWithPast
        return output(last_hidden_state=inputs_embeds)


def _fill_tables(backbone: nn.Module) -> None:
    """Give content to what is no parameter: angles and scales, which follow from the config."""
    for name, module in list(backbone.named_modules()):
        tables = dict(module.named_buffers(recurse=False))
        if not tables or name.startswith("layers."):
            continue
        if "embed_scale" in tables:
            scale = getattr(module, "scalar_embed_scale", None)
            width = module.embedding_dim
            assert isinstance(width, int)
            module.embed_scale = torch.tensor(width**0.5 if scale is None else scale)
        elif hasattr(module, "config"):
            made = type(module)(config=module.config)
            # Version 4 keeps the first angles of a kind that changes as a plain attribute.
            plain = {k: v for k, v in vars(made).items() if isinstance(v, Tensor)}
            for table, content in [*made.named_buffers(), *plain.items()]:
                setattr(module, table, content)
    empty = [name for name, buffer in backbone.named_buffers() if buffer.is_meta]
    if empty:
        raise InputError(
            f"this version of transformers keeps tables that are not known here ({empty[0]}): use"
            " another version, 5.0 or later"
        )


def _put_tables(backbone: nn.Module, tables: Mapping[str, Tensor]) -> None:
    for name, buffer in tables.items():
        path, _, last = name.rpartition(".")
        setattr(backbone.get_submodule(path), last, buffer)


def _rotary_states(backbone: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """Give the plain attributes of modules with tables, to be put back."""
    return [
        (
            module,
            {k: v for k, v in vars(module).items() if isinstance(v, int | float | bool | str)},
        )
        for module in backbone.modules()
        if dict(module.named_buffers(recurse=False))
    ]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            "this model's blocks are computed by the layers of transformers, which is not"
            f" installed: {install('hf')}"
        ) from error
    return transformers
