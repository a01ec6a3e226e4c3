"""Whole supervised runs, small: the loss falls, a resumed run ends with the same bits, ranks make no difference."""

import itertools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from apps.common.cli import command_line as cli
from apps.common.run.divergence import DivergenceError
from apps.common.run.nonfinite_batch import load_batch
from apps.common.testing.weight_delta import assert_trained
from apps.quickstart.model import save_tiny_model
from apps.sft.config import DataConfig, SftConfig
from apps.sft.data import load_conversations
from apps.sft.main import main, run
from apps.sft.reading.sources import Source
from apps.sft.recipes import quickstart
from apps.sft.step_plan import plan_steps
from apps.sft.train import Result, held_out_loss
from engines import Engine, LoraConfig, NonFiniteError, build_engine
from objectives import SFT

Finished = tuple[Result, Path]
"""What a run came to, and its folder."""


def small(run_dir: Path, **changes: Any) -> SftConfig:
    base = quickstart.RECIPE.config
    data = replace(base.data, demonstrations=256)
    settings: dict[str, Any] = {"steps": 6, "batch_size": 16, "eval_every": 3, "save_every": 3, "data": data} | changes
    return replace(base, run_dir=run_dir, **settings)


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(run_dir / "export").named_parameters())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run_dir = tmp_path_factory.mktemp("run")
    return run(small(run_dir)), run_dir


def test_the_held_out_loss_falls_and_every_weight_moves(finished: Finished) -> None:
    result, run_dir = finished
    assert_trained(run_dir)
    assert result.loss_after < 0.8 * result.loss_before


