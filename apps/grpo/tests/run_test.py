"""Whole runs of the app, small: what they write, that weights move, and that neither a stop nor ranks change them."""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from apps.common.data.tokenizer import load_tokenizer
from apps.common.run.divergence import DivergenceError
from apps.common.run.moved_weights import starting_weights
from apps.common.testing.weight_delta import assert_trained
from apps.grpo.config import GrpoConfig, WarmStart
from apps.grpo.main import configure, run
from apps.grpo.registry import recipes
from apps.grpo.testing.recipe import SHALLOW as RECIPE
from apps.grpo.train import Result, train
from apps.quickstart.sum_tasks import SumTasks
from engines import NonFiniteError
from engines.launch import launch
from rollout import Completion, NativeEngine, Reply, Sampling, Task, TaskRow
from rollout.tools.tool import ToolResult
from rollout.tools.workers import instant
from runlog.timeline import bubble_shares, read_timeline

SMALL_MOVE = 1e-3  # less than the largest weight moves in four steps at the learning rate of these runs


Finished = tuple[Result, Path]
"""What a run came to, and its folder."""


def small(run_dir: Path, **changes: Any) -> GrpoConfig:
    return replace(RECIPE.config, run_dir=run_dir, **changes)


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())


def largest_move(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    assert set(before) == set(after)
    return max((before[name] - after[name]).abs().max().item() for name in before)


def assert_same_model(left: Path, right: Path) -> None:
    """Nearly all weights are equal but for rounding; AdamW makes a step of what is rounded in a tiny gradient."""
    before, after = weights(left), weights(right)
    assert largest_move(before, after) < SMALL_MOVE / 2
    moves = torch.cat([(before[name] - after[name]).abs().flatten() for name in before])
    assert moves.quantile(0.999) < SMALL_MOVE / 100


def assert_learned(run_dir: Path, far: float = SMALL_MOVE) -> None:
    """Every step had rewards that differ and a gradient, and every weight moved, one of them far."""
    for row in rows(run_dir)[1:]:
        assert row["reward/mixed_groups"] > 0
        assert row["train/grad_norm"] > 1e-4
    assert_trained(run_dir)
    assert largest_move(weights(starting_weights(run_dir)), weights(run_dir / "export")) > far


def same_row(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Equal but for the clock, and for what is in memory when a row is written."""
    clock = ("time", "memory", "tokens_per_second", "weights/pause_ms", "weights/staging_ms", "weights/link_share")
    return all(right[name] == value for name, value in left.items() if not name.startswith(clock))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    run_dir = tmp_path_factory.mktemp("run") / "run"
    return run(small(run_dir), RECIPE), run_dir


def test_a_run_in_turn_shows_the_time_that_its_parts_wait(finished: Finished) -> None:
    """Who was busy in each step, as its seconds say: what running ahead can gain."""
    _, run_dir = finished
    spans = read_timeline(run_dir)
    steps = rows(run_dir)[1:]
    for kind, name in (("sample", "rollout"), ("train", "train"), ("sync", "export_and_update_weights")):
        seconds = [span.end - span.begin for span in spans if span.kind == kind]
        assert seconds == pytest.approx([row[f"time/{name}_s"] for row in steps], abs=1e-3)
    shares = bubble_shares(spans)
    assert 1 < shares["trainer"] + shares["sampler"] < 2  # never both at once
    assert "trainer idle" in (run_dir / "report.html").read_text()
    assert all(row["weights/pause_ms"] > 0 for row in steps)


def test_every_step_moves_the_weights(finished: Finished) -> None:
    _, run_dir = finished
    assert_learned(run_dir)
    assert all(row["train/computed_sequences"] > 0 for row in rows(run_dir)[1:])


def test_the_run_folder_holds_what_the_readme_promises(finished: Finished) -> None:
    _, run_dir = finished
    for name in ("config.json", "metrics.jsonl", "episodes.jsonl", "report.html"):
        assert (run_dir / name).stat().st_size > 100
    assert list((run_dir / "tensorboard").iterdir())
    assert [p.name for p in sorted((run_dir / "checkpoints").iterdir())] == ["step-000002", "step-000004"]
    assert "<html" in (run_dir / "report.html").read_text()


def test_the_export_is_an_ordinary_model_directory(finished: Finished) -> None:
    _, run_dir = finished
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "export")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "export")
    messages = [{"role": "user", "content": "12+34="}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert model.generate(**inputs, max_new_tokens=2, do_sample=False).shape[1] > inputs["input_ids"].shape[1]


def test_the_metrics_tell_of_plan_packing_export_and_new_weights(finished: Finished) -> None:
    _, run_dir = finished
    steps = rows(run_dir)
    assert [row["step"] for row in steps] == [0, 1, 2, 3, 4]
    for row in steps[1:]:
        assert row["rollout/policy_version"] == row["step"] - 1
        assert row["train/micro_batches"] >= 1
        assert row["train/plan_hash"]
        assert 0 < row["train/fill"] <= 1
        assert row["weights/version"] == row["step"]
        assert row["weights/bytes"] == 0  # the sampler computes with training's own (`sharing_test`)
        # The sampler's cache and the trainer's packed rows speak of the same tokens under the same weights.
        assert row["log_prob_difference"] <= row["log_prob_difference_max"] < 1e-3
    assert {"eval/score"} <= set(steps[0]) & set(steps[2]) & set(steps[4])


def test_a_resumed_run_ends_with_the_same_bits(finished: Finished, tmp_path: Path) -> None:
    first, run_dir = finished
    half = small(tmp_path / "half")
    run(replace(half, steps=2), RECIPE)
    stopped = weights(tmp_path / "half" / "export")
    result = run(replace(half, resume=True), RECIPE)
    expected, actual = weights(run_dir / "export"), weights(tmp_path / "half" / "export")
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert largest_move(stopped, actual) > SMALL_MOVE / 4
    whole, resumed = rows(run_dir), rows(tmp_path / "half")
    assert [row["step"] for row in resumed] == [0, 1, 2, 3, 4]
    assert all(same_row(left, right) for left, right in zip(whole, resumed, strict=True))
    assert result.accuracy_before == first.accuracy_before == whole[0]["eval/score"]
    assert result.accuracy_after == first.accuracy_after == whole[-1]["eval/score"]


def test_resuming_a_finished_run_trains_nothing_more(finished: Finished) -> None:
    first, run_dir = finished
    before = weights(run_dir / "export")
    result = run(small(run_dir, resume=True), RECIPE)
    assert largest_move(before, weights(run_dir / "export")) == 0
    assert (result.accuracy_before, result.accuracy_after) == (first.accuracy_before, first.accuracy_after)


def test_fewer_steps_than_done_are_refused_and_nothing_is_rewritten(finished: Finished) -> None:
    _, run_dir = finished
    before = (run_dir / "config.json").read_text()
    with pytest.raises(ValueError, match=r"done 4 steps already: --max-steps 3"):
        run(small(run_dir, steps=3, resume=True), RECIPE)
    assert (run_dir / "config.json").read_text() == before


def test_two_ranks_come_to_the_same_model(finished: Finished, tmp_path: Path) -> None:
    _, run_dir = finished
    run(small(tmp_path / "two", nproc_per_node=2), RECIPE)
    one, two = rows(run_dir), rows(tmp_path / "two")
    assert (one[0]["run/world_size"], two[0]["run/world_size"]) == (1, 2)
    for left, right in zip(one[1:], two[1:], strict=True):
        # Both ranks' prompts are in the batch: the same rewards and tokens as when one rank asks all of them.
        for name in ("reward", "rollout/tokens", "rollout/sampled_tokens", "train/sequences"):
            assert right[name] == pytest.approx(left[name], abs=1e-6)
    assert_learned(tmp_path / "two")
    assert_same_model(run_dir / "export", tmp_path / "two" / "export")


def test_dynamic_context_parallelism_comes_to_the_same_model(finished: Finished, tmp_path: Path) -> None:
    _, run_dir = finished
    engine = replace(RECIPE.config.engine, context_parallel="dynamic", max_tokens_per_rank=48)
    run(small(tmp_path / "cp", nproc_per_node=2, engine=engine), RECIPE)
    assert_learned(tmp_path / "cp")
    assert rows(tmp_path / "cp")[1]["train/micro_batches"] > rows(run_dir)[1]["train/micro_batches"]
    assert_same_model(run_dir / "export", tmp_path / "cp" / "export")


def test_learning_rate_zero_changes_nothing(tmp_path: Path) -> None:
    run(small(tmp_path, engine=replace(RECIPE.config.engine, lr=0.0)), RECIPE)
    assert all(row["train/grad_norm"] > 1e-4 for row in rows(tmp_path)[1:])
    assert largest_move(weights(tmp_path / "model"), weights(tmp_path / "export")) == 0
    with pytest.raises(AssertionError, match="did not move"):
        assert_trained(tmp_path)


def test_a_warm_start_moves_the_weights_and_grpo_goes_on_from_them(tmp_path: Path) -> None:
    warm = WarmStart(steps=3, batch_size=8, eval_every=3, eval_prompts=4, until_accuracy=1.0, lr=3e-3, warmup_steps=0)
    run(small(tmp_path, warm_start=warm, steps=1), RECIPE)
    assert_trained(tmp_path / "warm-start", start=tmp_path / "model")
    assert starting_weights(tmp_path) == tmp_path / "warm-start" / "export"
    assert_learned(tmp_path)


def test_a_diverged_run_ends_with_an_error_and_no_export(tmp_path: Path) -> None:
    with pytest.raises((DivergenceError, NonFiniteError), match="finite"):
        run(small(tmp_path, engine=replace(RECIPE.config.engine, lr=1e30, grad_clip=None)), RECIPE)
    assert not (tmp_path / "export").exists()
    assert (tmp_path / "report.html").is_file()


def test_old_checkpoints_are_deleted_and_the_best_is_exported(tmp_path: Path) -> None:
    """It is that of the step with the best answers, two to a prompt: a run that ends there exports the same."""
    changes: dict[str, Any] = {"keep_checkpoints": 1, "eval_every": 1, "export": "best", "num_generations_eval": 2}
    run(small(tmp_path / "run", save_every=1, **changes), RECIPE)
    found = [p.name for p in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    assert found == ["best", "step-000003", "step-000004"]
    scores = {row["step"]: row["eval/score"] for row in rows(tmp_path / "run")[1:]}
    assert scores == {row["step"]: row["eval/mean@2"] for row in rows(tmp_path / "run")[1:]}
    best = max(scores, key=lambda step: (scores[step], -step))
    run(small(tmp_path / "best", steps=best, **changes | {"export": "last"}), RECIPE)
    expected, actual = weights(tmp_path / "best" / "export"), weights(tmp_path / "run" / "export")
    assert all(torch.equal(expected[name], actual[name]) for name in expected)


def graded(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> "GradedSums":
    """The recipe's sums and calculator; an answer, cut off or not, earns the share of its characters that are ASCII."""
    make: Any = recipes()["quickstart-tool"].make_tasks
    tasks = make(config, tokenizer)
    return GradedSums(*(getattr(tasks, field.name) for field in fields(tasks)))


class GradedSums(SumTasks):
    """An untrained model earns some of the reward."""

    def environment(self, row: TaskRow) -> Task:
        return replace(super().environment(row), reward=ascii_share, cut_off_reward=None)


@instant
def ascii_share(reply: Reply, results: Sequence[ToolResult]) -> float:
    return sum(map(str.isascii, reply.text)) / max(1, len(reply.text))


def test_a_tool_episode_goes_all_the_way(tmp_path: Path) -> None:
    recipe = recipes()["quickstart-tool"]
    base = recipe.config
    data = replace(base.data, eval_prompts=4)
    warm = replace(base.warm_start, steps=2, batch_size=4, eval_every=2)
    sizes: dict[str, Any] = {
        "steps": 1,
        "prompts_per_step": 2,
        "group_size": 4,
        "sampling": replace(base.sampling, temperature=1.0),
    }
    config = replace(base, run_dir=tmp_path, data=data, warm_start=warm, **sizes)
    run(config, replace(recipe, make_tasks=graded))
    assert rows(tmp_path)[1]["train/trained_tokens"] > 0
    assert_trained(tmp_path / "warm-start", start=tmp_path / "model")
    assert_learned(tmp_path, far=1e-4)


def test_a_model_and_a_file_of_ones_own(finished: Finished, tmp_path: Path) -> None:
    _, run_dir = finished
    rows_ = [{"ask": f"What is {i} and {i}?", "gold": f"Twice.\n#### {2 * i}"} for i in range(40)]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_))
    words = f"--model {run_dir / 'export'} --data {tmp_path / 'own.jsonl'} --prompt-column ask --answer-column gold"
    words += f" --run-dir {tmp_path / 'run'} --trainer.device cpu --learning-rate 1e-3 --max-steps 1"
    words += " --prompts-per-step 2 --group-size 4"
    words += " --sampling.max-new-tokens 4 --max-episode-tokens 128 --max-prompt-tokens 64"
    words += " --reward apps.grpo.testing.plugins:by_end"  # which an untrained model's differ by
    run(configure(words.split()))
    assert rows(tmp_path / "run")[1]["train/trained_tokens"] > 0
    assert starting_weights(tmp_path / "run") == run_dir / "export"
    assert_learned(tmp_path / "run", far=1e-4)
    assert (tmp_path / "run" / "export" / "chat_template.jinja").is_file()


