"""Privileged prompts: a teacher scores the policy's answer behind another prompt; what is refused; a run with one."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.common.data.prompts import Prompt
from apps.grpo.config import DataConfig, GrpoConfig, TeacherConfig
from apps.grpo.main import configure, run
from apps.grpo.recipes import math
from apps.grpo.tasks.privileged import PrivilegedPrompts, check_privileged
from apps.grpo.tasks.prompt_tasks import PromptTasks
from apps.grpo.teachers import KEYS, POLICY_TOKENS, Teachers
from apps.grpo.testing.recipe import SHALLOW
from apps.quickstart.tokenizer import build_tokenizer
from engines import EngineConfig, build_engine
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_model
from objectives import Distillation
from rollout import Chat, Episode, Score, to_batch
from rollout.chat.segment import Segment
from rollout.testing.stock_server import stock_server
from seqpack import make_batch
from seqpack.batches.schema import SEVERAL

TOKENIZER = build_tokenizer()
TEMPLATE = "{prompt} It is {hint}."
PROMPTS = [Prompt(({"role": "user", "content": f"{n}+1?"},), "0", n, {"hint": "9" * n}, f"row {n}") for n in (1, 2, 3)]
ANSWERS = [[7, 8, 9], [5], [6, 4, 7, 3]]


def rendered(text: str) -> list[int]:
    """The tokens of a prompt, by the tokenizer's own means."""
    ids = TOKENIZER.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )
    return [int(x) for x in ids]


def episodes(answers: list[list[int]]) -> list[Episode]:
    made = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        before = rendered(prompt.messages[0]["content"])
        count, new = len(before) + len(answer), len(answer)
        segment = Segment(
            (*before, *answer),
            (False,) * len(before) + (True,) * new,
            (-1.0,) * count,
            (-1,) * len(before) + (0,) * new,
        )
        made.append(Episode("e", f"row-{prompt.row}", 0, (segment,), Score(1.0), "done"))
    return made


def engine_of(seed: int, trainable: bool = False) -> Any:
    model = tiny_model(seed=seed, vocab_size=1 + max(TOKENIZER.get_vocab().values()))
    return build_engine(EngineConfig(device="cpu", lr=1e-2), model, trainable=trainable)


def prompts(template: str = TEMPLATE) -> PrivilegedPrompts:
    return PrivilegedPrompts({f"row-{p.row}": p for p in PROMPTS}, Chat(TOKENIZER), template)


@pytest.mark.parametrize("itself", [True, False])
@pytest.mark.parametrize("of_policy", [True, False])
def test_the_teacher_scores_the_answer_behind_the_privileged_prompt(itself: bool, of_policy: bool) -> None:
    """Against rows written out by hand, one at a time."""
    policy, other = engine_of(0), engine_of(1)
    made = episodes(ANSWERS)
    batch = to_batch(made)
    Teachers({"": None if itself else other}, 4, of_policy, prompts()).score(batch, made, policy)
    teacher = policy if itself else other
    teacher.onload()
    for place, (prompt, answer) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        plain = rendered(prompt.messages[0]["content"])
        told = rendered(f"{prompt.messages[0]['content']} It is {prompt.columns['hint']}.")
        row: dict[str, Any] = {"input_ids": told + answer, "loss_mask": [False] * len(told) + [True] * len(answer)}
        if of_policy:
            alone = make_batch(
                [{"input_ids": plain + answer, "loss_mask": [False] * len(plain) + [True] * len(answer)}]
            )
            chosen = policy.forward(alone, top_k=4)[SEVERAL[0]].unbind()[0][:, len(plain) :]
            row[POLICY_TOKENS] = torch.cat([torch.full((4, len(told)), -1), chosen], 1)
        want = teacher.forward(make_batch([row]), **({"tokens": POLICY_TOKENS} if of_policy else {"top_k": 4}))
        for key, of in zip(KEYS, SEVERAL, strict=True):
            got, expected = batch[key].unbind()[place], want[of].unbind()[0]
            torch.testing.assert_close(got[..., len(plain) :], expected[..., len(told) :], rtol=1e-4, atol=1e-5)


