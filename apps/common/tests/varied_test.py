"""A shrunk run trains: its reward varies, every trained tensor moves, and where one does not it fails."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from apps.common.run.idle_steps import IdleRunError
from apps.common.shrink.command import check_nothing_dropped
from apps.common.shrink.fields import ProcessLimit
from apps.common.shrink.flag import parse_shrink_flag, without_vllm
from apps.common.shrink.varied import LINE, PARTS, VariedTasks
from apps.grpo.main import configure, main, shrunk
from apps.grpo.registry import recipes, spec_of
from apps.grpo.shrink import shrink as module
from apps.grpo.testing.recipe import AsciiTasks
from rollout import Reply, Task

SMALL = ("--recipe", "math", "--shrink", "--max-steps", "2")


@pytest.mark.parametrize("name", recipes())
def test_one_flag_runs_any_recipe_without_vllm(name: str) -> None:
    flags, most = parse_shrink_flag(without_vllm(["--recipe", name, "--shrink", "--no-vllm"]))
    assert most == ProcessLimit()
    small, recipe, _ = shrunk(configure(flags), ProcessLimit())
    assert small.cluster.rollout.engine == "native"
    check_nothing_dropped(spec_of(small, recipe))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--no-vllm"], "--no-vllm is of shrunk runs: use --rollout.engine native, or add --shrink"),
        (["--shrink=2", "--no-vllm", "--rollout.engine=vllm"], "--no-vllm and --rollout.engine both name a sampler"),
    ],
)
def test_a_flag_that_says_nothing_is_refused(flags: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        without_vllm(flags)


def test_the_reward_is_the_recipes_own_and_a_part_by_the_text(tmp_path: Path) -> None:
    """Of answers that are cut off too."""
    del tmp_path

    async def reward_of(text: str, end: Any) -> float:
        environment = VariedTasks(Sums(1)).environment(Sums(1).held_out()[0])()
        await environment.step(Reply(text, text, finished=True))
        score = await environment.finish(end)
        assert score.reward_components["shrink"] == score.reward - (end == "done")
        return float(score.reward)

    texts = [f"answer {n}" for n in range(40)]
    for end, own in (("done", 1), ("length", 0)):
        rewards = [asyncio.run(reward_of(text, end)) for text in texts]
        assert rewards == [asyncio.run(reward_of(text, end)) for text in texts]
        assert {PARTS * (reward - own) for reward in rewards} == set(range(PARTS))


class Sums(AsciiTasks):
    """Tasks whose reward is 1 for each answer that is not cut off."""

    def environment(self, row: Any) -> Any:
        """Return that task."""
        del row
        return Task((), lambda reply, results: 1.0)


def test_a_recipe_as_typed_moves_every_weight(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--run-dir", str(tmp_path / "run")])
    output = capsys.readouterr().out
    assert LINE in output
    assert "trained nothing" not in output
    moved = next(line for line in output.splitlines() if line.startswith("weights: ")).split()
    assert moved[1] == moved[3] != "0"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["train/grad_norm"] > 0 for row in rows[1:])


def test_a_run_that_moves_no_weight_fails_and_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a random model's own rewards, all 0; and with a rate of 0."""
    with pytest.raises(IdleRunError, match=r": 0 of \d+ trained tensors .* did not reach: lm_head|model"):
        main([*SMALL, "--learning-rate", "0", "--run-dir", str(tmp_path / "rate")])
    monkeypatch.setattr(module, "with_varied_reward", lambda make_tasks: make_tasks)
    with pytest.raises(IdleRunError, match=r": 0 of \d+ trained tensors "):
        main([*SMALL, "--run-dir", str(tmp_path / "same")])
