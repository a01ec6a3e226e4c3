"""verifiers 0.4 with the real package and no network: tools, programs, a multi-turn environment, failures."""

import asyncio
import functools
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from verifiers.v1.harnesses.bash import BashHarness, BashHarnessConfig
from verifiers.v1.harnesses.mini_swe_agent import MiniSWEAgentHarness, MiniSWEAgentHarnessConfig

from rollout.chat.chat import Chat
from rollout.engine import Sampling
from rollout.environments.load_object import load_object
from rollout.episodes.episode import Episode
from rollout.gateway.agents import run_agents
from rollout.gateway.server import TokenGateway
from rollout.gateway.verifiers_agent import InProcessHarness, ProgramHarness, VerifiersAgent, program_harness
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.scripted import ScriptedEngine
from rollout.testing.verifiers_adding import Sums

TOKENIZER = tiny_tokenizer()
CALL = (
    "<tool_call>\n<function=adder_add>\n<parameter=a>\n3\n</parameter>\n<parameter=b>\n{}\n</parameter>\n"
    "</function>\n</tool_call>"
)


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No connection leaves the machine; programs find our packages; caches are the test's."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"), address
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setenv("HOME", str(tmp_path))


def calls_the_tool(text: str) -> str:
    """What the policy says: a call, then what came back."""
    results = re.findall(r"<tool_response>\n(\d+)\n</tool_response>", text)
    return f"It is {results[-1]}." if results else CALL.format(re.findall(r"3\+(\d)\?", text)[-1])


def play(
    agent: VerifiersAgent, says: Callable[[str], str], size: int = 1, row: int = 0, serve: bool = False, **limits: Any
) -> tuple[ScriptedEngine, list[Episode]]:
    """The engine, and the episodes of one task."""
    engine = ScriptedEngine(lambda prompt, turn: encode(says(TOKENIZER.decode(prompt)) + "<|im_end|>"))

    async def run() -> list[Episode]:
        async with TokenGateway(engine, Chat(TOKENIZER)) as gateway:
            sampling = Sampling(seed=1, max_new_tokens=400)
            options: dict[str, Any] = {"size": size, "row": agent.rows()[row], "sampling": sampling} | limits
            if serve:
                async with agent.serving():
                    return await run_agents(agent, gateway, **options)
            return await run_agents(agent, gateway, **options)

    episodes = asyncio.run(asyncio.wait_for(run(), 600))
    assert not [name for name in os.environ if name.startswith("ROLLOUT_GATEWAY")]
    return engine, episodes


def check_tokens(engine: ScriptedEngine, episodes: Sequence[Episode]) -> None:
    """Each answer stands in a segment right after its prompt, and every sampled token is trained once."""
    segments = [segment for episode in episodes for segment in episode.segments]
    for prompt in engine.prompts:
        answer = encode(engine_says(engine, prompt))
        whole = (*prompt, *answer)
        assert any(s.ids[: len(whole)] == whole and all(s.loss_mask[len(prompt) : len(whole)]) for s in segments)
    sampled = sum(len(encode(engine_says(engine, prompt))) for prompt in engine.prompts)
    assert sum(segment.sampled for segment in segments) == sampled


def engine_says(engine: ScriptedEngine, prompt: list[int]) -> str:
    return str(TOKENIZER.decode(engine._reply(prompt, 0)))


@functools.cache
def played_sum(harness: Any) -> tuple[ScriptedEngine, list[Episode]]:
    """One task with tools, to its end: it starts processes, and so is played once."""
    return play(VerifiersAgent(Sums(vf.TasksetConfig(id="sums")), harness), calls_the_tool, row=1)