def test_the_policy_learns_what_it_would_say_had_it_been_told() -> None:
    """The divergence of what it says from what it would say falls, and not for want of a difference."""
    policy = engine_of(0, trainable=True)
    made, found = episodes(ANSWERS), []
    batch = to_batch(made)
    Teachers({"": None}, 16, False, prompts()).score(batch, made, policy)
    for _ in range(20):
        found.append(policy.train_batch(batch, Distillation())["distill/divergence"])
    assert found[0] > 1e-3
    assert found[-1] < 0.2 * found[0]


def test_what_can_not_be_told_is_refused() -> None:
    made = episodes(ANSWERS)
    with pytest.raises(ValueError, match=r"template names 'secret', and row 1 has hint"):
        prompts("{prompt} {secret}").longest()
    other = [replace(made[0], task_id="row-3"), *made[1:]]
    with pytest.raises(ValueError, match="the row of row-3 does not begin with its prompt"):
        prompts().extended(to_batch(other), other, None)
    tasks = PromptTasks(PROMPTS, [], lambda *_: 0.0)
    config = GrpoConfig(max_turns=1, teachers=TeacherConfig(("self",), teacher_prompt_template=TEMPLATE))
    check_privileged(config, tasks, Chat(TOKENIZER))
    with pytest.raises(ValueError, match=re.escape("raise --max-episode-tokens")):
        check_privileged(replace(config, max_episode_tokens=config.sampling.max_new_tokens + 1), tasks, Chat(TOKENIZER))
    with pytest.raises(ValueError, match="goes with --data FILE"):
        check_privileged(config, SHALLOW.make_tasks(config, TOKENIZER), Chat(TOKENIZER))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--teacher", "self"], "--teacher self learns nothing from itself: tell it more"),
        (["--teacher", "a=self", "b=DIR"], "--teacher self learns nothing from itself: tell it more"),
        (["--teacher-prompt-template", "{prompt} x"], "--teacher-prompt-template has no effect without --teacher"),
        (["--teacher", "self", "--teacher-prompt-template", "x"], "lacks {prompt}"),
        (["--teacher", "self", "--teacher-prompt-template", "{prompt} {0}"], "{0} is no name of a column"),
        (["--teacher", "self", "--teacher-prompt-template", "{prompt"], "a brace that is no name is written twice"),
        (
            ["--recipe", "quickstart-tool", "--teacher", "self", "--teacher-prompt-template", "{prompt} x"],
            "set --max-turns 1",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        configure(argv)


def test_only_another_model_takes_memory_of_its_own() -> None:
    assert not TeacherConfig(("self",), teacher_prompt_template=TEMPLATE).frozen
    assert TeacherConfig(("a=self", "b=DIR"), teacher_prompt_template=TEMPLATE).frozen
    assert TeacherConfig(("DIR",)).frozen


def losses_of(tmp_path: Path, name: str, teacher: str) -> list[float]:
    """The losses of a run whose teacher is told the hints of its prompts."""
    rows = [{"question": f"Say {n}.", "answer": str(n), "hint": str(n) * 5} for n in range(24)]
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert SHALLOW.make_model is not None
    config = replace(
        SHALLOW.config,
        recipe="math",
        model=SHALLOW.make_model(tmp_path / "model", 0),
        run_dir=tmp_path / name,
        data=DataConfig(data=data, eval_prompts=4, eval_share=0.2, max_prompt_tokens=48),
        max_turns=1,
        max_episode_tokens=128,
        steps=2,
        save_every=2,
        eval_every=2,
        group_size=1,
        teachers=TeacherConfig((teacher,), teacher_prompt_template="{prompt} It is {hint}."),
    )
    run(config, math.RECIPE)
    lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()[1:]
    return [json.loads(line)["train/distill/divergence"] for line in lines]


def test_a_run_teaches_itself(tmp_path: Path) -> None:
    assert min(losses_of(tmp_path, "run", "self")) > 0


def test_a_served_teacher_reads_the_privileged_prompt_as_one_in_this_process_does(tmp_path: Path) -> None:
    assert SHALLOW.make_model is not None
    teacher = SHALLOW.make_model(tmp_path / "teacher", 7)
    here = losses_of(tmp_path, "here", str(teacher))
    with stock_server(teacher) as server:
        assert losses_of(tmp_path, "served", server.url) == pytest.approx(here, rel=1e-4)