def own(run_dir: Path, path: Path, **changes: Any) -> GrpoConfig:
    words = f"--environment apps.grpo.testing.plugins:Digits apps.grpo.testing.plugins:Letters --tasks {path}"
    words += " --environment-shares Digits=1 Letters=3 --system-prompt Speak! --trainer.device cpu --learning-rate 1e-3"
    words += " --max-steps 4 --prompts-per-step 4 --group-size 4 --sampling.max-new-tokens 6 --eval-every 2"
    words += " --save-every 2"
    words += " --eval-prompts 3 --eval-share 0.2"
    return replace(configure(words.split()), run_dir=run_dir, **changes)


def test_two_environments_of_ones_own_in_one_run_that_is_resumed(tmp_path: Path) -> None:
    names = ["Digits", "Letters"]
    lines = [{"environment": names[i % 2], "number": i, "answer": i} for i in range(40)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    whole = own(tmp_path / "whole", tmp_path / "tasks.jsonl")
    run(whole)
    run(replace(whole, run_dir=tmp_path / "half", steps=2))
    run(replace(whole, run_dir=tmp_path / "half", resume=True))
    expected, actual = weights(tmp_path / "whole" / "export"), weights(tmp_path / "half" / "export")
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    assert_trained(tmp_path / "whole")
    logged = rows(tmp_path / "whole")
    for row in logged[1:]:
        assert row["reward/environment/Digits/share"] == 1 / 4
        assert 0 <= row["reward/environment/Letters"] <= 1
        assert row["reward/part/cut"] == row["response/truncated"]
        assert row["entropy"] > 1
    assert {"eval/reward/Digits", "eval/reward/Letters", "eval/score"} <= set(logged[0]) & set(logged[4])
    episodes_kept = [json.loads(line) for line in (tmp_path / "whole" / "episodes.jsonl").read_text().splitlines()]
    for step in (1, 2, 3, 4):
        group = [e for e in episodes_kept if (e["step"], e["split"]) == (step, "training")]
        assert len(group) == 4
        assert len({(e["group"], e["environment"], e["expected"]) for e in group}) == 1
        assert "Speak!" in "".join(group[0]["tokens"])
    assert (tmp_path / "whole" / "report.html").stat().st_size < 1_000_000


def test_an_environment_apart_from_trainings_is_evaluated(tmp_path: Path) -> None:
    lines = [{"environment": ["Digits", "Letters"][i % 2], "number": i, "answer": i} for i in range(40)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    config = own(tmp_path / "run", tmp_path / "tasks.jsonl", steps=2)
    run(replace(config, plugins=replace(config.plugins, environment_shares=("Digits=1", "Letters=0"))))
    logged = rows(tmp_path / "run")
    assert {"eval/reward/Digits", "eval/reward/Letters"} <= set(logged[0]) & set(logged[2])
    assert not any("reward/environment/Letters" in row for row in logged)
    kept = [json.loads(line) for line in (tmp_path / "run" / "episodes.jsonl").read_text().splitlines()]
    sides = {(episode["split"], episode["environment"]) for episode in kept}
    assert sides == {("training", "Digits"), ("held-out", "Digits"), ("held-out", "Letters")}


def test_a_finished_folder_is_not_written_over(finished: Finished) -> None:
    _, run_dir = finished
    with pytest.raises(ValueError, match="resume"):
        run(small(run_dir), RECIPE)


def test_a_folder_without_a_run_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to resume"):
        run(small(tmp_path, resume=True), RECIPE)


def test_a_directory_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--model"):
        run(small(tmp_path / "run", model=tmp_path / "nowhere"), RECIPE)


class Greedy(NativeEngine):
    """A sampler of one's own: the likeliest token whatever is asked."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, media: Mapping[str, Any] | None = None, **options: Any
    ) -> Completion:
        greedy = Sampling(greedy=True, max_new_tokens=sampling.max_new_tokens, stop_token_ids=sampling.stop_token_ids)
        return await super().generate(prompt_ids, greedy, media, **options)


def test_tasks_and_sampler_can_be_handed_in(finished: Finished, tmp_path: Path) -> None:
    """With a greedy sampler the answers of a group are equal: no advantage, no gradient, and the weights stay."""
    _, run_dir = finished
    model = run_dir / "model"
    tokenizer = load_tokenizer(model)
    sampler = Greedy(AutoModelForCausalLM.from_pretrained(model), pad_token_id=tokenizer.pad_token_id)
    assert RECIPE.make_tasks is not None
    job = functools.partial(train, model=model, run_dir=tmp_path)
    launch(job, (small(tmp_path), RECIPE.make_tasks(RECIPE.config, tokenizer), sampler), 1, "cpu")
    assert all(row["reward/mixed_groups"] == 0 and row["train/grad_norm"] == 0 for row in rows(tmp_path)[1:])
    assert sampler.version == 1 + RECIPE.config.steps  # handed the weights at the start and after every step
    assert largest_move(weights(model), weights(tmp_path / "export")) == 0
