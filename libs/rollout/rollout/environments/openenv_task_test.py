"""OpenEnv with the real package over loopback: its server, its client, a policy that plays."""

import asyncio
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from rollout.chat.chat import Chat
from rollout.engine import Sampling
from rollout.environments.openenv_task import OpenEnvTask
from rollout.environments.sources import TaskRow
from rollout.episodes.episode import Episode
from rollout.episodes.runner import run_group
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.scripted import ScriptedEngine

TOKENIZER = tiny_tokenizer()


class Guess(Action):  # type: ignore[misc]
    """A number."""

    message: str


class Hint(Observation):  # type: ignore[misc]
    """What is said of it."""

    text: str
    number: int | None = None


class Guessing(Environment[Guess, Hint, State]):  # type: ignore[misc]
    """A number from 1 to 9 by the seed; each guess costs a tenth."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    closed = 0

    def __init__(self) -> None:
        super().__init__()
        self._number = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Hint:
        """Draw the number."""
        self._number = options.get("number", (seed or 0) % 9 + 1)
        return Hint(text=f"Guess, {options.get('name', 'player')}.")

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Hint:
        """Compare; a word breaks it."""
        guess = int(action.message)
        if guess == self._number:
            return Hint(text="Right.", number=guess, done=True, reward=1.0)
        return Hint(text="higher" if guess < self._number else "lower", reward=-0.1)

    @property
    def state(self) -> State:
        """The state."""
        return State()

    def close(self) -> None:
        """Count."""
        Guessing.closed += 1


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        until = time.monotonic() + 60
        while not server.started and time.monotonic() < until:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(60)


def bisect(text: str) -> str:
    low, high, guess = 1, 9, 5
    for word in re.findall("higher|lower", text):
        low, high = (guess + 1, high) if word == "higher" else (low, guess - 1)
        guess = (low + high) // 2
    return str(guess)


def play(
    task: Any,
    says: Callable[[str], str] = bisect,
    size: int = 1,
    options: Mapping[str, Any] | None = None,
    **limits: Any,
) -> list[Episode]:
    def answer(prompt: Any, turn: int) -> list[int]:
        return list(TOKENIZER(says(TOKENIZER.decode(prompt)) + "<|im_end|>", add_special_tokens=False)["input_ids"])

    row = TaskRow("game", {"options": dict(options or {})})
    group = run_group(task, ScriptedEngine(answer), Chat(TOKENIZER), Sampling(seed=1), size=size, row=row, **limits)
    return asyncio.run(asyncio.wait_for(group, 300))


@pytest.mark.parametrize("number", [1, 5, 6])
def test_episodes_are_sessions_of_their_own(url: str, number: int) -> None:
    before = Guessing.closed
    task = OpenEnvTask(url, observation="text", instructions="A number from 1 to 9.")
    episodes = play(task, size=4, options={"number": number, "name": "Ada"}, max_turns=9)
    guesses = {1: 3, 5: 1, 6: 3}[number]
    for episode in episodes:
        assert (episode.error, episode.end, episode.metrics["turns"]) == (None, "done", guesses)
        assert episode.reward == pytest.approx(1.0 - 0.1 * (guesses - 1))
        assert "A number from 1 to 9.\n\nGuess, Ada." in TOKENIZER.decode(episode.segments[0].ids)
    until = time.monotonic() + 60
    while Guessing.closed < before + 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert Guessing.closed >= before + 4


def test_a_group_plays_one_game_by_its_seed(url: str) -> None:
    episodes = play(OpenEnvTask(url), size=3, max_turns=9)
    assert len({(episode.reward, episode.metrics["turns"]) for episode in episodes}) == 1
    assert '{"text": "Guess, player.", "number": null}' in TOKENIZER.decode(episodes[0].segments[0].ids)


def test_actions_and_observations_by_functions(url: str) -> None:
    def action(text: str) -> dict[str, str] | None:
        found = re.search(r"\[(\d)\]", text)
        return {"message": found[1]} if found else None

    task = OpenEnvTask(url, action=action, observation=lambda fields: f"<{fields['text']}>")
    (episode,) = play(task, lambda text: "[3]" if "no action" in text else "three", options={"number": 3}, max_turns=5)
    assert (episode.error, episode.reward, episode.metrics["unread_actions"]) == (None, 1.0, 1)
    (episode,) = play(task, lambda text: "three", max_turns=9)
    assert (episode.end, episode.reward, episode.metrics["turns"]) == ("done", 0.0, 3)


def test_a_limit_of_the_run_and_its_reward(url: str) -> None:
    (episode,) = play(OpenEnvTask(url, cut_off_reward=-1.0), lambda text: "9", options={"number": 1}, max_turns=2)
    assert (episode.end, episode.reward) == ("max_turns", -1.0)
    assert episode.score is not None
    assert episode.score.reward_components["return"] == pytest.approx(-0.2)


def test_what_breaks_on_the_server_is_no_zero(url: str) -> None:
    (episode,) = play(OpenEnvTask(url), lambda text: "a word")
    assert (episode.score, episode.end) == (None, "failed")
    assert "invalid literal" in (episode.error or "")
    (episode,) = play(OpenEnvTask(url, observation="words"))
    assert "has no field 'words'; it has text, number" in (episode.error or "")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (episode,) = play(OpenEnvTask(f"http://127.0.0.1:{port}"))
    assert (episode.score, episode.end) == (None, "failed")


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="address of a server"):
        OpenEnvTask("guessing")
    with pytest.raises(ValueError, match="max_unread"):
        OpenEnvTask("http://127.0.0.1:1", max_unread=0)
