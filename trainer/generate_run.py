"""A commit as a source of text: its tokenizer, the prompt in tokens, the logits of the next one.

Owns the way from a read view to what `generate` needs. Knows nothing of sampling or output.
Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from shardb import ReadView
from trainer.errors import InputError
from trainer.generate import Sampling, generate_ids, stream_text
from trainer.lora.reading import reading_engine
from trainer.model.config import ModelConfig
from trainer.model.stored import TOKENIZER_SHARD, read_bytes, read_model


def generated_text(
    view: ReadView,
    prompt: str,
    *,
    sampling: Sampling,
    max_new_tokens: int,
    seed: int,
    tokenizer_file: str | None,
    device: str,
) -> Iterator[str]:
    """Yield the text after `prompt` piece by piece, computed from the shards of one commit."""
    model = read_model(view)
    tokenizer = _open_tokenizer(view, tokenizer_file)
    engine = reading_engine(view, device)

    def next_logits(ids: Sequence[int]) -> Tensor:
        batch = torch.tensor([ids[-model.max_position_embeddings :]], dtype=torch.int64)
        logits_V = engine.logits(view, batch, last_only=True)[0, -1].float().cpu()
        # Entries that the tokenizer has no word for were never trained.
        logits_V[tokenizer.get_vocab_size() :] = -torch.inf
        return logits_V

    prompt_ids = _prompt_ids(tokenizer, prompt, model)
    ids = generate_ids(
        next_logits,
        prompt_ids,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        seed=seed,
        end_id=model.eos_token_id,
    )
    return stream_text(ids, tokenizer.decode, prompt=prompt_ids)


def _open_tokenizer(view: ReadView, path: str | None) -> Tokenizer:
    if path is not None:
        if not Path(path).is_file():
            raise InputError(f"--tokenizer {path}: no such file: give a tokenizer.json")
        return Tokenizer.from_file(path)
    if TOKENIZER_SHARD not in view.names():
        raise InputError(
            "this run holds no tokenizer, because none lay beside its data: give --tokenizer FILE"
        )
    return Tokenizer.from_str(read_bytes(view, TOKENIZER_SHARD).decode())


def _prompt_ids(tokenizer: Tokenizer, prompt: str, model: ModelConfig) -> list[int]:
    """Encode the prompt as the beginning of a document, as the training data has them."""
    ids = list(tokenizer.encode(prompt, add_special_tokens=False).ids)
    if model.bos_token_id in tokenizer.get_added_tokens_decoder():
        ids.insert(0, model.bos_token_id)
    if not ids:
        raise InputError("--prompt is empty, and no token begins a text: give a prompt")
    if max(ids) >= model.vocab_size:
        raise InputError(
            f"the tokenizer gives id {max(ids)}, but the model has {model.vocab_size}: this is not"
            " the tokenizer of this run; leave --tokenizer out for the stored one, or give its own"
        )
    return ids
