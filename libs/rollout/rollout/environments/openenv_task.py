"""Environments of OpenEnv, behind its servers: `OpenEnvTask("http://127.0.0.1:8000")` is an environment factory.

Needs the extra `openenv`. The server (a container, a Space, a process) is yours; each episode is a session of its own
there, over a WebSocket, with openenv's own client.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.extras import missing_extra_message

try:
    from openenv.core.generic_client import GenericEnvClient
except ImportError as error:
    raise ImportError(missing_extra_message("environments of OpenEnv need openenv", "openenv")) from error

from rollout.chat.messages import Reply
from rollout.environments.environment import End, EpisodeContext, Observation, Score, StepResult
from rollout.environments.moves import game_seed


@dataclass(frozen=True)
class OpenEnvTask:
    """An environment by its server's address; called, it makes the environment of one episode.

    `action` is the field of the action that takes the reply's content, or a function of that text which returns the
    whole action (None: there is none in it, which the model is told). `observation` is the field that the model reads
    (None: all fields but metadata, as JSON), or a function of these. `instructions` stand before the first one. A row's
    `data["options"]` go to the server's reset, beside the task's seed. The reward is the sum of the rewards; with
    `cut_off_reward`, that where a limit of the run ended the episode. After `max_unread` replies in a row without an
    action the episode is done. The server has `timeout` seconds for an answer.
    """

    url: str
    action: str | Callable[[str], Mapping[str, Any] | None] = "message"
    observation: str | Callable[[Mapping[str, Any]], str] | None = None
    instructions: str = ""
    cut_off_reward: float | None = None
    max_unread: int = 3
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.max_unread < 1:
            raise ValueError(f"max_unread must be at least 1, got {self.max_unread}")
        if not self.url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError(f"url is the address of a server, such as http://127.0.0.1:8000, got {self.url!r}")

    def __call__(self) -> "OpenEnvEnvironment":
        """Return the environment of one episode."""
        return OpenEnvEnvironment(self)


class OpenEnvEnvironment:
    """One episode of an OpenEnv server."""

    def __init__(self, task: OpenEnvTask) -> None:
        self._task = task
        self._client = GenericEnvClient(base_url=task.url, message_timeout_s=task.timeout)
        self._reward = 0.0
        self._unread = self._unread_in_a_row = 0

    async def open(self, context: EpisodeContext) -> Observation:
        """Connect and reset with the task's seed."""
        await self._client.connect()
        options = {"seed": game_seed(context), **context.data.get("options", {})}
        result = await self._client.reset(**options)
        texts = (self._task.instructions, self._seen(result.observation))
        return Observation([{"role": "user", "content": "\n\n".join(text for text in texts if text)}])

    async def step(self, reply: Reply) -> StepResult:
        """Return what follows the reply's action, or ask for an action."""
        if not reply.finished:
            return StepResult(metrics=self._metrics())
        made = self._task.action
        action = {made: reply.content} if isinstance(made, str) else made(reply.content)
        if action is None:
            self._unread += 1
            self._unread_in_a_row += 1
            said, done = "Error: no action was found in the answer.", self._unread_in_a_row >= self._task.max_unread
        else:
            self._unread_in_a_row = 0
            result = await self._client.step(dict(action))
            self._reward += float(result.reward or 0.0)
            said, done = self._seen(result.observation), bool(result.done)
        messages = () if done else ({"role": "user", "content": said},)
        return StepResult(messages, done=done, metrics=self._metrics())

    async def finish(self, end: End) -> Score:
        """Return the sum of the rewards as the score."""
        cut_off = self._task.cut_off_reward
        return Score(self._reward if end == "done" or cut_off is None else cut_off, {"return": self._reward})

    async def close(self) -> None:
        """End the server's session."""
        await self._client.close()

    def _seen(self, observation: Mapping[str, Any]) -> str:
        fields = {name: value for name, value in observation.items() if name != "metadata"}  # the server's own
        shown = self._task.observation
        if callable(shown):
            return shown(fields)
        if shown is None:
            return json.dumps(fields, ensure_ascii=False)
        if shown not in fields:
            raise ValueError(f"the server's observation has no field {shown!r}; it has {', '.join(fields)}")
        return str(fields[shown])

    def _metrics(self) -> dict[str, float]:
        return {"unread_actions": self._unread}