@pytest.mark.parametrize("harness", [InProcessHarness, ProgramHarness])
def test_a_task_with_tools_is_played_and_scored_by_verifiers(harness: Any) -> None:
    assert len({row.id for row in VerifiersAgent(Sums(vf.TasksetConfig(id="sums")), harness).rows()}) == 3
    engine, (episode,) = played_sum(harness)
    assert (episode.error, episode.end, episode.reward) == (None, "done", 1.0)
    assert episode.score is not None
    assert episode.score.reward_components == {"right": 1.0}
    assert episode.metrics["turns"] == 2
    (segment,) = episode.segments
    text = TOKENIZER.decode(segment.ids)
    assert "<tool_response>\n8\n</tool_response>" in text
    assert "Use the tool." in text
    check_tokens(engine, [episode])


BASH = "<tool_call>\n<function=bash>\n<parameter=command>\n{}\n</parameter>\n</function>\n</tool_call>"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 42 > answer"


class Written(vf.Task):
    """A number has to stand in a file of the working folder."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def right(self, trace: Any, runtime: Any) -> float:
        return float((await runtime.read("answer")).strip() == b"42")


class WrittenTasks(vf.Taskset):
    """One of them."""

    def load(self) -> Iterator[Written]:
        yield Written(vf.TaskData(prompt="Write 42 into the file answer."))


def test_a_harness_whose_agent_runs_commands() -> None:
    """verifiers' bash agent, which tells the model what its commands print, and the reward that reads its files."""
    config = BashHarnessConfig(id="bash", compaction=None)
    agent = VerifiersAgent(WrittenTasks(vf.TasksetConfig(id="written")), program_harness(BashHarness, config))
    engine, (episode,) = play(
        agent,
        lambda text: "Done." if "made it 42" in text else BASH.format("echo 42 > answer; echo made it $(cat answer)"),
    )
    assert (episode.error, episode.reward, episode.metrics["turns"]) == (None, 1.0, 2)
    (segment,) = episode.segments
    assert "<tool_response>\nmade it 42" in TOKENIZER.decode(segment.ids)
    check_tokens(engine, [episode])


def test_mini_swe_agent() -> None:
    """A harness whose program is a package of the registry's; verifiers wants a container, unless it is told."""
    config, tasks = MiniSWEAgentHarnessConfig(id="mini-swe-agent"), WrittenTasks(vf.TasksetConfig(id="written"))
    _, (episode,) = play(VerifiersAgent(tasks, program_harness(MiniSWEAgentHarness, config)), lambda text: "Hello.")
    assert "NEEDS_CONTAINER" in (episode.error or "")
    agent = VerifiersAgent(tasks, program_harness(MiniSWEAgentHarness, config, on_host=True))
    engine, (episode,) = play(agent, lambda text: BASH.format(SUBMIT if "looked" in text else "echo looked"))
    assert (episode.error, episode.reward, episode.metrics["turns"]) == (None, 1.0, 2)
    check_tokens(engine, [episode])


ENVIRONMENT = """
import verifiers.v1 as vf
from rollout.testing.verifiers_adding import Adder


class Hidden(vf.Task):
    pass


class Guessing(vf.Taskset):
    def load(self):
        yield Hidden(vf.TaskData(name="7", prompt="3+4? Use the tool, and then guess: I think of a digit."))

    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]


class GuessingConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()
    critic: vf.AgentConfig = vf.AgentConfig()


class GuessingEnv(vf.Env[GuessingConfig]):
    async def setup(self, agents):
        agents.critic.trainable = False

    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(5):
                if "guess 7" in segment.last_reply or segment.terminated:
                    break
                segment = await interaction.turn("higher")
        interaction.trace.record_reward("guessed", float("guess 7" in segment.last_reply), 2.0)
        await agents.critic.run(Hidden(vf.TaskData(prompt="criticise")))


__all__ = ["Guessing", "GuessingEnv"]
"""


