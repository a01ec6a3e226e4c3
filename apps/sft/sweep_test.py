"""Every setting of the sft app, changed alone, does something or is refused; see `apps.common.sweep`."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from apps.common.sweep import Change, another, effect, field_paths, outcome, put
from apps.quickstart.tokenizer import build_tokenizer
from apps.sft.config import OWNED, DataConfig, SftConfig
from apps.sft.data import load_conversations, write_demonstrations
from apps.sft.main import run
from apps.sft.recipes import quickstart

BASE = replace(
    quickstart.RECIPE.config,
    data=DataConfig(demonstrations=64, max_tokens=64),
    steps=3,
    batch_size=6,
    eval_every=2,
    eval_conversations=2,
    save_every=1,
    engine=replace(quickstart.RECIPE.config.engine, warmup_steps=0),
)
NAMED = {"recipe", "model", "run_dir", "resume", "threads"}
"""What a run is of and where it is, changed in run_test and bad_inputs_test; the last has a test below."""
KNOWN = {}
CHANGES = {
    "processes": Change(2),
    "batch_size": Change(7),
    "keep_checkpoints": Change(0),
    "eval_every": Change(1),
    "save_every": Change(2),
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
    "engine.on_nonfinite": Change("skip", {"engine.lr": 1e30, "engine.grad_clip": None}),
    "cluster.rollout.cuda_graph_sizes": Change((1, 2)),
    "cluster.environment": Change(("NAME=value",)),
}
"""Values where the next choice, the other truth or twice the number would not do."""


def paths():
    of_data = {path for path in field_paths(BASE) if path.startswith("data.")}
    return sorted(set(field_paths(BASE)) - set(OWNED) - NAMED - of_data)


def test_equal_settings_make_equal_runs(tmp_path):
    """Without this, every change would seem to do something."""
    one, two = (outcome(run, put(BASE, "run_dir", tmp_path / name)) for name in ("one", "two"))
    assert one == two
    KNOWN[BASE] = one
    assert one["metrics"]
    assert one["weights"]


def test_the_table_names_fields_that_are_there():
    assert set(CHANGES) <= set(paths())


@pytest.mark.parametrize("path", paths())
def test_a_setting_does_something_or_is_refused(path, tmp_path):
    value = functools.reduce(getattr, path.split("."), BASE)
    change = CHANGES[path] if path in CHANGES else Change(another(SftConfig, path, value))
    assert effect(run, BASE, path, change, tmp_path, KNOWN)


def test_threads_are_those_of_the_rank(tmp_path):
    before = torch.get_num_threads()
    try:
        run(replace(BASE, run_dir=tmp_path, steps=1, threads=before + 1))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def chat(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    for name in ("train", "eval"):
        rows = [
            {
                "messages": chat(f"{name} {i}" + "?" * i, "yes"),
                "talk": chat(f"{i}", "no"),
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
                "functions": [{"type": "function", "function": {"name": "g", "parameters": {}}}],
            }
            for i in range(30)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def texts(data):
    """What is trained and held out, and what was left out: a pure function of the settings and the files."""
    tokenizer = build_tokenizer()
    path = data.data or write_demonstrations(data, 0, Path("demonstrations.jsonl"))
    found = load_conversations(data, path, tokenizer)
    sides = [[tokenizer.decode(sample["input_ids"]) for sample in side] for side in (found.train, found.held_out)]
    return sides, found.skipped.counts


DATA_CHANGES = {
    "data": Path("eval.jsonl"),
    "eval_data": Path("eval.jsonl"),
    "messages_column": "talk",
    "tools_column": "functions",
    "eval_share": 0.5,
    "max_tokens": 50,
}


@pytest.mark.parametrize("name", [path.removeprefix("data.") for path in field_paths(BASE) if path.startswith("data.")])
def test_a_setting_of_the_data_changes_what_is_imitated(name, files, tmp_path, monkeypatch):
    monkeypatch.chdir(files)
    base = DataConfig(data=Path("train.jsonl"))
    if name in DATA_CHANGES:
        assert texts(base) == texts(base)
        assert texts(replace(base, **{name: DATA_CHANGES[name]})) != texts(base)
        return
    value = another(DataConfig, name, getattr(base, name)) if name == "task" else 40
    with pytest.raises(ValueError, match=f"--{name}"):
        replace(base, **{name: value})
    monkeypatch.chdir(tmp_path)
    synthetic = DataConfig(demonstrations=32)
    assert texts(replace(synthetic, **{name: value})) != texts(synthetic)
