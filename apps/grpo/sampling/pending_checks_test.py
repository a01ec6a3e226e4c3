"""Probes are asked again of whoever is in the place of a dead sampler, and held to the weights that it was handed."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from apps.grpo.sampling.weight_checks_test import PROMPTS, answers_of, told
from apps.grpo.step import GrpoTrainer
from apps.grpo.testing.recipe import RECIPE
from engines import EngineConfig, build_engine
from engines.tiny import tiny_model
from rollout import Episode, Score, Segment
from rollout.workers.process import WorkerDied
from schedules.fully_async.follower import Leader
from schedules.fully_async.pending_checks import PendingChecks, WeightCheck
from schedules.weights.weight_checks import WeightsNotTakenError


class Answering:
    """Samplers whose first process dies of what it is asked; the next ones tell `answer`."""

    def __init__(self, answer: dict[str, Any], deaths: int) -> None:
        self.answer, self.deaths = answer, deaths
        self.asked: list[list[list[int]]] = []

    def call_all(self, name: str, prompts: list[list[int]], media: list[Any]) -> list[Future[Any]]:
        """Answer at once."""
        assert (name, media) == ("probe", [])
        self.asked.append(prompts)
        future: Future[Any] = Future()
        if len(self.asked) <= self.deaths:
            future.set_exception(WorkerDied("gone"))
        else:
            future.set_result(({"answer": self.answer}, b""))
        return [future]


def episode(prompt: Sequence[int], group: int) -> Episode:
    """One of a prompt, with a token that was sampled after it."""
    before = len(prompt)
    segment = Segment((*prompt, 4), (*(False for _ in prompt), True), (0.0,) * (before + 1), (*(-1 for _ in prompt), 0))
    return Episode(f"{group}/0/1", str(group), 1, (segment,), Score(0.0), "done", group=group)


def episodes() -> list[Any]:
    """One for each prompt."""
    return [episode(prompt, group) for group, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("deaths", [0, 2])
def test_the_answers_of_those_that_live_count(deaths: int) -> None:
    engine = build_engine(EngineConfig(device="cpu", max_tokens_per_rank=64), tiny_model(scale=2.0))
    samplers: Any = Answering(told(answers_of(tiny_model(scale=2.0), False), {"weights/pause_ms": 1.0}), deaths)
    probes = WeightCheck(episodes(), 3, lambda: samplers)
    assert samplers.asked == [PROMPTS], "asked at once"
    assert 0 < probes.metrics(GrpoTrainer(RECIPE.config, engine), Leader())["weights/check/abs"] < 1e-5
    assert samplers.asked == [PROMPTS] * (1 + deaths)


def test_weights_of_another_version_stop_the_run() -> None:
    engine = build_engine(EngineConfig(device="cpu", max_tokens_per_rank=64), tiny_model(scale=2.0))
    samplers: Any = Answering(told(answers_of(tiny_model(scale=2.0), False), {}), 0)
    with pytest.raises(WeightsNotTakenError, match="of version 3"):
        WeightCheck(episodes(), 4, lambda: samplers).metrics(GrpoTrainer(RECIPE.config, engine), Leader())


def test_without_an_answer_there_is_nothing_to_ask() -> None:
    samplers: Any = Answering({}, 0)
    probes = WeightCheck([], 3, lambda: samplers)
    assert samplers.asked == []
    engine: Any = None  # is not looked at
    assert probes.metrics(GrpoTrainer(RECIPE.config, engine), Leader()) == {}


def test_a_hand_over_before_any_prompt_is_known_is_proven_by_the_first() -> None:
    """Once; the next one, to a sampler in place of a dead one, by the same prompts, at once."""
    engine = build_engine(EngineConfig(device="cpu", max_tokens_per_rank=64), tiny_model(scale=2.0))
    samplers: Any = Answering(told(answers_of(tiny_model(scale=2.0), False), {}), 0)
    proofs = PendingChecks(lambda: samplers)
    proofs.synced(3)
    assert proofs.run(GrpoTrainer(RECIPE.config, engine), Leader()) == {}
    assert samplers.asked == []
    proofs.known(episodes())
    assert samplers.asked == [PROMPTS]
    assert 0 < proofs.run(GrpoTrainer(RECIPE.config, engine), Leader())["weights/check/abs"] < 1e-5
    proofs.known(episodes())
    assert proofs.run(GrpoTrainer(RECIPE.config, engine), Leader()) == {}
    proofs.synced(3)
    assert samplers.asked == [PROMPTS] * 2
    proofs.synced(4, episodes())  # what was asked under the number before is of no interest any more
    with pytest.raises(WeightsNotTakenError, match="after version 4"):
        proofs.run(GrpoTrainer(RECIPE.config, engine), Leader())


def test_weights_that_nobody_was_handed_need_no_proof() -> None:
    samplers: Any = Answering({}, 0)
    proofs = PendingChecks(lambda: samplers)
    proofs.synced(0, episodes())
    proofs.known(episodes())
    assert samplers.asked == []
