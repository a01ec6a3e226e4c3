"""Gymnasium's environments as text: `GymnasiumTask("FrozenLake-v1", actions=(...))` is an environment factory.

Needs the extra `gymnasium`. A game must have a text form: it renders as "ansi", or its observations are text (or small
numbers); its actions are text, or a choice among a few (a `Discrete` space).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rollout.extras import missing_extra_message

try:
    import gymnasium
    from gymnasium.spaces import Discrete, Text
except ImportError as error:
    raise ImportError(missing_extra_message("Gymnasium's environments need gymnasium", "gymnasium")) from error

from rollout.chat.messages import Reply
from rollout.environments.blocking import call
from rollout.environments.environment import End, EpisodeContext, Observation, Score, StepResult
from rollout.environments.moves import game_seed, last_move

# The toy games have only numbers for their actions.
ACTIONS: Mapping[str, tuple[str, ...]] = {
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pick up", "drop off"),
    "Blackjack": ("stick", "hit"),
}
_COLOURS = {30: "grey", 31: "red", 32: "green", 33: "yellow", 34: "blue", 35: "magenta", 36: "cyan", 37: "white"}
_COLOURED = re.compile(r"\x1b\[([0-9;]*)m([^\x1b]*)\x1b\[0m")  # the innermost colour
_CODE = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class GymnasiumTask:
    """An environment by its id, or a function that makes one; called, it makes the environment of one episode.

    `options` go to `gymnasium.make`, with the task's own `data["options"]` over them: what a constructor draws
    (such as a random map) is outside the seed, and belongs there. `actions` names a Discrete space's actions in
    order (known for the toy games, else numbers); a reply takes the one in its last square brackets, or the one
    that it is. Where actions are text, the reply's content is the action. `instructions` stand before the first
    observation (None: they say which actions there are). The reward is the sum of the rewards; with
    `cut_off_reward`, that where a limit ended the episode, the run's or gymnasium's own (`truncated`). After
    `max_unread` replies in a row without an action the episode is done. A call that takes longer than `timeout`
    seconds fails the episode, to be tried again.

    Raises ValueError for an id that is not registered, and a bound below 1.
    """

    instant: ClassVar[bool] = True  # every call of a game has a thread
    environment: str | Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    actions: tuple[str, ...] = ()
    instructions: str | None = None
    cut_off_reward: float | None = None
    max_unread: int = 3
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.max_unread < 1:
            raise ValueError(f"max_unread must be at least 1, got {self.max_unread}")
        if isinstance(self.environment, str):
            try:
                gymnasium.spec(self.environment)
            except gymnasium.error.Error as error:
                raise ValueError(f"gymnasium has no environment {self.environment!r}: {error}") from error

    @property
    def name(self) -> str:
        """Name of the environment."""
        made = self.environment
        return made if isinstance(made, str) else getattr(made, "__qualname__", type(made).__qualname__)

    def __call__(self) -> "GymnasiumEnvironment":
        """Return the environment of one episode."""
        return GymnasiumEnvironment(self)


class GymnasiumEnvironment:
    """One episode of a gymnasium environment."""

    def __init__(self, task: GymnasiumTask) -> None:
        self._task = task
        self._env: Any = None
        self._names: tuple[str, ...] = ()
        self._reward = 0.0
        self._turn_rewards: list[float] = []
        self._unread = self._unread_in_a_row = 0
        self._cut_off = False  # by a limit of gymnasium's (`truncated`)

    async def open(self, context: EpisodeContext) -> Observation:
        """Make the environment and reset it with the task's seed."""
        options = {**self._task.options, **context.data.get("options", {})}
        observed = await self._call(self._reset, options, game_seed(context))
        instructions = self._task.instructions
        if instructions is None:
            known = " ".join(f"[{name}]" for name in self._names)
            instructions = f"You play {self._task.name}. "
            instructions += (
                f"Answer with your action in square brackets: {known}" if known else "Answer with your action."
            )
        return Observation([{"role": "user", "content": f"{instructions}\n\n{observed}"}])

    async def step(self, reply: Reply) -> StepResult:
        """Return what follows the reply's action, or ask for an action."""
        before = self._reward
        result = await self._step(reply)
        self._turn_rewards.append(self._reward - before)
        return result

    async def _step(self, reply: Reply) -> StepResult:
        if not reply.finished:
            return StepResult(metrics=self._metrics())
        action = self._action(reply.content)
        if action is None:
            self._unread += 1
            self._unread_in_a_row += 1
            said = self._complaint()
            done = self._unread_in_a_row >= self._task.max_unread
        else:
            self._unread_in_a_row = 0
            said, done = await self._call(self._act, action)
        messages = () if done else ({"role": "user", "content": said},)
        return StepResult(messages, done=done, metrics=self._metrics(), cut_off=self._cut_off)

    async def finish(self, end: End) -> Score:
        """Return the sum of the rewards as the score, with those of the turns."""
        reward = self._reward
        if end != "done" and self._task.cut_off_reward is not None:
            reward = self._task.cut_off_reward
        return Score(reward, {"return": self._reward}, self._turn_rewards)

    async def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            env, self._env = self._env, None
            await self._call(env.close)

    async def _call(self, function: Any, *arguments: Any) -> Any:
        return await call(self._task.name, self._task.timeout, function, *arguments)

    def _reset(self, options: dict[str, Any], seed: int) -> str:
        made = self._task.environment
        if isinstance(made, str):
            if "render_mode" not in options and "ansi" in _render_modes(gymnasium.spec(made)):
                options["render_mode"] = "ansi"
            self._env = gymnasium.make(made, **options)
        else:
            self._env = made(**options)
        self._names = self._action_names(self._env.action_space)
        observation, _ = self._env.reset(seed=seed)
        return self._seen(observation)

    def _action_names(self, space: Any) -> tuple[str, ...]:
        task = self._task
        if isinstance(space, Text):
            if task.actions:
                raise ValueError(f"{task.name} takes any text as an action: leave actions out")
            return ()
        if not isinstance(space, Discrete):
            raise ValueError(f"{task.name} takes {space}: actions must be text or a choice (a Discrete space)")
        names = task.actions or ACTIONS.get(task.name.partition("-v")[0]) or ()
        names = names or tuple(str(int(space.start) + n) for n in range(int(space.n)))
        if len(names) != space.n or len({name.lower() for name in names}) != space.n:
            raise ValueError(f"{task.name} has {space.n} actions, and actions names {len(names)}: {', '.join(names)}")
        return names

    def _action(self, content: str) -> Any:
        if not self._names:
            text = content.strip()
            return text if self._env.action_space.contains(text) else None
        move = last_move(content)
        wanted = (content if move is None else move).strip().lower()
        at = next((i for i, name in enumerate(self._names) if name.lower() == wanted), None)
        return None if at is None else int(self._env.action_space.start) + at

    def _complaint(self) -> str:
        if self._names:
            known = " ".join(f"[{name}]" for name in self._names)
            return f"Error: no action was found in the answer; write one of {known}"
        return f"Error: the answer is no action of {self._env.action_space}"

    def _act(self, action: Any) -> tuple[str, bool]:
        observation, reward, terminated, truncated, _ = self._env.step(action)
        self._reward += float(reward)
        self._cut_off = bool(truncated and not terminated)
        return self._seen(observation), bool(terminated or truncated)

    def _seen(self, observation: Any) -> str:
        """Return an observation as text: its own text, the "ansi" rendering, or its numbers."""
        if isinstance(observation, str):
            return observation
        if self._env.render_mode == "ansi":
            return colors_in_words(str(self._env.render())).strip("\n")
        return f"Observation: {_plain(observation)}"

    def _metrics(self) -> dict[str, float]:
        return {"unread_actions": self._unread}


def colors_in_words(text: str) -> str:
    """Replace a terminal's colours, which mark the player's place, by words: `{red S}`, nested `{blue {red S}}`."""

    def word(match: re.Match[str]) -> str:
        codes = [int(code) for code in match[1].split(";") if code.isdigit()]
        names = [_COLOURS.get(code - 10 if 40 <= code <= 47 else code) for code in codes]
        name = next((name for name in names if name), "marked")
        return f"{{{name} {match[2]}}}" if match[2].strip() else f"{{{name}}}"

    count = 1
    while count:
        text, count = _COLOURED.subn(word, text)
    return _CODE.sub("", text)


def _render_modes(spec: Any) -> list[str]:
    entry = spec.entry_point
    made = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    return list(getattr(made, "metadata", {}).get("render_modes", ()))


def _plain(value: Any) -> Any:
    """Return NumPy's numbers as Python's, for printing."""
    if isinstance(value, tuple | list):
        return type(value)(_plain(part) for part in value)
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