def test_a_run_whose_last_step_is_skipped_is_exported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its weights are those of the step before."""
    plain, calls = SFT.__call__, itertools.count(1)

    def broken(self: SFT, *args: Any) -> Any:
        loss, metrics = plain(self, *args)
        return (loss * math.nan if next(calls) == 3 else loss), metrics

    monkeypatch.setattr(SFT, "__call__", broken)
    engine = replace(quickstart.RECIPE.config.engine, on_nonfinite="skip")
    run(small(tmp_path, steps=3, engine=engine))
    assert "layers compiled: no: on a CPU the plain layers are as fast" in "".join(capfd.readouterr())
    assert "exported after 1 skipped steps, the last 1 in a row" in caplog.text
    assert all(bool(weight.isfinite().all()) for weight in weights(tmp_path).values())


def test_the_run_folder(finished: Finished) -> None:
    _, run_dir = finished
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(7))
    assert {"train/loss", "train/plan_hash", "tokens_per_second"} <= set(rows[1])
    assert (run_dir / "report.html").is_file()
    assert AutoTokenizer.from_pretrained(run_dir / "export").chat_template


def test_a_resumed_run_ends_with_the_same_bits(finished: Finished, tmp_path: Path) -> None:
    _, run_dir = finished
    half = small(tmp_path, steps=3)
    run(half)
    run(replace(half, steps=6, resume=True))
    expected, actual = weights(run_dir), weights(tmp_path)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert_trained(tmp_path)


def test_two_ranks_come_to_the_same_model(finished: Finished, tmp_path: Path) -> None:
    _, run_dir = finished
    run(small(tmp_path, nproc_per_node=2))
    expected, actual = weights(run_dir), weights(tmp_path)
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], atol=2e-4, rtol=0)


def test_a_users_own_file_is_used(tmp_path: Path) -> None:
    rows = [
        {"talk": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}]} for i in range(60)
    ]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = replace(quickstart.RECIPE.config.data, data=(str(path),), messages_column="talk")
    run(small(tmp_path / "run", steps=1, data=data))
    assert_trained(tmp_path / "run")
    assert not (tmp_path / "run" / "demonstrations.jsonl").exists()
    with pytest.raises(ValueError, match="--messages-column"):
        run(small(tmp_path / "other", steps=1, data=replace(data, messages_column="chat")))


def test_a_run_that_diverges_ends_with_an_error_and_without_an_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["--max-steps", "3", "--batch-size", "8", "--demonstrations", "64", "--learning-rate", "1e30"]
    with pytest.raises(SystemExit) as stop:
        cli.main(lambda: main([*argv, "--run-dir", str(tmp_path / "run"), "--trainer.warmup-steps", "0"]))
    assert stop.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "run" / "export").exists()
    assert (tmp_path / "run" / "report.html").is_file()
    assert len(load_batch(tmp_path / "run" / "not-finite.safetensors")) == 8


def test_a_loss_far_above_guessing_ends_the_run_though_it_is_a_number(tmp_path: Path) -> None:
    engine = replace(quickstart.RECIPE.config.engine, lr=30.0, warmup_steps=0)
    with pytest.raises((DivergenceError, NonFiniteError)):
        run(small(tmp_path, engine=engine, steps=2, eval_every=1))
    assert not (tmp_path / "export").exists()


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_epochs_read_every_row_so_often_and_the_last_step_takes_what_is_left(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "completion": str(i + 1)}) + "\n" for i in range(41)))
    data = replace(quickstart.RECIPE.config.data, data=(str(path),), eval_share=0.25, demonstrations=16384)
    config = small(tmp_path / "run", steps=200, epochs=2, batch_size=8, eval_every=100, data=data)
    result = run(config)
    rows = rows_of(tmp_path / "run")
    assert [row["train/sequences"] for row in rows[1:]] == [8.0] * 7 + [6.0]  # 31 rows, twice
    assert (result.steps, rows[-1]["train/epoch"]) == (8, 2.0)
    assert_trained(tmp_path / "run")
    stopped = shutil.copytree(tmp_path / "run" / "export", tmp_path / "stopped")
    run(replace(config, epochs=2.5, resume=True))
    assert_trained(tmp_path / "run", start=stopped)
    assert [row["train/sequences"] for row in rows_of(tmp_path / "run")[9:]] == [8.0, 6.0]
    with pytest.raises(ValueError, match="has done 10 steps already"):
        run(replace(config, epochs=1, resume=True))


def test_the_held_out_loss_is_of_every_row_also_of_a_last_few(finished: Finished) -> None:
    _, run_dir = finished
    config = small(run_dir)
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "export")
    source = Source(run_dir / "demonstrations.jsonl")
    held_out = load_conversations(config.data, [source], tokenizer, None, run_dir.parent / "tokens").held_out
    engine = build_engine(replace(config.engine, model=str(run_dir / "export")))
    model = AutoModelForCausalLM.from_pretrained(run_dir / "export")
    nats = []
    for sample in held_out:
        log_probs = model(sample["input_ids"][None]).logits[0, :-1].log_softmax(-1)
        actual = log_probs.gather(1, sample["input_ids"][1:, None])[:, 0]
        nats.append(-actual[sample["loss_mask"][1:]])
    expected = torch.cat(nats).double().mean().item()
    for rows in (256, 5, len(held_out) - 1):
        assert held_out_loss(engine, held_out, rows) == pytest.approx(expected, abs=1e-5)


def test_the_best_weights_are_exported(tmp_path: Path) -> None:
    """The rate makes the held-out loss rise again."""
    engine = replace(quickstart.RECIPE.config.engine, warmup_steps=0, lr=0.1)
    result = run(small(tmp_path / "run", engine=engine, eval_every=1, export="best"))
    losses = [row["eval/loss"] for row in rows_of(tmp_path / "run")][1:]
    best = min(losses)
    assert losses[-1] > best
    assert (result.exported, result.loss_after) == (1 + losses.index(best), best)
    once = run(small(tmp_path / "once", engine=engine, eval_every=1, steps=result.exported))
    assert once.loss_after == best
    expected, actual = weights(tmp_path / "once"), weights(tmp_path / "run")
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert_trained(tmp_path / "run")


def test_a_resumed_run_knows_the_best_of_its_first_part(tmp_path: Path) -> None:
    engine = replace(quickstart.RECIPE.config.engine, warmup_steps=0, lr=0.1)
    settings = {"engine": engine, "eval_every": 1, "save_every": 1, "export": "best"}
    whole = run(small(tmp_path / "whole", **settings))
    half = small(tmp_path / "half", **settings, steps=whole.exported + 1)
    run(half)
    result = run(replace(half, steps=6, resume=True))
    assert result.exported == whole.exported < 6
    left, right = weights(tmp_path / "whole"), weights(tmp_path / "half")
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_mixture_is_drawn_by_weight(tmp_path: Path) -> None:
    for name, answer in (("a", "yes"), ("b", "no")):
        rows = [{"prompt": f"{name}{i}?", "completion": answer} for i in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(data=(f"{tmp_path}/a.jsonl:3", f"{tmp_path}/b.jsonl:1"), eval_share=0.4)
    conversations = load_conversations(
        data, data.sources, AutoTokenizer.from_pretrained(save_tiny_model(tmp_path / "m", 0)), None, tmp_path / "t"
    )
    plan = plan_steps(SftConfig(epochs=1, batch_size=len(conversations.train), data=data), conversations)
    drawn = [i < conversations.sizes[0] for i in plan.rows(0)]
    assert (sum(drawn), len(drawn)) == (27, 36)
    assert len(conversations.held_out) == 24


def test_packing_ahead_changes_nothing(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run_dir = finished
    asked = []
    monkeypatch.setattr(Engine, "prefetch", lambda self, batch, objective: asked.append(batch))
    run(small(tmp_path / "run"))
    assert len(asked) == 5
    expected, actual = weights(run_dir), weights(tmp_path / "run")
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def test_adapters_alone_are_trained_and_leave_merged_and_as_they_are(tmp_path: Path) -> None:
    engine = replace(quickstart.RECIPE.config.engine, lora=LoraConfig(rank=4), lr=3e-2, warmup_steps=0)
    result = run(small(tmp_path / "whole", engine=engine, save_every=3))
    assert result.loss_after < 0.9 * result.loss_before
    actual = weights(tmp_path / "whole")
    assert "model.layers.1.self_attn.q_proj.weight" in actual
    assert_trained(tmp_path / "whole", only="_proj")
    assert {path.name for path in (tmp_path / "whole" / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    half = small(tmp_path / "half", engine=engine, save_every=3, steps=3)
    run(half)
    run(replace(half, steps=6, resume=True))
    again = weights(tmp_path / "half")
    assert all(torch.equal(actual[name], again[name]) for name in actual)