def test_a_multi_turn_environment_with_tools_and_two_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "guessing_words.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = load_object("guessing_words:GuessingEnv", "environment")
    config = load_object("guessing_words:GuessingConfig", "environment")(taskset={"id": "guessing_words"})
    env = environment(config)
    agent = VerifiersAgent(env.taskset, environment=env)

    def says(text: str) -> str:
        if "criticise" in text:
            return "fine"
        if "<tool_response>" not in text:
            return CALL.format(4)
        return f"guess {4 + text.count('higher')}"

    engine, episodes = play(agent, says, size=2, serve=True)
    for episode in episodes:
        assert episode.score is not None
        assert (episode.error, episode.reward, episode.score.reward_components) == (None, 2.0, {"guessed": 2.0})
        assert [segment.agent for segment in episode.segments] == ["player", "critic"]
        assert TOKENIZER.decode(episode.segments[0].ids).count("higher") == 3
    check_tokens(engine, episodes)


class Broken(vf.Task):
    """A task whose reward breaks."""

    @vf.reward  # type: ignore[untyped-decorator]
    async def right(self, trace: Any) -> float:
        raise KeyError("no answer key")


class BrokenTasks(vf.Taskset):
    """One of them."""

    INFINITE = True

    def load(self) -> Iterator[Broken]:
        while True:
            yield Broken(vf.TaskData(prompt="hi"))


def test_what_breaks_in_verifiers_is_a_failure_and_no_zero() -> None:
    with pytest.raises(ValueError, match=r"no end: give a view of it, taskset.take"):
        VerifiersAgent(BrokenTasks(vf.TasksetConfig(id="broken")))
    agent = VerifiersAgent(BrokenTasks(vf.TasksetConfig(id="broken")).take(1))
    _, (episode,) = play(agent, lambda text: "hello")
    assert (episode.score, episode.end) == (None, "failed")
    assert "no answer key" in (episode.error or "")


@pytest.mark.parametrize("harness", [InProcessHarness, ProgramHarness])
@pytest.mark.parametrize("limit", ["max_turns", "max_tokens"])
def test_a_limit_is_truncation_and_no_failure(harness: Any, limit: str) -> None:
    """The gateway refuses the turn after the call, which breaks the rollout; its tokens are trained.

    verifiers' own program sees that the context is full, and ends in order: verifiers scores what there is.
    """
    agent = VerifiersAgent(Sums(vf.TasksetConfig(id="sums")), harness)
    engine, _ = played_sum(harness)
    first = len(engine.prompts[0]) + len(encode(engine_says(engine, engine.prompts[0])))
    most: dict[str, Any] = {limit: {"max_turns": 1, "max_tokens": first + 1}[limit]}
    engine, (episode,) = play(agent, calls_the_tool, row=1, cut_off_reward=-1.0, **most)
    scored = 0.0 if (harness, limit) == (ProgramHarness, "max_tokens") else -1.0
    assert (episode.error, episode.end, episode.reward) == (None, limit, scored)
    assert episode.segments[0].sampled
    check_tokens(engine, [episode])


class Unserved(vf.Task):
    """A task whose tools can't be served at first."""

    asked = 0

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        cls.asked += 1
        if cls.asked == 1:
            raise ConnectionResetError("the tools' server went away")
        return []


class UnservedTasks(vf.Taskset):
    """One of them."""

    def load(self) -> Iterator[Unserved]:
        yield Unserved(vf.TaskData(prompt="hi"))


def test_tools_that_cannot_be_served_are_tried_again() -> None:
    Unserved.asked = 0
    agent = VerifiersAgent(UnservedTasks(vf.TasksetConfig(id="unserved")))
    _, (episode,) = play(agent, lambda text: "hello")
    assert (episode.error, episode.end, episode.attempt) == (None, "done", 1)


def test_a_call_of_no_tool_is_the_models_news() -> None:
    agent = VerifiersAgent(Sums(vf.TasksetConfig(id="sums")))

    def says(text: str) -> str:
        return "I give up." if "there is no tool" in text else CALL.format(4).replace("adder_add", "nothing")

    _, (episode,) = play(agent, says)
    assert (episode.error, episode.reward) == (None, 0.0)
    assert "Error: there is no tool 'nothing'; available: adder_add" in str(episode.messages)
