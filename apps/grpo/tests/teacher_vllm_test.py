"""A run that learns from a teacher in vLLM, beside one that learns from the same model in the process of training."""

import json
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.grpo.config import TeacherConfig, WarmStart
from apps.grpo.main import run
from apps.grpo.recipes.quickstart_vllm import RECIPE as VLLM
from apps.grpo.teachers import KEYS, Teachers
from apps.grpo.testing.recipe import SHALLOW as RECIPE
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch
from rollout import Episode, Score
from rollout.chat.segment import Segment

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)
LENGTHS = [5, 3, 7, 1, 9]


def test_a_teacher_in_vllm_teaches_as_one_in_this_process(tmp_path: Path) -> None:
    assert VLLM.make_model is not None
    folder = VLLM.make_model(tmp_path / "teacher", 7)
    config = replace(
        RECIPE.config,
        steps=2,
        eval_every=2,
        save_every=2,
        mini_batches=2,
        warm_start=WarmStart(),
    )
    found, curves = [], []
    nothing: Any = None  # no privileged prompts, and the policy is not asked
    episode = Episode("e", "x/1", 0, (Segment((1, 2), (False, True), (0.0, -1.0), (-1, 0)),), Score(1.0), "done")
    for number, teacher in enumerate((str(folder), f"vllm:{folder}")):
        teaching = TeacherConfig((teacher,), teacher_top_k=30)
        taught = replace(config, group_size=1, teachers=teaching, run_dir=tmp_path / str(number))
        run(taught, RECIPE)
        lines = (tmp_path / str(number) / "metrics.jsonl").read_text().splitlines()[1:]
        curves.append([json.loads(line) for line in lines])
        batch = tiny_batch(LENGTHS)
        batch["episode"] = torch.arange(len(LENGTHS))
        with ExitStack() as stack:
            teachers = Teachers.of(taught, nothing, nothing, stack)
            assert teachers is not None
            teachers.score(batch, [episode] * len(LENGTHS), nothing)
        found.append(batch)
    for want, got in zip(*curves, strict=True):
        for key in ("train/loss", "train/distill/divergence", "train/distill/teacher_mass"):
            assert got[key] == pytest.approx(want[key], rel=0.05), key  # vLLM computes in bfloat16
    for here, there in zip(found[0][KEYS[2]].unbind(), found[1][KEYS[2]].unbind(), strict=True):
        torch.testing.assert_close(there.exp(), here.exp(), atol=0.02, rtol=0)
