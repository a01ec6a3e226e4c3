"""The protocol between an environment and the code that plays an episode in it.

    open -> step -> step -> ... -> finish(end) -> close

One object is one episode; a factory (a class, a `Task`) makes it. All methods are async. The factory and the methods
run in a thread of the episode's own, on an event loop of its own, so they may block (`ThreadEnvironment`);
one that takes more seconds than the factory's `timeout` (600 where it has none) fails the episode, to be tried again. A
factory marked `rollout.tools.workers.instant` says that nothing of it blocks: it runs on the event loop that samples,
which saves the thread. What methods raise fails the episode, which is never a reward of zero. It is played again, but
for `EpisodeFailed(reason, retryable=False)`, which is final. A run plays environments in processes
(`rollout.environments.processes`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rollout.chat.messages import Message, Reply
from rollout.tools.tool import Tool, as_tools

if TYPE_CHECKING:  # it needs jinja2, which an environment does without
    from rollout.chat.conversation import Conversation

End = Literal["done", "limit", "length", "max_turns", "max_tokens", "deadline", "abort", "failed"]
"""How an episode ended: by the environment, or a limit of its own; a turn cut off at max_new_tokens; turns, tokens or
time used up; the engine or the run stopped it; a user's code failed."""
LARGEST = 2.0**127  # what a batch holds as float32


class Converse(Protocol):
    """Function that starts a conversation with the policy beside the episode's own: a sub-agent."""

    def __call__(self, messages: Sequence[Message], tools: Sequence[Tool] = (), agent: str = "sub") -> "Conversation":
        """Return the conversation, ready for its first `reply()`; its segments are recorded in the episode."""
        ...


def _no_conversation(messages: Sequence[Message], tools: Sequence[Tool] = (), agent: str = "sub") -> "Conversation":
    del messages, tools
    raise ValueError(f"no episode is being played here: {agent!r} has no engine to speak through")


@dataclass(frozen=True)
class EpisodeContext:
    """Identity of an episode.

    `index` numbers the episodes of a group, `attempt` the times this one has failed and was played again. `seed` (None:
    the run has none) is derived from the task's id and `index`: an environment that draws numbers draws them from it.
    `data` is the task's. `converse` starts sub-agents on the same engine. `environment` is the name that stands before
    `task_id` in the records of a run with several environments.
    """

    task_id: str
    attempt: int = 0
    index: int = 0
    seed: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    converse: Converse = field(default=_no_conversation, repr=False, compare=False)
    environment: str = ""

    @property
    def key(self) -> str:
        """The `task_id` in records: environment/id, or the id alone."""
        return f"{self.environment}/{self.task_id}" if self.environment else self.task_id


@dataclass(frozen=True)
class Observation:
    """The first messages of an episode, and the tools that the model is offered.

    A plain function with types and a docstring may stand for a tool (`rollout.tools.tool.as_tools`).
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools", as_tools(self.tools))


@dataclass(frozen=True)
class StepResult:
    """What an environment returns for a reply.

    `messages` go to the model next; `done` ends the episode, as "limit" where a limit of the environment's own did so
    (`cut_off`). `metrics` are numbers for the run's tables; the last value of a name counts. With `context` the
    conversation continues from these messages instead of all earlier ones (compaction), followed by `messages`.
    """

    messages: tuple[Message, ...] = ()
    done: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)
    context: tuple[Message, ...] | None = None
    cut_off: bool = False

    def __post_init__(self) -> None:
        if self.cut_off and not self.done:
            raise ValueError("an episode that a limit of the environment cut off is done")


@dataclass(frozen=True, init=False)
class Score:
    """Reward of an episode, the components of it by name, and the rewards of its turns.

    An `--advantage turn_grpo` learns from `turn_rewards` alone: a number for each turn of the model's, in order; those
    that have none get 0. `parts` is the earlier name of `reward_components`. Raises ValueError, with the component's
    name, for what is not a finite number.
    """

    reward: float
    reward_components: Mapping[str, float] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()

    def __init__(
        self,
        reward: float,
        reward_components: Mapping[str, float] | None = None,
        turn_rewards: Iterable[float] = (),
        *,
        parts: Mapping[str, float] | None = None,
    ) -> None:
        components = next((mapping for mapping in (parts, reward_components) if mapping is not None), {})
        object.__setattr__(self, "reward", reward)
        object.__setattr__(self, "reward_components", components)
        object.__setattr__(self, "turn_rewards", tuple(turn_rewards))
        self.__post_init__()

    def __post_init__(self) -> None:
        components = [(f"reward component {name!r}", value) for name, value in self.reward_components.items()]
        turns = [(f"the reward of turn {turn}", value) for turn, value in enumerate(self.turn_rewards, 1)]
        for name, value in (("reward", self.reward), *components, *turns):
            if not isinstance(value, (float, Real)) or not abs(value) <= LARGEST:
                raise ValueError(f"{name} is {value!r:.80}: a score is made of finite numbers, as float32 holds them")

    @property
    def parts(self) -> Mapping[str, float]:
        """The components of the reward, by their earlier name."""
        return self.reward_components


class Environment(Protocol):
    """One episode of a task.

    A factory may also have `score_group(episodes) -> Sequence[Score]`, blocking or async: it scores the episodes of a
    group that did not fail relative to one another, once all have ended, in place of what `finish` gave each.
    """

    async def open(self, context: EpisodeContext) -> Observation:
        """Begin the episode and return its first messages and tools."""
        ...

    async def step(self, reply: Reply) -> StepResult:
        """Return what follows a reply, also one that a limit cut off (`finished` is False)."""
        ...

    async def finish(self, end: End) -> Score:
        """Return the score of the episode, however it ended."""
        ...

    async def close(self) -> None:
        """Release all resources; called once, whatever happened before."""
        ...


EnvironmentFactory = Callable[[], Environment]

# Earlier names, which users' environments may import.
Opening = Observation
Outcome = StepResult
