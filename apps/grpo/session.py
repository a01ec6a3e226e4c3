"""What every rank of a GRPO run holds: the sampler, the chat format, the tasks; and how they are asked."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from apps.common.ranks import gather_lists, rank_and_world
from apps.grpo.config import GrpoConfig
from apps.grpo.tasks import Tasks
from engines import TrainEngine, WeightPiece
from rollout import Chat, NativeEngine, RolloutEngine, Sampling, Trajectory
from rollout.episode import derive_seed, run_episode, run_group

T = TypeVar("T")


@dataclass(frozen=True)
class Session:
    """One rank's part of the rollout side. The ranks share the prompts among them and exchange what was sampled."""

    config: GrpoConfig
    tasks: Tasks
    chat: Chat
    sampler: RolloutEngine
    runner: asyncio.Runner

    def sync(self, engine: TrainEngine) -> int:
        """Give the sampler the engine's present weights under the next version number; the bytes handed over."""
        size = 0

        def counted() -> Iterator[WeightPiece]:
            nonlocal size
            # The app's own sampler runs the module that is trained; any other reads a checkpoint's names.
            for piece in engine.export_weights(live=isinstance(self.sampler, NativeEngine)):
                size += piece.flat.numel() * piece.flat.element_size()
                yield piece

        self.runner.run(self.sampler.update_weights(self.sampler.version + 1, counted()))
        return size

    def sample(self, step: int) -> list[Trajectory]:
        """A group of answers to each of the step's prompts, on every rank, in order of the prompts."""
        config = self.config
        tasks = self.tasks.train(step, config.prompts)
        jobs = [
            run_group(
                tasks[i],
                self.sampler,
                self.chat,
                replace(config.sampling, seed=derive_seed(config.seed, "sample", step, i)),
                size=config.group_size,
                group=i,
                max_turns=config.max_turns,
                max_tokens=config.max_episode_tokens,
            )
            for i in _mine(len(tasks))
        ]
        groups = self.runner.run(_all(jobs))
        trajectories = gather_lists([trajectory for group in groups for trajectory in group])
        return sorted(trajectories, key=lambda trajectory: trajectory.group)

    def accuracy(self, count: int | None = None) -> float:
        """Mean reward of greedy answers to the held-out prompts, or to the first `count` of them."""
        config, tasks = self.config, self.tasks.held_out()[:count]
        greedy = Sampling(
            greedy=True,
            max_new_tokens=config.sampling.max_new_tokens,
            stop_token_ids=config.sampling.stop_token_ids,
        )
        jobs = [
            run_episode(
                tasks[i],
                self.sampler,
                self.chat,
                greedy,
                max_turns=config.max_turns,
                max_tokens=config.max_episode_tokens,
            )
            for i in _mine(len(tasks))
        ]
        rewards = gather_lists([trajectory.reward for trajectory in self.runner.run(_all(jobs))])
        return sum(rewards) / len(rewards)


def _mine(count: int) -> range:
    rank, world = rank_and_world()
    return range(rank, count, world)


async def _all(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    return list(await asyncio.gather(*jobs))
