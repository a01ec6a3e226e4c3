"""Every setting of the grpo app, changed alone, does something or is refused; see `apps.common.sweep`."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from apps.common.sweep import Change, another, effect, field_paths, outcome, put
from apps.grpo.config import NOT_YET, OWNED, DataConfig, GrpoConfig, WarmStart
from apps.grpo.main import run
from apps.grpo.recipes.math import make_tasks as prompt_tasks_of
from apps.grpo.recipes.quickstart import make_tasks as sum_tasks_of
from apps.grpo.testing import RECIPE
from apps.quickstart.tokenizer import build_tokenizer
from engines import NonFiniteError
from objectives import GRPO
from rollout import Sampling

# Two turns, frequent stops, two updates a batch and a warm start, so that each setting has something to act on.
BASE = replace(
    RECIPE.config,
    steps=3,
    prompts=3,
    group_size=2,
    epochs=2,
    max_turns=2,
    eval_every=2,
    save_every=1,
    warm_start=WarmStart(steps=3, batch_size=4, eval_every=1, eval_prompts=4, until_accuracy=1.0, lr=1e-4),
    sampling=Sampling(max_new_tokens=7, stop_token_ids=tuple(range(100))),
    objective=GRPO(),
)
NAMED = {"recipe", "model", "run_dir", "resume", "engine.on_nonfinite"}
"""What a run is of and where it is, changed in config_test, run_test and bad_inputs_test; the last has a test below."""
KNOWN = {}
CHANGES = {
    "advantage": Change("leave_one_out"),
    "processes": Change(2),
    "max_turns": Change(1),
    "max_episode_tokens": Change(32),
    "keep_checkpoints": Change(0),
    "eval_every": Change(1),
    "save_every": Change(2),
    "warm_start.until_accuracy": Change(0.0),
    "warm_start.warmup_steps": Change(1, {"warm_start.warmup_steps": 3}),
    "warm_start.eval_every": Change(2),
    "warm_start.eval_prompts": Change(2),
    "engine.device": Change("cuda"),
    "engine.max_tokens_per_rank": Change(80),
    "engine.context_parallel": Change("dynamic"),
    "engine.dtype": Change("bfloat16"),
    "engine.logit_chunk": Change(8),
    "engine.total_steps": Change(5),
    "engine.betas": Change((0.5, 0.9)),
    "engine.eps": Change(1e-2),
    "engine.weight_decay": Change(0.5),
    "engine.grad_clip": Change(None, {"engine.grad_clip": 1e-3}),
    "engine.warmup_steps": Change(3),
    "sampling.max_new_tokens": Change(3),
    "sampling.stop_token_ids": Change(()),
    "cluster.rollout.cuda_graph_sizes": Change((1, 2)),
    "cluster.environment": Change(("NAME=value",)),
    "objective.policy_loss": Change("cispo"),
    "objective.clip_low": Change(0.001),
    "objective.clip_high": Change(0.001),
    "objective.dual_clip": Change(1.001),
    "objective.max_tokens": Change(8),
    "objective.entropy_coef": Change(0.1),
    "objective.off_policy_cap": Change(1.5),
}
"""Values where the next choice, the other truth or twice the number would not do."""


def go(config):
    return run(config, RECIPE)


def paths():
    of_data = {path for path in field_paths(BASE) if path.startswith("data.")}
    return sorted(set(field_paths(BASE)) - set(OWNED) - set(NOT_YET) - NAMED - of_data)


def test_equal_settings_make_equal_runs(tmp_path):
    """Without this, every change would seem to do something."""
    one, two = (outcome(go, put(BASE, "run_dir", tmp_path / name)) for name in ("one", "two"))
    assert one == two
    KNOWN[BASE] = one
    assert one["metrics"]
    assert one["episodes"]
    assert one["weights"]


def test_the_table_names_fields_that_are_there():
    assert set(CHANGES) <= set(paths())


@pytest.mark.parametrize("path", paths())
def test_a_setting_does_something_or_is_refused(path, tmp_path):
    value = functools.reduce(getattr, path.split("."), BASE)
    change = CHANGES[path] if path in CHANGES else Change(another(GrpoConfig, path, value))
    assert effect(go, BASE, path, change, tmp_path, KNOWN)


def test_a_loss_that_is_not_finite_stops_the_run_or_is_skipped(tmp_path):
    """The second update of the batch finds weights that the first has blown up; skipped, the sampler finds them."""
    engine = replace(BASE.engine, lr=1e30, grad_clip=None)
    for name, error in (("stop", NonFiniteError), ("skip", ValueError)):
        changes = {"steps": 1, "warm_start": WarmStart(), "engine": replace(engine, on_nonfinite=name)}
        with pytest.raises(error, match="finite"):
            go(replace(BASE, run_dir=tmp_path / name, **changes))


def tasks_of(config):
    """What is asked: a pure function of the settings and the files."""
    make = sum_tasks_of if config.recipe == "quickstart" else prompt_tasks_of
    tasks = make(config, build_tokenizer())
    asked = [[task.start().messages for task in some] for some in (tasks.held_out(), tasks.train(0, 20))]
    references = [(prompt.messages, prompt.reference) for prompt in getattr(tasks, "prompts", ())]
    return asked, sorted(references, key=str), dict(tasks.skipped)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name in ("train", "eval"):
        rows = [{"question": f"{name} {i}" + "?" * i, "ask": f"{i}", "answer": i, "gold": 2 * i} for i in range(1, 31)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


DATA_CHANGES = {
    "data": Path("eval.jsonl"),
    "eval_data": Path("eval.jsonl"),
    "prompt_column": "ask",
    "answer_column": "gold",
    "eval_share": 0.5,
    "max_prompt_tokens": 40,
    "eval_prompts": 1,
}


@pytest.mark.parametrize("name", [path.removeprefix("data.") for path in field_paths(BASE) if path.startswith("data.")])
def test_a_setting_of_the_data_changes_what_is_asked(name, files, monkeypatch):
    monkeypatch.chdir(files)
    data = DataConfig(data=Path("train.jsonl"), eval_share=0.05 if name == "eval_data" else 0.2)
    base = GrpoConfig(recipe="math", max_turns=1, data=data)
    if name in DATA_CHANGES:
        assert tasks_of(base) == tasks_of(base)
        assert tasks_of(put(base, f"data.{name}", DATA_CHANGES[name])) != tasks_of(base)
    else:
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}"):
            tasks_of(put(base, f"data.{name}", another(DataConfig, name, getattr(data, name))))
        sums = GrpoConfig(recipe="quickstart", max_turns=1)
        assert tasks_of(put(sums, f"data.{name}", another(DataConfig, name, getattr(data, name)))) != tasks_of(sums)


def test_the_seed_and_the_recipe_of_the_tasks_matter(files, monkeypatch):
    monkeypatch.chdir(files)
    base = GrpoConfig(recipe="math", max_turns=1, data=DataConfig(data=Path("train.jsonl"), eval_share=0.2))
    assert tasks_of(replace(base, seed=1))[0][1] != tasks_of(base)[0][1]
    assert tasks_of(replace(base, seed=1))[0][0] == tasks_of(base)[0][0]
