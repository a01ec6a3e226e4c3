"""The proof that a sampler has the trainer's weights: it passes where it has, replayed experts too, and only there."""

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import pytest
import torch

from apps.grpo.step import GrpoTrainer
from apps.grpo.testing.recipe import RECIPE
from engines import EngineConfig, build_engine
from engines.tiny import tiny_model
from rollout import Completion, NativeEngine, Sampling
from rollout.experts import ROUTED_EXPERTS
from schedules.weights.sampler_bound import sampler_bound
from schedules.weights.weight_checks import WeightsNotTakenError, compare_checks, decode_completion, encode_completion

PROMPTS = [[5, 9, 2], [7, 1, 1, 30], [3], [8, 8]]

BOUND = asdict(sampler_bound("float32"))


def answers_of(module: Any, experts: bool) -> list[Completion]:
    sampler = NativeEngine(module, pad_token_id=0, version=3, routed_experts=experts)

    how = Sampling(max_new_tokens=6, seed=0)

    async def ask() -> list[Completion]:
        return await asyncio.gather(*(sampler.generate(prompt, how) for prompt in PROMPTS))

    return asyncio.run(ask())


def move(module: Any) -> None:
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "embed_tokens" not in name:
                parameter.mul_(1.05)


def told(answers: Iterable[Completion], metrics: Mapping[str, float]) -> dict[str, Any]:
    return {"answers": [encode_completion(answer) for answer in answers], "bound": BOUND, "metrics": metrics}


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_trainers_own_weights_pass_and_others_do_not(kind: str) -> None:
    """Also after the answers' way between processes, as JSON."""
    replay = kind == "moe"
    config = EngineConfig(device="cpu", routing_replay=replay, max_tokens_per_rank=64)
    engine: Any = build_engine(config, tiny_model(kind, scale=2.0))
    trainer = GrpoTrainer(RECIPE.config, engine)
    answers = answers_of(tiny_model(kind, scale=2.0), replay)
    assert all((ROUTED_EXPERTS in answer.extras) == replay for answer in answers)
    sent = [decode_completion(json.loads(json.dumps(encode_completion(answer)))) for answer in answers]
    assert sent == answers
    good = told(sent, {"weights/pause_ms": 1.0})
    assert compare_checks(trainer, PROMPTS, [good], 3)["weights/check/abs"] < 1e-5
    assert compare_checks(trainer, PROMPTS, [good, told(sent, {"weights/pause_ms": 2.0})], 3)["weights/pause_ms"] == 2
    assert compare_checks(trainer, PROMPTS, [], 3) == {}
    with pytest.raises(WeightsNotTakenError, match="of version 3"):
        compare_checks(trainer, PROMPTS, [good], 4)
    newer = tiny_model(kind, scale=2.0)
    for module in (engine.executor.model, newer):
        move(module)
    with pytest.raises(WeightsNotTakenError, match="from the trainer's on average"):
        compare_checks(trainer, PROMPTS, [good], 3)
    fresh = [encode_completion(answer) for answer in answers_of(newer, replay)]
    now = {"answers": fresh, "bound": BOUND, "metrics": {"weights/pause_ms": 1.0}}
    assert compare_checks(trainer, PROMPTS, [now, now], 3)["weights/check/abs"] < 1e-5
    with pytest.raises(WeightsNotTakenError, match="log-probs of sampler 1 of 3"):
        compare_checks(trainer, PROMPTS, [now, good, now], 3)
    copies = {**now, "answers": [*fresh, *good["answers"]]}  # of one sampler, whose second copy of the model is stale
    with pytest.raises(WeightsNotTakenError, match="log-probs of sampler 2 of 3"):
        compare_checks(trainer, PROMPTS, [now, copies], 3)
    assert compare_checks(trainer, PROMPTS, [{**now, "answers": [*fresh, *fresh]}], 3)["weights/check/abs"] < 1e-5
