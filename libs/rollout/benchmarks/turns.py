"""Benchmark of conversations of several turns: with the prefix cache, and with each prompt read whole.

PYTHONPATH=libs/rollout:libs/seqpack OMP_NUM_THREADS=1 python libs/rollout/benchmarks/turns.py

A user's turn has `said` tokens, its completion `new` tokens; the next prompt is all of that and more. Both engines
sample the same completions (greedy). Processor time of all turns, the best of the repeats, interleaved in one run.
"""

import argparse
import random
import time

from native import build
from transformers import Qwen3_5ForCausalLM

from rollout.engine import Sampling
from rollout.native.engine import NativeEngine

CASES = (  # conversations, turns, said, new, hidden, layers, vocabulary
    (1, 4, 224, 32, 64, 4, 300),
    (8, 4, 224, 32, 64, 4, 300),
    (8, 4, 128, 128, 64, 4, 300),
    (8, 4, 224, 32, 256, 8, 300),
    (1, 4, 250, 6, 512, 12, 8000),
)


def talk(engine: NativeEngine, count: int, turns: int, said: int, new: int, vocab: int) -> list[list[int]]:
    """Play all conversations to their end and return their tokens."""
    rng = random.Random(0)
    streams: list[list[int]] = [[] for _ in range(count)]
    for _ in range(turns):
        streams = [[*stream, *(rng.randrange(2, vocab) for _ in range(said))] for stream in streams]
        done = engine.generate_batch(streams, Sampling(greedy=True, max_new_tokens=new))
        streams = [[*stream, *answer.ids] for stream, answer in zip(streams, done, strict=True)]
    return streams


def timed(model: Qwen3_5ForCausalLM, keep_tokens: int, case: tuple[int, ...]) -> tuple[float, int, list[list[int]]]:
    """Return processor seconds, the number of prompt tokens read, and the tokens of all conversations."""
    count, turns, said, new, _, _, vocab = case
    engine = NativeEngine(model, max_length=2048, keep_tokens=keep_tokens)
    began = time.process_time()
    streams = talk(engine, count, turns, said, new, vocab)
    return time.process_time() - began, engine.num_prefill_tokens, streams


def main() -> None:
    """Print the table of all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    flags = parser.parse_args()
    print(f"{'rows':>5}{'turns':>6}{'said':>6}{'new':>5}{'params':>8}{'read':>14}{'kept':>9}{'anew':>9}{'ratio':>7}")
    for case in CASES:
        count, turns, said, new, hidden, layers, vocab = case
        model = build(hidden, vocab, layers)
        rounds = [(timed(model, 65536, case), timed(model, 0, case)) for _ in range(flags.repeats)]
        assert all(cached[2] == anew[2] for cached, anew in rounds)
        cached, anew = (min(r[i][0] for r in rounds) for i in range(2))
        size = sum(p.numel() for p in model.parameters()) / 1e6
        read = f"{rounds[0][0][1]}/{rounds[0][1][1]}"
        print(
            f"{count:>5}{turns:>6}{said:>6}{new:>5}{size:>7.2f}M{read:>14}{cached:>7.3f} s{anew:>7.3f} s"
            f"{anew / cached:>7.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
