"""For tests of vLLM: a model that it serves on a CPU, and the distance of its log-probs from the module's."""

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout.config import RolloutConfig
from rollout.engine import Completion, RolloutEngine, Sampling
from rollout.sync.pieces import BucketPiece
from rollout.testing.model import SERVED, tiny_mixture, tiny_model
from rollout.vllm.settings.config import VllmConfig

VOCAB = 300
MEAN, MOST = 0.05, 0.6
"""Of the distance between log-probs in bfloat16 and float32; stale weights are ten times as far."""
PROMPTS = [[3 + i] * (4 + i % 5) + [7, 9 + i] for i in range(16)]
ANSWER = Sampling(max_new_tokens=8)
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
"""Sizes of a model that two workers share."""
VERSIONS = itertools.count(1)
"""No number serves for two sets of weights, taken or not."""


def served(**changes: Any) -> PreTrainedModel:
    """Build a tiny hybrid whose delta nets remember for a while."""
    model = tiny_model(VOCAB, **{**SERVED, **changes})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-2)
    return model


def changed(model: PreTrainedModel, seed: int = 1) -> PreTrainedModel:
    """Change all parameters of the module a little."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    return model


def config(routed_experts: bool = False, **changes: Any) -> RolloutConfig:
    """Return an engine's config for that model; `changes` are vLLM's."""
    own = VllmConfig(**changes)
    return RolloutConfig(backend="vllm", max_length=1536, max_batch=64, routed_experts=routed_experts, vllm=own)


def forced(model: PreTrainedModel, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0) -> Tensor:
    """Return the log-probs of `ids` after `prompt`, by the module's forward pass on one sequence."""
    with torch.no_grad():
        row = torch.tensor([[*prompt, *ids]], device=model.device)
        logits = model(row).logits.float().cpu()[0, len(prompt) - 1 : -1]
    result: Tensor = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0]
    return result


def sample(engine: RolloutEngine, prompts: Sequence[Sequence[int]], sampling: Sampling = ANSWER) -> list[Completion]:
    """Sample a completion of each prompt, all at once, each with a seed of its own."""

    async def ask() -> list[Completion]:
        return await asyncio.gather(*[engine.generate(p, replace(sampling, seed=i)) for i, p in enumerate(prompts)])

    return asyncio.run(ask())


def distances(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    temperature: float = 1.0,
) -> Tensor:
    """Return the distance of each sampled token's log-prob from the module's."""
    parts = [
        (torch.tensor(c.log_probs) - forced(model, p, c.ids, temperature)).abs()
        for p, c in zip(prompts, completions, strict=True)
    ]
    return torch.cat(parts)


def assert_agrees(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    temperature: float = 1.0,
) -> None:
    """Assert that log-probs are as close to the module's as bfloat16 is to float32."""
    distance = distances(model, prompts, completions, temperature)
    assert distance.mean() < MEAN
    assert distance.max() < MOST


def pieces(model: PreTrainedModel) -> list[BucketPiece]:
    """Return the model's weights as pieces."""
    return [BucketPiece(n, tuple(p.shape), p.dtype, 0, p.detach().reshape(-1)) for n, p in model.named_parameters()]


def served_mixture(seed: int = 0) -> PreTrainedModel:
    """Make a model with experts that matter: in a wrong order they move log-probs by units."""
    model = tiny_mixture(300, layers=4, seed=seed, **{**SERVED, **HEADS, "moe_intermediate_size": 64})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-2)
            if ".experts." in name:
                parameter.mul_(0.4)
    return model
