"""Why a step trained nothing: each reason from its own cause, with its counts."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from apps.common.run.idle_reason import SIGNAL, idle_reason, reward_called
from apps.grpo.config import GrpoConfig
from apps.grpo.step import NOTHING, GrpoTrainer
from apps.grpo.testing.recipe import RECIPE
from engines import EngineConfig, build_engine
from objectives import GRPO
from rollout import Episode, Score, Segment, Task, TaskRow
from rollout.environments.environment import End

CONFIG = replace(RECIPE.config, prompts_per_step=2, group_size=2)
TRAINED = {"train/updates": 1.0, "train/grad_norm": 0.25, SIGNAL: 1.0}
NO_ADVANTAGE = TRAINED | {SIGNAL: 0.0}

CUT_OFF = (
    "every reward was 0 (2 responses), and every response was cut off by a limit; the reward function was never called "
    "(raise --max-episode-tokens, --sampling.max-new-tokens)"
)


def episode(reward: float | None, group: int = 0, end: End = "done", mask: bool = True) -> Episode:
    segment = Segment((1, 2, 3), (False, mask, mask), (0.0, -mask, -mask), (-1, mask - 1, mask - 1))
    if reward is None:
        return Episode("t/0/0", "t", 0, (), None, "failed", error="lost", group=group)
    return Episode("t/0/0", "t", 0, (segment,), Score(reward), end, group=group)


@pytest.mark.parametrize(
    ("episodes", "metrics", "reason"),
    [
        ([episode(0), episode(1)], TRAINED, None),
        ([episode(0), episode(1)], {"train/updates": 1.0, SIGNAL: 1.0}, None),
        ([episode(None), episode(None)], NOTHING, "every episode failed (2 episodes)"),
        ([episode(0), episode(1)], NOTHING, "no token of 2 responses is trained: their loss masks are empty"),
        ([episode(0), episode(0, 1), episode(None)], NO_ADVANTAGE, "every reward was 0 (2 responses)"),
        (
            [episode(0), episode(0), episode(0.5, 1)],
            NO_ADVANTAGE,
            "in each of 2 groups all rewards were equal (3 responses)",
        ),
        (
            [episode(0), episode(1)],
            NO_ADVANTAGE,
            "every advantage is 0, although rewards in a group differ (--advantage grpo)",
        ),
        (
            [episode(0, end="length"), episode(0, end="max_tokens")],
            NO_ADVANTAGE | {"reward/called": 0.0},
            CUT_OFF,
        ),
        ([episode(0), episode(1)], TRAINED | {"train/skipped": 1.0}, "loss or gradient was not finite, and the update"),
        (
            [episode(0), episode(1)],
            TRAINED | {"train/grad_norm": 0.0},
            "the gradient is 0",
        ),
        (
            [episode(0), episode(1)],
            TRAINED | {"train/grad_norm": 0.0, "train/off_policy/weight": 0.0},
            "off-policy weights are 0 for every token (--objective.off-policy none)",
        ),
    ],
)
def test_each_cause_is_named(episodes: list[Episode], metrics: dict[str, float], reason: str | None) -> None:
    found = idle_reason(episodes, metrics, CONFIG.corrected_objective, CONFIG.advantage)
    assert found is None if reason is None else str(found).startswith(reason)


def test_a_kl_penalty_teaches_nothing_by_itself() -> None:
    config = replace(CONFIG, objective=GRPO(kl_coef=0.1))
    reason = idle_reason([episode(1), episode(1)], NO_ADVANTAGE, config.corrected_objective, config.advantage)
    assert reason == "every reward was 1 (2 responses)"


@pytest.mark.parametrize("cut_off_reward", [0.0, None])
def test_a_reward_is_never_called_where_all_is_cut_off_and_it_does_not_take_that(cut_off_reward: float | None) -> None:
    task = Task((), lambda reply, results: 1.0, cut_off_reward=cut_off_reward)
    tasks: Any = SimpleNamespace(environment=lambda row: task)
    cut, never = [episode(0, end="length"), episode(0, end="limit")], {"reward/called": 0.0}
    assert reward_called(cut, [TaskRow("a")], tasks) == ({} if cut_off_reward is None else never)
    assert reward_called([*cut, episode(0)], [TaskRow("a")], tasks) == {}
    own: Any = SimpleNamespace(environment=lambda row: object)
    assert reward_called(cut, [TaskRow("a")], own) == {}


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_without_a_trained_token_makes_no_update_and_one_without_it_in_a_part_trains_the_other(
    parts: int, tmp_path: Any
) -> None:
    assert RECIPE.make_model is not None
    model = RECIPE.make_model(tmp_path / "model", 0)
    engine = build_engine(EngineConfig(model=str(model), device="cpu"))
    trainer = GrpoTrainer(replace(CONFIG, mini_batches=parts), engine)
    for nothing in ([episode(None)] * 4, [episode(r, mask=False) for r in (0, 1)] * 2):
        result = trainer.train(0, nothing)
        assert (result.metrics, result.advantages) == (NOTHING, [0.0] * 4)
        assert engine.state_summary()["step"] == 0
    half = [episode(0), episode(1, mask=False), episode(1), episode(1, mask=False)]
    assert trainer.train(0, half).metrics["train/updates"] == 1
    assert engine.state_summary()["step"] == 1


@pytest.mark.parametrize("allowed", [0, -1])
def test_no_limit_is_said_as_none(allowed: int) -> None:
    with pytest.raises(ValueError, match=r"--allow-idle-steps must be at least 1, or None for no limit, got "):
        GrpoConfig(allow_idle_steps=allowed)
