"""Gymnasium's ansi and text environments, played through the real package and `run_episode`."""

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import pytest
from gymnasium.spaces import Box, Text

from rollout.chat.chat import Chat
from rollout.chat.messages import Reply
from rollout.engine import Sampling
from rollout.environments.environment import EnvironmentFactory, EpisodeContext
from rollout.environments.gymnasium_games import GymnasiumTask, colors_in_words
from rollout.environments.sources import TaskRow
from rollout.episodes.episode import Episode
from rollout.episodes.runner import run_group
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.scripted import ScriptedEngine

CHAT = Chat(tiny_tokenizer())


def play(task: EnvironmentFactory, player: Callable[[str, int], str], **options: Any) -> list[Episode]:
    """One group in which `player(text so far, turn)` answers."""

    def reply(prompt: list[int], turn: int) -> list[int]:
        answer = player(CHAT.tokenizer.decode(prompt), turn)
        return [*CHAT.tokenizer(answer, add_special_tokens=False)["input_ids"], CHAT.end_of_turn_id]

    options = {"size": 1, "max_turns": 60} | options
    return asyncio.run(run_group(task, ScriptedEngine(reply), CHAT, Sampling(max_new_tokens=60), **options))


LAKE = ["down", "down", "right", "right", "down", "right"]


def test_frozen_lake_is_crossed() -> None:
    task = GymnasiumTask("FrozenLake-v1", {"is_slippery": False})
    (episode,) = play(task, lambda text, turn: f"The ice... [{LAKE[turn].upper()}]")
    assert (episode.reward, episode.end, episode.metrics["turns"]) == (1.0, "done", 6)
    assert "[left] [down] [right] [up]" in episode.messages[0]["content"]
    assert "{red S}FFF" in episode.messages[0]["content"]
    assert "{red F}HFH" in episode.messages[2]["content"]


def test_the_cliff_is_walked_around() -> None:
    moves = ["up", *["right"] * 11, "down"]
    (episode,) = play(GymnasiumTask("CliffWalking-v1"), lambda text, turn: moves[turn])
    assert (episode.reward, episode.end) == (-13.0, "done")


def test_taxi_and_blackjack_are_playable() -> None:
    (taxi,) = play(GymnasiumTask("Taxi-v4"), lambda text, turn: "[pick up]", max_turns=2)
    assert taxi.end == "max_turns"
    assert taxi.reward in (-20.0, -11.0, -2.0)
    assert re.search(r"\{\w+", taxi.messages[0]["content"])
    (cards,) = play(GymnasiumTask("Blackjack-v1"), lambda text, turn: "stick")
    assert cards.reward in (-1.0, 0.0, 1.0)
    assert re.search(r"Observation: \(\d+, \d+, [01]\)", cards.messages[0]["content"])


def test_a_group_plays_one_game() -> None:
    boards = {
        e.messages[0]["content"] for e in play(GymnasiumTask("Taxi-v4"), lambda t, n: "south", size=3, max_turns=1)
    }
    assert len(boards) == 1
    row = TaskRow("own map", {"options": {"desc": ["SF", "FG"], "is_slippery": False}})
    (episode,) = play(GymnasiumTask("FrozenLake-v1"), lambda text, turn: ["right", "down"][turn], row=row)
    assert (episode.reward, episode.metrics["turns"]) == (1.0, 2)
    seeds = [play(GymnasiumTask("Blackjack-v1"), lambda t, n: "stick", row=TaskRow("t", {"seed": s})) for s in range(5)]
    assert len({episodes[0].messages[0]["content"] for episodes in seeds}) > 1


class Echo(gymnasium.Env):  # type: ignore[misc]
    """A text environment: it wants to hear its own words backwards."""

    observation_space = Text(20)
    action_space = Text(20, charset="abcdefgh ")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.word = "".join(self.np_random.choice(list("abcdefgh"), 5))
        return f"Say it backwards: {self.word}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "You said " + action, float(action == self.word[::-1]), True, False, {}


