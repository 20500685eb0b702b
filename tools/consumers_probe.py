"""What a consumer makes of a package: run by its own interpreter, which has none of this project.

    python tools/consumers_probe.py KIND ANSWER.npz < question.json

Owns the calls of the consumers' libraries. The question names the package, the ids to score, the
prompts to go on from, and texts; the answer has an array each and, as JSON, everything else.

Shapes: T positions, V vocabulary.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, Any]
Facts = dict[str, Any]
VOCABULARY_MAX = 5000
TOP_LOGPROBS = 20


def main() -> None:
    """Answer the question."""
    kind, path = sys.argv[1:]
    question = json.load(sys.stdin)
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    ask = {"transformers": of_transformers, "llama_cpp": of_llama_cpp, "vllm": of_vllm}[kind]
    arrays, facts = ask(question)
    np.savez(path, facts=json.dumps(facts), **arrays)


def of_transformers(question: Facts) -> tuple[Arrays, Facts]:
    """Load with the Auto classes; logits, greedy continuations, ids of texts and back."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    torch.set_num_threads(question["threads"])
    auto, name = transformers.AutoModelForCausalLM, transformers.AutoTokenizer
    form = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    model, info = auto.from_pretrained(
        question["package"],
        local_files_only=True,
        output_loading_info=True,
        **{form: torch.float32},
    )
    model.eval()
    tokenizer = name.from_pretrained(question["package"], local_files_only=True)
    with torch.no_grad():
        logits_TV = model(torch.tensor([question["ids"]])).logits[0]
        greedy = [
            model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=question["new_tokens"]
            )[0, len(prompt) :].tolist()
            for prompt in question["prompts"]
        ]
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in question["texts"]]
    return {"logits": logits_TV.numpy()}, {
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
        "greedy": greedy,
        "text_ids": texts,
        "decoded": [tokenizer.decode(ids) for ids in texts],
        "faults": [f"{key}: {sorted(map(str, value))}" for key, value in info.items() if value],
    }


def of_llama_cpp(question: Facts) -> tuple[Arrays, Facts]:
    """Load the GGUF file; logits, greedy continuations, ids of texts, losses of held-out rows."""
    library: Any = importlib.import_module("llama_cpp")
    length = max(len(question["ids"]), *(len(row) for row in question["rows"] or [[]]), 128)
    model = library.Llama(
        model_path=question["gguf"],
        n_ctx=length,
        n_batch=length,
        n_gpu_layers=0,
        n_threads=question["threads"],
        logits_all=True,
        type_k=library.GGML_TYPE_F32,
        type_v=library.GGML_TYPE_F32,
        verbose=False,
    )

    def scores(ids: list[int]) -> NDArray[np.float32]:
        model.reset()
        model.eval(ids)
        found: NDArray[np.float32] = model.scores[: len(ids)].copy()
        return found

    greedy = []
    for prompt in question["prompts"]:
        ids = list(prompt)
        while len(ids) < len(prompt) + question["new_tokens"]:
            ids.append(int(scores(ids)[-1].argmax()))
            if ids[-1] == question["end_id"]:
                break
        greedy.append(ids[len(prompt) :])
    losses = [loss_of(scores(row[:-1]), row[1:]) for row in question["rows"]]
    texts = [
        model.tokenize(text.encode(), add_bos=False, special=False) for text in question["texts"]
    ]
    return {"logits": scores(question["ids"])}, {
        "versions": {"llama_cpp_python": library.__version__},
        "greedy": greedy,
        "text_ids": texts,
        "decoded": [model.detokenize(ids).decode() for ids in texts],
        "perplexity": math.exp(sum(losses) / len(losses)) if losses else None,
        "faults": [],
    }


def loss_of(logits_TV: NDArray[np.float32], targets: list[int]) -> float:
    """Give the mean loss of a row."""
    shifted_TV = logits_TV.astype(np.float64) - logits_TV.max(1, keepdims=True)
    normal_T = np.log(np.exp(shifted_TV).sum(1))
    return float((normal_T - shifted_TV[np.arange(len(targets)), targets]).mean())


def of_vllm(question: Facts) -> tuple[Arrays, Facts]:
    """Load with vLLM; log-probabilities of the prompt's positions, and greedy continuations."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    vllm: Any = importlib.import_module("vllm")
    is_small = question["vocabulary"] <= VOCABULARY_MAX
    wanted = -1 if is_small else TOP_LOGPROBS
    model = vllm.LLM(
        model=question["package"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=question["positions"],
        max_logprobs=wanted,
        seed=0,
    )
    ids = question["ids"]
    scoring = vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=wanted)
    [scored] = model.generate({"prompt_token_ids": ids}, scoring)
    logprobs_TV = np.full((len(ids), question["vocabulary"]), np.nan, np.float64)
    for position, found in enumerate(scored.prompt_logprobs[1:]):
        for token, told in found.items():
            logprobs_TV[position, token] = told.logprob
    going_on = vllm.SamplingParams(max_tokens=question["new_tokens"], temperature=0)
    prompts = [{"prompt_token_ids": prompt} for prompt in question["prompts"]]
    answers = model.generate(prompts, going_on)
    tokenizer = model.get_tokenizer()
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in question["texts"]]
    return {"logprobs": logprobs_TV}, {
        "versions": {"vllm": vllm.__version__},
        "greedy": [list(answer.outputs[0].token_ids) for answer in answers],
        "text_ids": texts,
        "decoded": [tokenizer.decode(ids) for ids in texts],
        "faults": [],
    }


if __name__ == "__main__":
    main()
