"""Generation for post-training: engines, environments with tools, episodes, weight transfer."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rollout.build import build_rollout as build_rollout
    from rollout.capability import supports as supports
    from rollout.chat.chat import Chat as Chat
    from rollout.chat.conversation import Conversation as Conversation
    from rollout.chat.messages import Reply as Reply
    from rollout.chat.segment import Segment as Segment
    from rollout.config import RolloutConfig as RolloutConfig
    from rollout.control.settings import StalenessSettings as StalenessSettings
    from rollout.control.simulation import simulate as simulate
    from rollout.control.staleness import StalenessController as StalenessController
    from rollout.engine import Completion as Completion
    from rollout.engine import Load as Load
    from rollout.engine import OnTokens as OnTokens
    from rollout.engine import RolloutEngine as RolloutEngine
    from rollout.environments.environment import Environment as Environment
    from rollout.environments.environment import EnvironmentFactory as EnvironmentFactory
    from rollout.environments.environment import EpisodeContext as EpisodeContext
    from rollout.environments.environment import Observation as Observation
    from rollout.environments.environment import Opening as Opening
    from rollout.environments.environment import Outcome as Outcome
    from rollout.environments.environment import Score as Score
    from rollout.environments.environment import StepResult as StepResult
    from rollout.environments.sources import RowSource as RowSource
    from rollout.environments.sources import TaskRow as TaskRow
    from rollout.environments.sources import TaskSource as TaskSource
    from rollout.environments.task import Task as Task
    from rollout.episodes.batch import to_batch as to_batch
    from rollout.episodes.episode import Episode as Episode
    from rollout.episodes.episode import failures as failures
    from rollout.episodes.runner import run_episode as run_episode
    from rollout.episodes.runner import run_group as run_group
    from rollout.errors import EpisodeFailed as EpisodeFailed
    from rollout.errors import NotFiniteError as NotFiniteError
    from rollout.gateway.agents import AgentSlot as AgentSlot
    from rollout.gateway.agents import AgentTask as AgentTask
    from rollout.gateway.agents import Seat as Seat
    from rollout.gateway.agents import run_agent as run_agent
    from rollout.gateway.agents import run_agents as run_agents
    from rollout.gateway.result import SessionRecord as SessionRecord
    from rollout.gateway.server import TokenGateway as TokenGateway
    from rollout.gateway.session import SessionLimits as SessionLimits
    from rollout.ledger.ledger import RolloutLedger as RolloutLedger
    from rollout.native.engine import NativeEngine as NativeEngine
    from rollout.native.sharing import SharingEngine as SharingEngine
    from rollout.openai.engine import OpenAIEngine as OpenAIEngine
    from rollout.openai.settings.config import OpenAIConfig as OpenAIConfig
    from rollout.rewards.boxed import exact_answer as exact_answer
    from rollout.rewards.code_answer import code_answer as code_answer
    from rollout.rewards.math_answer import math_answer as math_answer
    from rollout.sampling import Sampling as Sampling
    from rollout.structured_outputs import StructuredOutputs as StructuredOutputs
    from rollout.sync.manifest import Manifest as Manifest
    from rollout.sync.pieces import Bucket as Bucket
    from rollout.sync.pieces import Piece as Piece
    from rollout.sync.transfer import share_weights as share_weights
    from rollout.sync.transfer import transfer_weights as transfer_weights
    from rollout.token_scores import TokenScores as TokenScores
    from rollout.tools.arithmetic import calculator as calculator
    from rollout.tools.arithmetic import evaluate as evaluate
    from rollout.tools.python_tool import python_tool as python_tool
    from rollout.tools.tool import Tool as Tool
    from rollout.tools.tool import ToolCall as ToolCall
    from rollout.tools.tool import call_tools as call_tools
    from rollout.tools.workers import instant as instant
    from rollout.vllm.engine import VllmEngine as VllmEngine
    from rollout.vllm.settings.config import VllmConfig as VllmConfig
    from seqpack.extensions.load_object import load_object as load_object

_EXPORTS = {
    "AgentSlot": "rollout.gateway.agents",
    "AgentTask": "rollout.gateway.agents",
    "Bucket": "rollout.sync.pieces",
    "Chat": "rollout.chat.chat",
    "Completion": "rollout.engine",
    "Conversation": "rollout.chat.conversation",
    "Environment": "rollout.environments.environment",
    "EnvironmentFactory": "rollout.environments.environment",
    "Episode": "rollout.episodes.episode",
    "EpisodeContext": "rollout.environments.environment",
    "EpisodeFailed": "rollout.errors",
    "Load": "rollout.engine",
    "Manifest": "rollout.sync.manifest",
    "NativeEngine": "rollout.native.engine",
    "NotFiniteError": "rollout.errors",
    "Observation": "rollout.environments.environment",
    "OnTokens": "rollout.engine",
    "OpenAIConfig": "rollout.openai.settings.config",
    "OpenAIEngine": "rollout.openai.engine",
    "Opening": "rollout.environments.environment",
    "Outcome": "rollout.environments.environment",
    "Piece": "rollout.sync.pieces",
    "Reply": "rollout.chat.messages",
    "RolloutConfig": "rollout.config",
    "RolloutEngine": "rollout.engine",
    "RolloutLedger": "rollout.ledger.ledger",
    "RowSource": "rollout.environments.sources",
    "Sampling": "rollout.sampling",
    "Score": "rollout.environments.environment",
    "Seat": "rollout.gateway.agents",
    "Segment": "rollout.chat.segment",
    "SessionLimits": "rollout.gateway.session",
    "SessionRecord": "rollout.gateway.result",
    "SharingEngine": "rollout.native.sharing",
    "StalenessController": "rollout.control.staleness",
    "StalenessSettings": "rollout.control.settings",
    "StepResult": "rollout.environments.environment",
    "StructuredOutputs": "rollout.structured_outputs",
    "Task": "rollout.environments.task",
    "TaskRow": "rollout.environments.sources",
    "TaskSource": "rollout.environments.sources",
    "TokenGateway": "rollout.gateway.server",
    "TokenScores": "rollout.token_scores",
    "Tool": "rollout.tools.tool",
    "ToolCall": "rollout.tools.tool",
    "VllmConfig": "rollout.vllm.settings.config",
    "VllmEngine": "rollout.vllm.engine",
    "build_rollout": "rollout.build",
    "calculator": "rollout.tools.arithmetic",
    "call_tools": "rollout.tools.tool",
    "code_answer": "rollout.rewards.code_answer",
    "evaluate": "rollout.tools.arithmetic",
    "exact_answer": "rollout.rewards.boxed",
    "failures": "rollout.episodes.episode",
    "instant": "rollout.tools.workers",
    "load_object": "seqpack.extensions.load_object",
    "math_answer": "rollout.rewards.math_answer",
    "python_tool": "rollout.tools.python_tool",
    "run_agent": "rollout.gateway.agents",
    "run_agents": "rollout.gateway.agents",
    "run_episode": "rollout.episodes.runner",
    "run_group": "rollout.episodes.runner",
    "share_weights": "rollout.sync.transfer",
    "simulate": "rollout.control.simulation",
    "supports": "rollout.capability",
    "to_batch": "rollout.episodes.batch",
    "transfer_weights": "rollout.sync.transfer",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(_EXPORTS)
