"""Code of a user's in the actors of a real Ray cluster, which play the episodes: environment, reward and tool.

By hand: `bazel test //apps/grpo:tests/own_code_ray_test`. Each writes down the process that it runs in.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from apps.grpo.main import configure, run
from apps.quickstart.model import ensure_tiny_model
from rollout.workers.ray_local import SMALL_STORE, local_ray

SOURCE = """
import os
from pathlib import Path
from rollout import Observation, Score, StepResult, Tool
from neighbour import WORTH

HERE = Path(__file__).parent

def seen(what):
    (HERE / f"{what}-{os.getpid()}").touch()

class Letters:
    def __init__(self, word: str = "a"):
        self.word = word
    async def open(self, context):
        return Observation([{"role": "user", "content": self.word}])
    async def step(self, reply):
        seen("environment")
        self.length = len(reply.text)
        return StepResult((), done=True)
    async def finish(self, end):
        return Score(self.length * WORTH)
    async def close(self):
        pass

def reward(reply, reference, end, share: float = 1.0):
    seen("reward")
    return share * len(reply.text) * WORTH

def lookup(key: str = "x") -> Tool:
    seen("tool")
    schema = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
    return Tool("look_up", "Look up a word.", schema, lambda word: key)
"""
SMALL = (
    *("--prompts-per-step", "2", "--group-size", "4", "--eval-prompts", "2", "--sampling.max-new-tokens", "8"),
    *("--eval-every", "1", "--save-every", "1", "--max-steps", "1", "--trainer.device", "cpu"),
    *("--rollout.ray-workers", "2"),
)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray(cpus=2, store_bytes=SMALL_STORE):
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BUILD_WORKING_DIRECTORY", raising=False)
    (tmp_path / "own.py").write_text(SOURCE)
    (tmp_path / "neighbour.py").write_text("WORTH = 0.5\n")
    return tmp_path


def processes(folder: Path, what: str) -> set[int]:
    return {int(path.name.partition("-")[2]) for path in folder.glob(f"{what}-*")}


def check(folder: Path, *names: str) -> None:
    """Assert that both actors ran each of them, this process no more than a tool's schema, and that a step trained."""
    for name in names:
        there = processes(folder, name)
        assert len(there - {os.getpid()}) == 2, name
        assert name == "tool" or os.getpid() not in there, name
    row = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["train/grad_norm"] > 0


def test_an_environment_is_played_in_the_actors(folder: Path) -> None:
    words = ["--environment", "own.py:Letters", "--environment-options", "word=b", "--run-dir", "run"]
    run(configure([*words, *SMALL, "--max-episode-tokens", "200"]))
    check(folder, "environment")


def test_rewards_and_tools_are_in_the_actors(folder: Path) -> None:
    rows = [{"question": f"{i}?", "answer": str(i)} for i in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [
        "--recipe",
        "math",
        "--model",
        str(ensure_tiny_model(folder / "model", 0)),
        "--data",
        "rows.jsonl",
        "--reward",
        "own.py:reward",
    ]
    words += ["--reward-options", "share=2", "--tool", "own.py:lookup", "--tool-options", "key=y", "--max-turns", "2"]
    sizes = ["--max-episode-tokens", "600", "--max-prompt-tokens", "400"]
    run(configure([*words, *SMALL, *sizes, "--run-dir", "run"]))
    check(folder, "reward", "tool")