def test_a_text_environment_of_ones_own() -> None:
    def player(text: str, turn: int) -> str:
        found = re.search(r"backwards: (\w+)", text)
        assert found is not None
        return " " + found[1][::-1]

    (episode,) = play(GymnasiumTask(Echo), player)
    assert (episode.reward, episode.end) == (1.0, "done")
    assert episode.messages[0]["content"].startswith("You play Echo. Answer with your action.\n\nSay it backwards")
    (episode,) = play(GymnasiumTask(Echo, instructions="Go."), lambda text, turn: "WRONG LETTERS")
    assert (episode.end, episode.metrics["unread_actions"], episode.reward) == ("done", 3, 0.0)
    assert "is no action of Text" in episode.messages[2]["content"]


def test_what_is_no_action_is_told_and_may_be_tried_again() -> None:
    task = GymnasiumTask("FrozenLake-v1", {"is_slippery": False}, max_unread=2)
    answers = ["north", LAKE[0], "north", *LAKE[1:]]  # two, but not in a row
    (episode,) = play(task, lambda text, turn: answers[turn])
    assert (episode.reward, episode.metrics["unread_actions"]) == (1.0, 2)
    assert episode.score is not None
    assert episode.score.turn_rewards == (*[0.0] * (len(answers) - 1), 1.0)
    assert "write one of [left] [down] [right] [up]" in episode.messages[2]["content"]


def test_limits_reach_the_score() -> None:
    cliff = GymnasiumTask("CliffWalking-v1")
    assert play(cliff, lambda text, turn: "up", max_turns=2)[0].reward == -2.0
    assert play(GymnasiumTask("CliffWalking-v1", cut_off_reward=-9.0), lambda t, n: "up", max_turns=2)[0].reward == -9.0
    short = GymnasiumTask("CliffWalking-v1", {"max_episode_steps": 3}, cut_off_reward=-9.0)  # gymnasium's own limit
    (episode,) = play(short, lambda text, turn: "up")
    assert episode.score is not None
    assert (episode.end, episode.reward, episode.score.reward_components) == ("limit", -9.0, {"return": -3.0})

    async def cut_off() -> bool:
        game = cliff()
        await game.open(EpisodeContext("t"))
        outcome = await game.step(Reply("[u", "[u", finished=False))
        await game.close()
        await game.close()
        return outcome.done

    assert asyncio.run(cut_off())


class Slow(Echo):
    """Takes its time."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(3)
        return super().step(action)


def test_an_environment_that_hangs_fails_its_episode_alone() -> None:
    (episode,) = play(GymnasiumTask(Slow, timeout=0.2), lambda text, turn: "a", attempts=1)
    assert episode.end == "failed"
    assert "gave no answer within 0.2 s" in (episode.error or "")


class Pixels(Echo):
    """Nothing a language model can act on."""

    action_space = Box(0, 1, (2,))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GymnasiumTask("NoSuchGame-v0"), "no environment 'NoSuchGame-v0'"),
        (lambda: GymnasiumTask("CartPole-v1", max_unread=0), "max_unread must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (GymnasiumTask("CartPole-v1", actions=("left",)), "has 2 actions, and actions names 1"),
        (GymnasiumTask("CartPole-v1", actions=("a", "A")), "has 2 actions"),
        (GymnasiumTask(Echo, actions=("a",)), "takes any text"),
        (GymnasiumTask(Pixels), r"actions must be text or a choice"),
    ],
)
def test_what_cannot_be_played_fails_with_the_reason(task: GymnasiumTask, message: str) -> None:
    (episode,) = play(task, lambda text, turn: "x")
    assert re.search(message, episode.error or "")


def test_colours_become_words() -> None:
    assert colors_in_words("|\x1b[35m\x1b[43mY\x1b[0m\x1b[0m|\x1b[34mB") == "|{magenta {yellow Y}}|B"
    assert colors_in_words("a\x1b[41mS\x1b[0mF\x1b[43m \x1b[0m \x1b[34;1mB\x1b[0m") == "a{red S}F{yellow} {blue B}"
