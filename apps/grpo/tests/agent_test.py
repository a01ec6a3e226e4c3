"""Agents of one's own are trained by the app (`--environment FILE.py:NAME`): of the openai client, and of verifiers."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apps.common.testing.weight_delta import assert_trained
from apps.grpo.config import PluginConfig
from apps.grpo.main import run
from apps.grpo.recipes.environment import RECIPE
from rollout import Sampling
from rollout.environments.load_object import load_object

AGENT = """
import openai

from rollout import AgentSlot, AgentTask


async def ask_twice(slot: AgentSlot) -> float:
    async with openai.AsyncOpenAI(base_url=slot.base_url, api_key=slot.api_key) as api:
        messages = [{"role": "user", "content": "say something"}]
        for _ in range(2):
            answer = await api.chat.completions.create(model=slot.model, messages=messages)
            messages += [answer.choices[0].message, {"role": "user", "content": "more"}]
    if (slot.context.index, slot.context.attempt) == (1, 0):
        raise ConnectionError("the judge is away")
    if slot.context.task_id == "agent-0":
        raise RuntimeError("no such exam")
    if slot.context.index == 2:
        raise RuntimeError("no luck")
    said = messages[-2].content
    return sum(map(str.isascii, said)) / max(1, len(said))


agent = AgentTask(ask_twice)
"""


def one_step(run_dir: Path, *environments: str, eval_prompts: int) -> Any:
    """The episodes and the metrics that a step of two prompts leaves behind."""
    config = replace(
        RECIPE.config,
        plugins=PluginConfig(environment=environments),
        run_dir=run_dir,
        steps=1,
        prompts_per_step=2,
        group_size=4,
        log_groups=2,
        max_turns=2,
        sampling=Sampling(max_new_tokens=6),
        data=replace(RECIPE.config.data, eval_prompts=eval_prompts),
    )
    run(config, RECIPE)
    assert_trained(run_dir)
    files = [(run_dir / name).read_text() for name in ("episodes.jsonl", "metrics.jsonl")]
    return tuple([json.loads(line) for line in file.splitlines()] for file in files)


def test_an_agent_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of each group loses its connection and is played again; one fails, and a held-out one: the log says so."""
    (tmp_path / "mine.py").write_text(AGENT)
    episodes, metrics = one_step(tmp_path / "run", f"{tmp_path}/mine.py:agent", eval_prompts=2)
    assert "training" in {episode["split"] for episode in episodes}
    for episode in episodes:
        assert "".join(episode["tokens"]).count("<|im_start|>assistant") == 2
        assert 2 <= sum(episode["mask"]) <= 12
    played = Counter((e["metadata"]["attempt"], e["error"]) for e in episodes if e["split"] == "training")
    assert played == {(0, None): 4, (1, None): 2, (1, "the agent raised RuntimeError: no luck"): 2}
    said = capsys.readouterr().out
    assert "step 1: 2 of 8 episodes failed: 2 x the agent raised RuntimeError: no luck" in said
    for step in (0, 1):
        assert f"step {step}, held out: 1 of 2 episodes failed: 1 x the agent raised RuntimeError: no such exam" in said
    assert metrics[-1]["train/grad_norm"] > 0


TASKSET = """
import verifiers.v1 as vf

from rollout import AgentTask
from rollout.gateway.verifiers_agent import VerifiersAgent


class Say(vf.Task):
    @vf.reward
    async def ascii(self, trace) -> float:
        said = trace.nodes[-1].message.content or ""
        return sum(map(str.isascii, said)) / max(1, len(said))


class Words(vf.Taskset):
    def load(self):
        for word in ("one", "two", "three", "four"):
            yield Say(vf.TaskData(name=word, prompt=f"say {word}"))


words = VerifiersAgent(Words(vf.TasksetConfig(id="words")))
again = AgentTask(words)
"""


def test_a_taskset_of_verifiers_is_trained_and_keeps_its_tasks_apart(tmp_path: Path) -> None:
    """Twice in one run, by itself and as an AgentTask: the taskset's own ids are what it is asked for."""
    place = tmp_path / "tasksets.py"
    place.write_text(TASKSET)
    keys = {row.id for row in load_object(f"{place}:words", "environment").rows()}
    episodes, metrics = one_step(tmp_path / "run", f"{place}:words", f"{place}:again", eval_prompts=1)
    trained = [episode for episode in episodes if episode["split"] == "training"]
    assert [episode["error"] for episode in episodes] == [None] * len(episodes)
    places = Counter(tuple(episode["metadata"]["task"].split("/")) for episode in trained)
    assert sorted(name for name, _ in places) == ["again", "words"]
    assert set(places.values()) == {4}
    assert {key for _, key in places} <= keys
    assert all(set(episode["parts"]) == {"ascii"} and sum(episode["mask"]) for episode in trained)
    assert metrics[-1]["train/grad_norm"] > 0
    assert {"eval/reward/words", "eval/reward/again"} <= set(metrics[-1])
