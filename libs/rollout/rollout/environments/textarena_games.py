"""TextArena's single-player games: `TextArenaTask("TowerOfHanoi-v0")` is an environment factory.

Needs the extra `textarena`. Games that download their words (Wordle, Hangman, ...) are not for machines without a
network; Hanoi, FrozenLake, Mastermind, Sokoban and Minesweeper need nothing.
"""

import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rollout.extras import missing_extra_message

try:
    import textarena
except ImportError as error:
    raise ImportError(missing_extra_message("TextArena's games need textarena", "textarena")) from error

from rollout.chat.messages import Reply
from rollout.environments.blocking import call
from rollout.environments.environment import End, EpisodeContext, Observation, Score, StepResult
from rollout.environments.moves import game_seed, last_move

INSTRUCTIONS = "Think first if you like; then give your move in square brackets, in the form that the game asks for."
_RANDOM = threading.Lock()  # games use Python's global generator: they run one at a time, each with a state of its own


@dataclass(frozen=True)
class TextArenaTask:
    """A game by its id; called, it makes the environment of one episode.

    `options` go to `textarena.make`. The game's feedback is the user's turn; of a reply, the last square brackets are
    the move. The reward is the game's own at its end, 0 to 1; `cut_off_reward` where a limit ended the episode.
    A call of the game that takes longer than `timeout` seconds fails the episode, to be tried again.

    Raises ValueError for an id that TextArena does not have.
    """

    instant: ClassVar[bool] = True  # every call of a game has a thread
    id: str
    options: Mapping[str, Any] = field(default_factory=dict)
    instructions: str = INSTRUCTIONS
    cut_off_reward: float = 0.0
    timeout: float = 120.0

    def __post_init__(self) -> None:
        known = textarena.envs.registration.ENV_REGISTRY
        if self.id not in known:
            family = self.id.split("-")[0]
            close = [name for name in known if name.startswith(family)][:5]
            raise ValueError(f"TextArena has no game {self.id!r}" + (f"; it has {', '.join(close)}" if close else ""))

    def __call__(self) -> "TextArenaEnvironment":
        """Return an episode of this game."""
        return TextArenaEnvironment(self)


class TextArenaEnvironment:
    """One game of TextArena."""

    def __init__(self, task: TextArenaTask) -> None:
        self._task = task
        self._game: Any = None
        self._random: Any = None
        self._invalid = 0

    async def open(self, context: EpisodeContext) -> Observation:
        """Make the game with the task's seed and return its first text."""
        board = await self._call(self._reset, game_seed(context))
        return Observation([{"role": "user", "content": f"{board}\n\n{self._task.instructions}"}])

    async def step(self, reply: Reply) -> StepResult:
        """Make the move of the reply and return the game's response."""
        if not reply.finished:
            return StepResult(metrics=self._metrics())
        move = last_move(reply.content)
        done, text = await self._call(self._move, reply.content.strip() if move is None else f"[{move}]")
        return StepResult(() if done else ({"role": "user", "content": text},), done=done, metrics=self._metrics())

    async def finish(self, end: End) -> Score:
        """Return the game's reward as the score."""
        if end != "done":
            return Score(self._task.cut_off_reward, {"game": self._task.cut_off_reward})
        rewards, _ = await self._call(self._game.close)
        reward = float((rewards or {}).get(0, 0.0))
        return Score(reward, {"game": reward})

    async def close(self) -> None:
        """Drop the game."""
        self._game = None

    async def _call(self, function: Any, *arguments: Any) -> Any:
        return await call(self._task.id, self._task.timeout, self._with_own_random, function, *arguments)

    def _with_own_random(self, function: Any, *arguments: Any) -> Any:
        with _RANDOM:
            outside = random.getstate()
            if self._random is not None:
                random.setstate(self._random)
            try:
                return function(*arguments)
            finally:
                self._random = random.getstate()
                random.setstate(outside)

    def _reset(self, seed: int) -> str:
        game = textarena.make(self._task.id, **self._task.options)
        while isinstance(game, textarena.Wrapper):  # they repeat the whole history at every turn
            game = game.env
        self._game = game
        random.seed(seed)
        game.reset(num_players=1, seed=seed)
        return self._new_text()

    def _move(self, move: str) -> tuple[bool, str]:
        errors = self._game.state.error_count
        done, _ = self._game.step(move)
        info = self._game.state.game_info[0]
        self._invalid += int(self._game.state.error_count > errors or bool(done and info.get("invalid_move")))
        return done, self._new_text()

    def _new_text(self) -> str:
        """Return the game's text since the last call, without the player's own moves."""
        _, observations = self._game.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(text.strip() for _, text, kind in observations if kind != own)

    def _metrics(self) -> dict[str, float]:
        return {"invalid_moves": self._invalid}
