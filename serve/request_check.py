"""Whether a request can be served at all, said before anything is done for it.

Owns the reasons why not. Knows nothing of threads or of other requests: what is checked here holds
however busy the scheduler is.
"""

from __future__ import annotations

from serve.jobs import Job
from serve.weights import stage_places
from shardb.errors import UsageError


def check_request(job: Job, *, page_tokens: int, page_count: int, prompt_scores_max: int) -> None:
    """Check tokens, window, shards and memory; page 0 of `page_count` is nobody's.

    Raises:
        UsageError: empty prompt, ids outside the vocabulary, prompt and answer longer than the
            model's window or than the cache, a model that cannot be served, scores asked for of a
            prompt too long for them.
        InputError: the layers are those of transformers, which is not installed.
    """
    config = job.pinned.config
    if not job.ids:
        raise UsageError("the prompt is empty: give at least one token")
    if not 0 <= min(job.ids) <= max(job.ids) < config.vocab_size:
        raise UsageError(f"the prompt has ids outside the vocabulary of {config.vocab_size} tokens")
    total = job.prompt_length + job.parameters.max_tokens
    if total > config.max_position_embeddings:
        raise UsageError(
            f"{job.prompt_length} prompt tokens and {job.parameters.max_tokens} to be generated"
            f" are {total}, but the model's window is {config.max_position_embeddings}"
        )
    stage_places(job.pinned)
    pages = page_count - 1
    if -(-job.tokens_max // page_tokens) > pages:
        raise UsageError(
            f"the request needs {job.tokens_max} tokens of keys and values, but kv_cache_bytes"
            f" holds {max(0, pages) * page_tokens}: ask for less"
        )
    # All logits of such a prompt are in memory at once: they come from one call.
    if job.calls_are_fixed and job.wants_prompt_scores and job.prompt_length > prompt_scores_max:
        raise UsageError(
            f"log-probabilities of {job.prompt_length} prompt tokens are asked for, but of this"
            f" model prefill_chunk ({prompt_scores_max}) is the most: give a shorter prompt"
        )
