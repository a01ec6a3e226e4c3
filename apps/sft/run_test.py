"""Whole supervised runs, small: the loss falls, a resumed run ends with the same bits, ranks make no difference."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from apps.common import cli
from apps.common.divergence import DivergenceError
from apps.sft.main import main, run
from apps.sft.recipes import quickstart
from engines import NonFiniteError


def small(run_dir, **changes):
    base = quickstart.RECIPE.config
    data = replace(base.data, demonstrations=256)
    settings = {"steps": 6, "batch_size": 16, "eval_every": 3, "save_every": 3, "data": data} | changes
    return replace(base, run_dir=run_dir, **settings)


def weights(directory):
    return weights_of(directory / "export")


def weights_of(directory):
    return dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    return run(small(run_dir)), run_dir


def test_the_held_out_loss_falls(finished):
    result, _ = finished
    assert result.loss_after < 0.8 * result.loss_before


def test_the_run_folder(finished):
    _, run_dir = finished
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(7))
    assert {"train/loss", "train/plan_hash", "tokens_per_second"} <= set(rows[1])
    assert (run_dir / "report.html").is_file()
    assert AutoTokenizer.from_pretrained(run_dir / "export").chat_template


def test_a_resumed_run_ends_with_the_same_bits(finished, tmp_path):
    _, run_dir = finished
    half = small(tmp_path, steps=3)
    run(half)
    run(replace(half, steps=6, resume=True))
    expected, found = weights(run_dir), weights(tmp_path)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    start = weights_of(tmp_path / "model")
    assert all(not torch.equal(start[name], found[name]) for name in expected)


def test_two_ranks_come_to_the_same_model(finished, tmp_path):
    _, run_dir = finished
    run(small(tmp_path, processes=2))
    expected, found = weights(run_dir), weights(tmp_path)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=2e-4, rtol=0)


def test_a_users_own_file_is_used(tmp_path):
    rows = [
        {"talk": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}!"}]} for i in range(60)
    ]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = replace(quickstart.RECIPE.config.data, data=path, messages_column="talk")
    run(small(tmp_path / "run", steps=1, data=data))
    assert not (tmp_path / "run" / "demonstrations.jsonl").exists()
    with pytest.raises(ValueError, match="--messages-column"):
        run(small(tmp_path / "other", steps=1, data=replace(data, messages_column="chat")))


def test_a_run_that_diverges_ends_with_an_error_and_without_an_export(tmp_path, capsys):
    argv = ["--steps", "3", "--batch-size", "8", "--demonstrations", "64", "--engine.lr", "1e30"]
    with pytest.raises(SystemExit) as stop:
        cli.main(lambda: main([*argv, "--run-dir", str(tmp_path / "run"), "--engine.warmup-steps", "0"]))
    assert stop.value.code == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "run" / "export").exists()
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_loss_far_above_guessing_ends_the_run_though_it_is_a_number(tmp_path):
    engine = replace(quickstart.RECIPE.config.engine, lr=30.0, warmup_steps=0)
    with pytest.raises((DivergenceError, NonFiniteError)):
        run(small(tmp_path, engine=engine, steps=2, eval_every=1))
    assert not (tmp_path / "export").exists()
