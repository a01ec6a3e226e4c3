"""Generation for post-training: engines, environments with tools, trajectories, weight transfer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.arithmetic import calculator as calculator
    from rollout.arithmetic import evaluate as evaluate
    from rollout.chat import Chat as Chat
    from rollout.engine import Completion as Completion
    from rollout.engine import RolloutEngine as RolloutEngine
    from rollout.engine import Sampling as Sampling
    from rollout.environment import Environment as Environment
    from rollout.environment import EpisodeSession as EpisodeSession
    from rollout.environment import Outcome as Outcome
    from rollout.environment import Reply as Reply
    from rollout.environment import Task as Task
    from rollout.episode import run_episode as run_episode
    from rollout.episode import run_group as run_group
    from rollout.native import NativeEngine as NativeEngine
    from rollout.sync import Piece as Piece
    from rollout.tools import Tool as Tool
    from rollout.trajectory import Trajectory as Trajectory
    from rollout.trajectory import to_batch as to_batch

_EXPORTS = {
    "Chat": "rollout.chat",
    "Completion": "rollout.engine",
    "Environment": "rollout.environment",
    "EpisodeSession": "rollout.environment",
    "NativeEngine": "rollout.native",
    "Outcome": "rollout.environment",
    "Piece": "rollout.sync",
    "Reply": "rollout.environment",
    "RolloutEngine": "rollout.engine",
    "Sampling": "rollout.engine",
    "Task": "rollout.environment",
    "Tool": "rollout.tools",
    "Trajectory": "rollout.trajectory",
    "calculator": "rollout.arithmetic",
    "evaluate": "rollout.arithmetic",
    "run_episode": "rollout.episode",
    "run_group": "rollout.episode",
    "to_batch": "rollout.trajectory",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(_EXPORTS)
