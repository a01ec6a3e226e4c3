"""Teachers: what they add to a batch, by environment; what is refused; and a small run that learns from one."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.grpo.config import GrpoConfig, TeacherConfig, WarmStart
from apps.grpo.main import configure, run
from apps.grpo.teachers import KEYS, POLICY_TOKENS, Teachers, check_teachers
from apps.grpo.testing.recipe import SHALLOW as RECIPE
from apps.quickstart.tokenizer import build_tokenizer
from engines import EngineConfig, build_engine
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch, tiny_model
from objectives import Distillation
from rollout import Episode, Score
from rollout.chat.segment import Segment
from seqpack.batches.schema import SEVERAL

SEGMENT = Segment((1, 2), (False, True), (0.0, -1.0), (-1, 0))


def engine_of(seed: int) -> Any:
    return build_engine(EngineConfig(device="cpu"), tiny_model(seed=seed), trainable=False)


def episode(task_id: str) -> Episode:
    return Episode("e", task_id, 0, (SEGMENT,), Score(1.0), "done")


@pytest.mark.parametrize("of_policy", [False, True])
def test_each_environment_has_its_teacher(of_policy: bool) -> None:
    batch, policy = tiny_batch([5, 3, 7]), engine_of(0)
    batch["episode"] = torch.tensor([0, 1, 2])
    engines, episodes = (
        {"math": engine_of(1), "code": engine_of(2)},
        [episode(f"{x}/1") for x in ("code", "math", "code")],
    )
    Teachers(engines, 4, of_policy).score(batch, episodes, policy)
    for teacher in engines.values():  # they were put away
        teacher.onload()
    for place, name in enumerate(("code", "math", "code")):
        asked = {"tokens": POLICY_TOKENS} if of_policy else {"top_k": 4}
        want = engines[name].forward(batch, **asked)
        for key, of in zip(KEYS, SEVERAL, strict=True):
            torch.testing.assert_close(batch[key].unbind()[place], want[of].unbind()[place])
    chosen = policy if of_policy else engines["math"]
    assert batch[KEYS[0]].unbind()[1].equal(chosen.forward(batch, top_k=4)[SEVERAL[0]].unbind()[1])
    with pytest.raises(ValueError, match="environment code has no teacher: add --teacher code=DIR"):
        Teachers({"math": engines["math"]}, 4, False).score(batch, episodes, policy)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--teacher", "a", "--objective.kl-coef", "0.1"], "--objective.kl-coef has no effect with --teacher"),
        (["--teacher", "a", "--advantage", "rloo"], "--advantage has no effect with --teacher"),
        (["--distillation.divergence", "jsd"], "--distillation.divergence has no effect without --teacher"),
        (["--teacher-top-k", "3"], "--teacher-top-k has no effect without --teacher"),
        (["--teacher", "a", "--teacher-top-k", "0"], "--teacher-top-k must be at least 1, got 0"),
        (["--teacher", "a", "--teacher-warm-start.steps", "1"], "one of them makes the teacher"),
    ],
)
def test_settings_without_an_effect_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        configure(argv)


def test_a_teacher_of_other_tokens_is_refused(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    tokenizer.add_tokens(["other"])
    with pytest.raises(ValueError, match="has another tokenizer than the model"):
        check_teachers(replace(RECIPE.config, teachers=TeacherConfig((str(tmp_path),))), tokenizer)
    with pytest.raises(ValueError, match="is not NAME=VALUE, such as math=DIR"):
        TeacherConfig((str(tmp_path), f"math={tmp_path}"))


def test_a_run_learns_from_its_teacher_and_not_from_rewards(tmp_path: Path) -> None:
    """An untrained teacher of another seed: the divergence falls, at groups of one."""
    assert RECIPE.make_model is not None
    teacher = RECIPE.make_model(tmp_path / "teacher", 7)
    config: GrpoConfig = replace(
        RECIPE.config,
        run_dir=tmp_path / "run",
        steps=6,
        eval_every=6,
        save_every=6,
        group_size=1,
        mini_batches=2,
        warm_start=WarmStart(),
        teachers=TeacherConfig((str(teacher),), teacher_top_k=16),
        distillation=Distillation("jsd"),
        engine=replace(RECIPE.config.engine, lr=3e-3),
    )
    run(config, RECIPE)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][1:]
    found = [row["train/distill/divergence"] for row in rows]
    assert found[-1] < 0.9 * found[0]
    assert all(row["log_prob_difference_max"] < 1e-3 for row in rows)
