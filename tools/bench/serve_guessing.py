"""How many sweeps guessing saves on a trained model, and that it changes no token.

The same prompts (the begin token and one more) are answered one at a time without guesses and with
them, greedy and drawn with a seed; told are sweeps a token, the share of guesses that were right,
and whether every token is the same. Sweeps do not depend on how busy the machine is.

Usage: python -m tools.bench.serve_guessing --store RUN [--ref REF] [--prompts 8] [--new 200]
       [--guesses 2,4,8]
"""

from __future__ import annotations

import argparse

from serve.pinned import PinnedModel
from serve.requests import SamplingParameters
from serve.scheduler import Scheduler, SchedulerOptions
from serve.statistics import SchedulerStatistics
from tools.bench.serve_models import Receiver

Texts = list[list[int]]


def answered(
    pinned: PinnedModel, guesses: int, temperature: float, args: argparse.Namespace
) -> tuple[Texts, SchedulerStatistics]:
    """Answer every prompt, one after the other."""
    scheduler = Scheduler(SchedulerOptions(ngram_speculation=guesses, kv_cache_bytes=1 << 26))
    texts = []
    for index in range(args.prompts):
        receiver = Receiver()
        parameters = SamplingParameters(
            max_tokens=args.new, temperature=temperature, seed=index, ignore_eos=True
        )
        prompt = [pinned.config.bos_token_id, 3 + 17 * index % (pinned.config.vocab_size - 3)]
        scheduler.submit(pinned, prompt, parameters, receiver)
        receiver.ended.wait()
        texts.append(receiver.tokens)
    scheduler.close()
    return texts, scheduler.statistics()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", required=True)
    parser.add_argument("--ref")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--guesses", default="2,4,8")
    args = parser.parse_args()
    pinned = PinnedModel.open(args.store, args.ref)
    for temperature in (0.0, 0.8):
        expected, plain = answered(pinned, 0, temperature, args)
        print(f"temperature {temperature}: {plain.sweeps} sweeps without guesses")
        for count in [int(text) for text in args.guesses.split(",")]:
            texts, found = answered(pinned, count, temperature, args)
            right = found.accepted_tokens / max(1, found.drafted_tokens)
            print(
                f"  {count} guesses: {found.sweeps} sweeps ({found.sweeps / plain.sweeps:.2f}),"
                f" {right:.0%} right, {'same' if texts == expected else 'OTHER'} tokens"
            )
    pinned.release()


if __name__ == "__main__":
    main()
