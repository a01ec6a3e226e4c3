"""Code of a user's in runs of several processes: ranks and samplers import it by its name, and a resumed run goes on.

Long: it starts ranks, and a process that samples.
"""

import json
from pathlib import Path

import pytest

from apps.common.cli.extensions import OWN_CODE
from apps.grpo.main import configure, run

SOURCE = '''
from dataclasses import dataclass
from objectives.advantages import dr_grpo
from rollout import Task, TaskRow
from neighbour import SHARE

@dataclass(frozen=True)
class Word:
    """Part of a row: another process must know the class."""
    text: str

class Words:
    def __init__(self, seed, held_out, letters: str = "abc"):
        self.count, self.letters, self.at = held_out, letters, 0
    def tasks(self, step, count):
        self.at = step + 1
        return [TaskRow(f"step-{step}-{i}", {"word": Word(self.letters[i % 3])}) for i in range(count)]
    def held_out(self):
        return [TaskRow(f"held-out-{i}", {"word": Word(self.letters)}) for i in range(self.count)]
    def environment(self, row):
        text = row.data["word"].text
        score = lambda reply, results: len(reply.text) * SHARE
        return Task(({"role": "user", "content": text},), score, cut_off_reward=None)
    def cursor(self):
        return {"at": self.at}
    def restore(self, cursor):
        assert cursor["at"] > 0, cursor
        self.at = cursor["at"]

def advantage(rewards, groups, scale: float = 1.0):
    return scale * dr_grpo(rewards, groups)

def loss(tokens, tau: float = 0.5):
    return -tau * tokens.advantages * tokens.log_probs

def counted(episodes, tasks):
    return {"own/episodes": len(episodes), "own/tasks": len(tasks)}
'''
SMALL = (
    *("--prompts-per-step", "2", "--group-size", "4", "--eval-prompts", "2", "--sampling.max-new-tokens", "8"),
    *("--eval-every", "1", "--save-every", "1", "--max-episode-tokens", "200"),
)
OWN = (
    *("--task-source", "own.py:Words", "--task-source-options", "letters=xyz", "--loss", "own.py:loss"),
    *("--advantage", "own.py:advantage", "--advantage-options", "scale=2", "--metric", "own.py:counted"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BUILD_WORKING_DIRECTORY", raising=False)
    (tmp_path / "own.py").write_text(SOURCE)
    (tmp_path / "neighbour.py").write_text("SHARE = 0.01\n")
    return tmp_path


def check(run_dir: Path, steps: int) -> None:
    """Every step trained, and its metric counted the whole step."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(steps + 1)]
    for row in rows[1:]:
        assert row["train/grad_norm"] > 0
        assert (row["own/episodes"], row["own/tasks"]) == (8, 2)


def test_two_ranks_have_it_and_so_has_a_resumed_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_dir = folder / "run"
    run(configure([*OWN, *SMALL, "--max-steps", "1", "--nproc-per-node", "2", "--run-dir", str(run_dir)]))
    check(run_dir, 1)
    (folder / "own.py").write_text(SOURCE + "# more\n")
    (folder / "else").mkdir()
    monkeypatch.chdir(folder / "else")
    capfd.readouterr()
    run(configure(["--resume", "--run-dir", str(run_dir), "--max-steps", "2", "--loss-options", "tau=0.4"]))
    check(run_dir, 2)
    told = capfd.readouterr().out
    assert f"--loss {folder}/own.py:loss: its file changed since the run's last start" in told
    assert f"--loss {folder}/own.py:loss: its options changed since the run's last start" in told
    first, second = json.loads((run_dir / OWN_CODE).read_text())
    assert [one["options"] for start in (first, second) for one in start if one["kind"] == "loss"] == [
        {"tau": 0.5},
        {"tau": 0.4},
    ]


def test_the_process_that_samples_has_it(folder: Path) -> None:
    words = [*OWN, *SMALL, "--max-steps", "2", "--schedule", "fully_async", "--run-dir", "run"]
    run(configure(words))
    check(folder / "run", 2)
