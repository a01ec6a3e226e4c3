"""The native engine beside transformers' `generate`, interleaved in one run.

PYTHONPATH=libs/rollout:libs/seqpack OMP_NUM_THREADS=1 python libs/rollout/benchmarks/native.py

Tiny models on one thread: Qwen3.5's hybrids, as the quickstart has them, and Qwen3, both through the lean decoder;
sampled at temperature 1 with no stop token, so that both make the same number of tokens. `generate` gets its prompts
padded on the left, in one batch. Times are processor time, the best of the repeats; the ratio is theirs over ours.
"Products" is the time of the case's matrix products alone, by the fastest way that ours knows, which no sampler is
without: "at most" is the ratio of one that does nothing else.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import set_verbosity_error

from rollout.engine import Sampling
from rollout.native.engine import NativeEngine
from rollout.native.lean.product import Matrix


@dataclass(frozen=True)
class Case:
    """A number of prompts, each with `group` completions."""

    name: str
    prompts: int
    group: int
    prompt_tokens: tuple[int, int]
    new_tokens: int
    hidden: int = 64
    layers: int = 4
    vocab: int = 300
    family: Literal["qwen3.5", "qwen3"] = "qwen3.5"

    def draw(self) -> list[list[int]]:
        """Return the prompts, each repeated `group` times."""
        rng = random.Random(0)
        distinct = [
            [rng.randrange(2, self.vocab) for _ in range(rng.randint(*self.prompt_tokens))] for _ in range(self.prompts)
        ]
        return [p for p in distinct for _ in range(self.group)]


CASES = (
    Case("quickstart's step", 64, 8, (8, 12), 8),
    Case("one row, short", 1, 1, (8, 12), 32),
    Case("one row, one long answer", 1, 1, (64, 64), 512),
    Case("one group", 1, 8, (64, 64), 128),
    Case("16 rows", 16, 1, (8, 64), 32),
    Case("64 rows", 64, 1, (8, 64), 64),
    Case("128 rows in groups", 16, 8, (8, 64), 32),
    Case("one row, 5.6M", 1, 1, (64, 64), 128, hidden=256, layers=8),
    Case("16 rows, 5.6M", 16, 1, (8, 64), 32, hidden=256, layers=8),
    Case("one row, 37M", 1, 1, (64, 64), 64, hidden=512, layers=12, vocab=8000),
    Case("Qwen3, quickstart's step", 64, 8, (8, 12), 8, family="qwen3"),
    Case("Qwen3, one row, long answer", 1, 1, (64, 64), 512, family="qwen3"),
    Case("Qwen3, 16 rows", 16, 1, (8, 64), 32, family="qwen3"),
    Case("Qwen3, 128 rows in groups", 16, 8, (8, 64), 32, family="qwen3"),
    Case("Qwen3, one row, 5M", 1, 1, (64, 64), 128, hidden=256, layers=8, family="qwen3"),
)


def build(hidden: int, vocab: int, layers: int = 4, family: str = "qwen3.5") -> PreTrainedModel:
    """Build a Qwen3, or a hybrid Qwen3.5 with full attention in every second layer."""
    head = hidden // 4
    torch.manual_seed(0)
    if family == "qwen3":
        plain = Qwen3Config(
            vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, head_dim=head, max_position_embeddings=2048,
            tie_word_embeddings=True,
        )  # fmt: skip
        return Qwen3ForCausalLM(plain).eval()
    config = Qwen3_5TextConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=head, full_attention_interval=2,
        linear_key_head_dim=head, linear_value_head_dim=head, linear_num_key_heads=4,
        linear_num_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                         "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    )  # fmt: skip
    return Qwen3_5ForCausalLM(config).eval()


def ours(model: PreTrainedModel, case: Case) -> Callable[[], int]:
    """Return a call that samples the case and counts the tokens."""
    prompts = case.draw()
    engine = NativeEngine(model, max_batch=len(prompts), max_length=2048)
    sampling = Sampling(max_new_tokens=case.new_tokens)
    return lambda: sum(len(c.ids) for c in engine.generate_batch(prompts, sampling))


def theirs(model: PreTrainedModel, case: Case, device: str) -> Callable[[], int]:
    """Return a call that samples the case with transformers' `generate` and counts the tokens."""
    prompts = case.draw()
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)

    def call() -> int:
        out = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=case.new_tokens, min_new_tokens=case.new_tokens, pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        return int((out.shape[1] - longest) * out.shape[0])

    return call


def products(model: PreTrainedModel, case: Case) -> Callable[[], int]:
    """Return a call that multiplies by every matrix: once for all prompts, and once for each step of all rows."""
    layers = [m for m in model.model.modules() if isinstance(m, nn.Linear)]
    prompts = case.draw()
    read = sum(map(len, {tuple(p): p for p in prompts}.values()))
    passes = (layers, read, 1), ([*layers, model.lm_head], len(prompts), case.new_tokens - 1)
    made = [
        ([(Matrix.of(m.weight.detach()), torch.randn(rows, m.in_features).to(m.weight)) for m in used], count)
        for used, rows, count in passes
    ]

    @torch.no_grad()
    def call() -> int:
        for used, count in made:
            for _ in range(count):
                for matrix, x in used:
                    matrix(x)
        return len(prompts) * case.new_tokens

    return call


def measure(calls: list[Callable[[], int]], repeats: int) -> tuple[list[float], int]:
    """Return the best processor time of each call, the calls interleaved, and the tokens of one call."""
    times: list[list[float]] = [[] for _ in calls]
    tokens = 0
    for _ in range(repeats):
        for call, spent in zip(calls, times, strict=True):
            began = time.process_time()
            tokens = call()
            spent.append(time.process_time() - began)
    return [min(t) for t in times], tokens


def main() -> None:
    """Print the table of all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--case", help="only cases whose name holds this")
    flags = parser.parse_args()
    set_verbosity_error()
    heads = f"{'case':<28}{'parameters':>11}{'rows':>6}{'tokens':>8}{'ours':>10}{'generate':>10}{'ratio':>7}"
    print(f"{heads}{'products':>10}{'at most':>8}")
    ratios = []
    for case in CASES:
        if flags.case and flags.case not in case.name:
            continue
        model = build(case.hidden, case.vocab, case.layers, case.family).to(flags.device)
        size = sum(p.numel() for p in model.parameters()) / 1e6
        calls = [ours(model, case), theirs(model, case, flags.device), products(model, case)]
        (mine, other, least), tokens = measure(calls, flags.repeats)
        ratios.append(other / mine)
        print(
            f"{case.name:<28}{size:>10.2f}M{case.prompts * case.group:>6}{tokens:>8}"
            f"{mine:>8.3f} s{other:>8.3f} s{ratios[-1]:>7.2f}{least:>8.3f} s{other / least:>8.2f}",
            flush=True,
        )
    print(f"median {statistics.median(ratios):.2f}, least {min(ratios):.2f}")


if __name__ == "__main__":
    main()
