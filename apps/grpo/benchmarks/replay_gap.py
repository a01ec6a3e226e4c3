"""What routing replay does to the gap between the sampler's log-probs and the trainer's, on a small model with experts.

    PYTHONPATH=.:libs/seqpack:libs/dyncp:libs/chat_tools:libs/objectives:libs/engines:libs/rollout:libs/runlog \
        OMP_NUM_THREADS=1 python apps/grpo/benchmarks/replay_gap.py [--layers N] [--experts N] [--rows N] [--seed N]

The native engine samples, the training engine scores the same tokens in float32, once with its own routers and once
through the experts that the sampler chose (`routing_replay`). The sampler has the trainer's weights in float32, in
bfloat16, or those of a few updates (AdamW, 1e-4) before. Of the distance d = log p_trainer - log p_sampler over all
sampled tokens: mean and 99th percentile of |d|, and the k3 estimate of KL(sampler || trainer), the mean of
exp(d) - 1 - d. `routed`: how many choices (a token in a layer) fall on another set of experts in the trainer.
"""

import argparse
import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

from engines import EngineConfig, build_engine
from engines.launch import launch
from objectives import GRPO
from objectives.kl import k3
from rollout import NativeEngine, Sampling
from rollout.experts import ROUTED_EXPERTS
from seqpack import make_batch
from seqpack.batches.batch import jagged

VOCAB, PROMPT, ANSWER = 512, 16, 64


@dataclass(frozen=True)
class Sampled:
    """The rows of the sampler: `batch` with `rollout_log_probs` and `routed_experts`, and a mask of sampled tokens."""

    batch: Any
    answers: Tensor


def model_of(layers: int, experts: int, seed: int) -> Any:
    """Return a hybrid Qwen3.5 with experts, four of them a token, and weights large enough for skewed responses."""
    config = Qwen3_5MoeTextConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        full_attention_interval=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=experts,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        router_aux_loss_coef=0.0,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    model = Qwen3_5MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return model


def sample(module: Any, rows: int, seed: int) -> Sampled:
    """Return responses of `ANSWER` tokens to random prompts."""
    rng = torch.Generator().manual_seed(seed)
    prompts = torch.randint(2, VOCAB, (rows, PROMPT), generator=rng).tolist()
    engine = NativeEngine(module, routed_experts=True)
    settings = [Sampling(max_new_tokens=ANSWER, seed=seed + i) for i in range(rows)]
    samples, experts = [], []
    for i, (prompt, done) in enumerate(zip(prompts, engine.generate_batch(prompts, settings), strict=True)):
        mask = torch.arange(PROMPT + len(done.ids)) >= PROMPT
        samples.append(
            {
                "input_ids": torch.tensor([*prompt, *done.ids]),
                "loss_mask": mask,
                "rollout_log_probs": torch.tensor([0.0] * PROMPT + list(done.log_probs)),
                "advantages": torch.randn(1, generator=rng) * mask,
                "group": i // 8,
            }
        )
        experts.append(done.extras[ROUTED_EXPERTS].resized(len(mask)).tensor())
    batch = make_batch(samples)
    batch[ROUTED_EXPERTS] = jagged(experts, 0)
    return Sampled(batch, batch["loss_mask"].values())


def gap(engine: Any, sampled: Sampled) -> dict[str, float]:
    """Return distances between the log-probs of trainer and sampler."""
    scores = engine.forward(sampled.batch)["log_probs"].values()
    trainer, sampler = (x[sampled.answers].double() for x in (scores, sampled.batch["rollout_log_probs"].values()))
    d = trainer - sampler
    return {
        "mean": float(d.abs().mean()),
        "p99": float(d.abs().quantile(0.99)),
        "largest": float(d.abs().max()),
        "kl": float(k3(sampler, trainer).mean()),
    }


@torch.no_grad()
def other_routes(module: Any, batch: Any) -> float:
    """Return the share of choices (a token in a layer) for which `module` chooses another set of experts."""
    seen: list[Tensor] = []
    routers = [part for part in module.modules() if type(part).__name__.endswith("TopKRouter")]
    hooks = [part.register_forward_hook(lambda _m, _i, out: seen.append(out[2])) for part in routers]
    differ = total = 0
    for ids, recorded in zip(batch["input_ids"].unbind(), batch[ROUTED_EXPERTS].unbind(), strict=True):
        seen.clear()
        module(input_ids=ids[None], use_cache=False)
        own = torch.stack(seen, dim=1).sort(-1).values
        known = (recorded >= 0).all(-1)
        differ += int(((own != recorded.long().sort(-1).values).any(-1) & known).sum())
        total += int(known.sum())
    for hook in hooks:
        hook.remove()
    return differ / total


def updates(engine: Any, sampled: Sampled, count: int) -> None:
    """Train `count` times on the sampled batch."""
    for _ in range(count):
        engine.train_batch(sampled.batch, GRPO())


def main(layers: int, experts: int, rows: int, seed: int) -> None:
    """Print a table, and one JSON line a row."""

    def trainer(replay: bool) -> Any:
        config = EngineConfig(device="cpu", max_tokens_per_rank=4096, lr=1e-4, routing_replay=replay)
        return build_engine(config, model_of(layers, experts, seed))

    print("| sampler | replay | mean | p99 | largest | KL (k3) | routed elsewhere |\n|" + " --- |" * 7)
    cases: Sequence[tuple[str, torch.dtype, int]] = (
        ("the same weights, float32", torch.float32, 0),
        ("the same weights, bfloat16", torch.bfloat16, 0),
        ("one update before, float32", torch.float32, 1),
        ("one update before, bfloat16", torch.bfloat16, 1),
        ("eight updates before, float32", torch.float32, 8),
    )
    for what, dtype, stale in cases:
        module = model_of(layers, experts, seed)
        sampled = sample(copy.deepcopy(module).to(dtype), rows, seed)
        plain = trainer(replay=False)
        updates(plain, sampled, stale)
        for piece in plain.export_weights(max_bytes=2**40, live=True):
            dict(module.named_parameters())[piece.name].data = piece.flat.view(piece.shape).clone()
        elsewhere = other_routes(module, sampled.batch)
        replaying = build_engine(
            EngineConfig(device="cpu", max_tokens_per_rank=4096, routing_replay=True), copy.deepcopy(module)
        )
        for replay, engine in ((False, plain), (True, replaying)):
            row = gap(engine, sampled)
            cells = " | ".join(f"{value:.2e}" for value in row.values())
            print(f"| {what} | {'on' if replay else 'off'} | {cells} | {elsewhere:.2%} |")
            print(json.dumps({"sampler": what, "replay": replay, "routed": elsewhere} | row), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 6), ("experts", 32), ("rows", 64), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    launch(main, (options.layers, options.experts, options.rows, options.seed), device="cpu")
