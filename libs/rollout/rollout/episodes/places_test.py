"""What is sampled belongs to the task and the episode, not to the place among others where it is played."""

import asyncio
from collections.abc import Sequence

import pytest

from rollout.chat.chat import Chat
from rollout.engine import Sampling
from rollout.environments.environment import EpisodeContext
from rollout.environments.sources import TaskRow
from rollout.environments.task import Task
from rollout.episodes.episode import Episode
from rollout.episodes.runner import run_group
from rollout.native.engine import NativeEngine
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.model import tiny_model

TOKENIZER = tiny_tokenizer()


def test_a_tasks_samples_do_not_depend_on_its_place() -> None:
    """Groups of one step in any order, with a real model: the same tokens for each task."""
    engine = NativeEngine(tiny_model(len(TOKENIZER)), max_length=256)
    rows = [TaskRow(f"row-{i}", {"text": text}) for i, text in enumerate(("12+34=", "5+6=", "70+1=", "8+8="))]

    def play(order: Sequence[int]) -> dict[str, list[tuple[int, ...]]]:
        async def all_groups() -> list[list[Episode]]:
            jobs = [
                run_group(
                    Task(({"role": "user", "content": rows[i].data["text"]},), lambda reply, results: 0.0),
                    engine,
                    Chat(TOKENIZER),
                    Sampling(max_new_tokens=6, seed=11),
                    size=2,
                    row=rows[i],
                    group=place,
                )
                for place, i in enumerate(order)
            ]
            return await asyncio.gather(*jobs)

        return {g[0].task_id: [e.segments[0].ids for e in g] for g in asyncio.run(all_groups())}

    expected = play([0, 1, 2, 3])
    assert play([3, 1, 0, 2]) == expected
    assert play([2]) == {"row-2": expected["row-2"]}
    assert len({ids for some in expected.values() for ids in some}) > 4


def test_a_context_outside_an_episode_has_no_engine() -> None:
    with pytest.raises(ValueError, match="no episode is being played here"):
        EpisodeContext("t").converse(({"role": "user", "content": "37+58="},))
