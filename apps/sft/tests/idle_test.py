"""A supervised run whose steps train nothing: it says so, stops after a few, and goes on where that is allowed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.common.run.checkpoints import last_checkpoint
from apps.common.run.idle_steps import IdleRunError
from apps.quickstart.model import ensure_tiny_model
from apps.sft.config import SftConfig
from apps.sft.data import Conversations, Skipped
from apps.sft.loop import idle_reason
from apps.sft.train import held_out_loss, train
from engines import EngineConfig, build_engine

CONFIG = SftConfig(batch_size=2, steps=6, eval_every=6, save_every=6, engine=EngineConfig(device="cpu"))
EMPTY = "no token of its batch is trained: the loss mask is empty"


def sample(trained: bool) -> dict[str, Any]:
    ids = torch.arange(5, 11)
    mask = torch.tensor([False] + [trained] * 5)
    return {"input_ids": ids, "position_ids": torch.arange(6), "loss_mask": mask}


def conversations(trained: int, empty: int) -> Conversations:
    rows: Any = [sample(number < trained) for number in range(trained + empty)]
    return Conversations(rows, [sample(True)], Skipped(), (len(rows),), None, (("rows", ""),))  # type: ignore[arg-type]


def test_steps_without_a_trained_token_stop_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, run_dir = ensure_tiny_model(tmp_path / "model", 0), tmp_path / "run"
    nothing = conversations(0, 12)
    with pytest.raises(IdleRunError, match=rf"step 3: 3 steps in a row trained nothing, the last one as {EMPTY}"):
        train(replace(CONFIG, allow_idle_steps=3), nothing, model, run_dir)
    assert f"step 1 trained nothing: {EMPTY}" in capsys.readouterr().out
    assert (last_checkpoint(run_dir) or (0, None))[0] == 3
    train(replace(CONFIG, allow_idle_steps=None, resume=True), nothing, model, run_dir)
    assert f"6 of 6 steps trained nothing (first: step 1): 6 x {EMPTY}" in (run_dir / "report.html").read_text()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/idle_steps"] for row in rows[1:]] == [1, 2, 3, 4, 5, 6]


def test_a_step_with_one_trained_row_trains(tmp_path: Path) -> None:
    model = ensure_tiny_model(tmp_path / "model", 0)
    train(replace(CONFIG, batch_size=12, steps=2, eval_every=2), conversations(1, 11), model, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/idle_steps"] for row in rows[1:]] == [0, 0]
    assert not any("idle" in row for row in rows)


def test_an_evaluation_of_nothing_is_refused(tmp_path: Path) -> None:
    engine = build_engine(EngineConfig(model=str(ensure_tiny_model(tmp_path / "model", 0)), device="cpu"))
    for samples in ([], [sample(False)]):
        with pytest.raises(ValueError, match=f"no token of the {len(samples)} held-out rows is trained"):
            held_out_loss(engine, samples)


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({"trained_tokens": 3.0, "grad_norm": 0.5, "skipped": 0.0}, None),
        ({"trained_tokens": 3.0, "grad_norm": 0.0, "skipped": 0.0}, "the gradient is 0"),
        ({"trained_tokens": 3.0, "grad_norm": float("nan"), "skipped": 1.0}, "loss or gradient was not finite"),
        ({"trained_tokens": 0.0, "tokens": 6.0}, EMPTY),
    ],
)
def test_each_cause_is_named(metrics: dict[str, float], reason: str | None) -> None:
    found = idle_reason(metrics)
    assert found is None if reason is None else str(found).startswith(reason)
