"""Whole runs of the app, small: what they write, that they resume exactly, and that ranks make no difference."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from apps.grpo.main import configure, run
from apps.grpo.registry import recipes
from engines import EngineConfig

RECIPES = {name: recipe.config for name, recipe in recipes().items()}


def small(run_dir, **changes):
    base = RECIPES["quickstart"]
    return replace(
        base,
        run_dir=run_dir,
        steps=4,
        prompts=4,
        group_size=4,
        eval_every=2,
        save_every=2,
        data=replace(base.data, eval_prompts=8),
        warm_start=replace(base.warm_start, steps=3, batch_size=8, eval_every=3),
        **changes,
    )


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights(directory):
    return dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())


def calculator_recipe(run_dir):
    base = RECIPES["quickstart-tool"]
    return replace(
        base,
        run_dir=run_dir,
        steps=1,
        prompts=2,
        group_size=2,
        data=replace(base.data, eval_prompts=4),
        warm_start=replace(base.warm_start, steps=2, batch_size=4, eval_every=2),
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    return run(small(run_dir)), run_dir


def test_the_run_folder_holds_what_the_readme_promises(finished):
    _, run_dir = finished
    for name in ("config.json", "metrics.jsonl", "episodes.jsonl", "report.html"):
        assert (run_dir / name).stat().st_size > 100
    assert list((run_dir / "tensorboard").iterdir())
    assert [p.name for p in sorted((run_dir / "checkpoints").iterdir())] == ["step-000002", "step-000004"]
    assert "<html" in (run_dir / "report.html").read_text()


def test_the_export_is_an_ordinary_model_directory(finished):
    _, run_dir = finished
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "export")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "export")
    messages = [{"role": "user", "content": "12+34="}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert model.generate(**inputs, max_new_tokens=2, do_sample=False).shape[1] > inputs["input_ids"].shape[1]


def test_the_metrics_tell_of_plan_packing_export_and_new_weights(finished):
    _, run_dir = finished
    steps = rows(run_dir)
    assert [row["step"] for row in steps] == [0, 1, 2, 3, 4]
    for row in steps[1:]:
        assert row["rollout/policy_version"] == row["step"] - 1
        assert row["train/micro_batches"] >= 1
        assert row["train/plan_hash"]
        assert 0 < row["train/fill"] <= 1
        assert row["weights/version"] == row["step"]
        assert row["weights/bytes"] > 100_000
        # The sampler's cache and the trainer's packed rows speak of the same tokens under the same weights.
        assert row["log_prob_difference"] <= row["log_prob_difference_max"] < 1e-3
    assert {"eval/accuracy"} <= set(steps[0]) & set(steps[2]) & set(steps[4])


def test_a_resumed_run_ends_with_the_same_bits(finished, tmp_path):
    _, run_dir = finished
    half = small(tmp_path / "half")
    run(replace(half, steps=2))
    run(replace(half, resume=True))
    expected, found = weights(run_dir / "export"), weights(tmp_path / "half" / "export")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert [row["step"] for row in rows(tmp_path / "half")] == [0, 1, 2, 3, 4]
    whole = [row["reward"] for row in rows(run_dir)[1:]]
    assert [row["reward"] for row in rows(tmp_path / "half")[1:]] == whole


def test_two_ranks_come_to_the_same_model(finished, tmp_path):
    _, run_dir = finished
    run(small(tmp_path / "two", processes=2))
    expected, found = weights(run_dir / "export"), weights(tmp_path / "two" / "export")
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=2e-4, rtol=0)


def test_learning_rate_zero_changes_nothing(tmp_path):
    run(small(tmp_path, engine=EngineConfig(device="cpu", lr=0.0)))
    before, after = weights(tmp_path / "warm-start" / "export"), weights(tmp_path / "export")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_tool_episode_goes_all_the_way(tmp_path):
    run(calculator_recipe(tmp_path))
    assert len(rows(tmp_path)) == 2


def test_a_model_and_a_file_of_ones_own(finished, tmp_path):
    _, run_dir = finished
    rows_ = [{"ask": f"What is {i} and {i}?", "gold": f"Twice.\n#### {2 * i}"} for i in range(40)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_))
    argv = ["--model", str(run_dir / "export"), "--data", str(tmp_path / "own.jsonl"), "--prompt-column", "ask"]
    argv += ["--answer-column", "gold", "--run-dir", str(tmp_path / "run"), "--engine.device", "cpu", "--steps", "1"]
    argv += ["--prompts", "2", "--group-size", "2", "--sampling.max-new-tokens", "4"]
    run(configure(argv))
    assert rows(tmp_path / "run")[1]["train/trained_tokens"] > 0
    assert (tmp_path / "run" / "export" / "chat_template.jinja").is_file()


def test_a_finished_folder_is_not_written_over(finished):
    _, run_dir = finished
    with pytest.raises(ValueError, match="resume"):
        run(small(run_dir))


def test_a_folder_without_a_run_is_not_resumed(tmp_path):
    with pytest.raises(ValueError, match="nothing to resume"):
        run(small(tmp_path, resume=True))


def test_a_directory_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="--model"):
        run(small(tmp_path / "run", model=tmp_path / "nowhere"))
