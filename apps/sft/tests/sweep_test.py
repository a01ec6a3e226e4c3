"""Every setting of the sft app, changed alone, has an effect or is refused (`apps.common.testing.setting_effects`)."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.common.testing.setting_effects import Change, SettingSweep, field_paths, other_value
from apps.quickstart.tokenizer import build_tokenizer
from apps.sft.config import OWNED, DataConfig
from apps.sft.data import load_conversations, write_demonstrations
from apps.sft.main import run
from apps.sft.reading.mixture import Mixture
from apps.sft.reading.sources import Source
from apps.sft.recipes import quickstart

BASE = replace(
    quickstart.RECIPE.config,
    data=DataConfig(demonstrations=64, max_tokens=64),
    steps=3,
    batch_size=6,
    eval_every=2,
    eval_rows=2,
    save_every=1,
    engine=replace(quickstart.RECIPE.config.engine, warmup_steps=0),
)
NAMED = {"recipe", "model", "run_dir", "resume", "threads", "engine.collective_timeout_seconds", "allow_idle_steps"}
NAMED |= {"engine.prove", "engine.allow_untested", "recipe_options", "stall_seconds"}
"""What a run is of and where it is, changed in run_test and bad_inputs_test; threads have a test below, how long ranks
wait has one in engines (collective_timeout_test), how many steps may train nothing one in idle_test, what admits a
model one in engines (prove/proof_test), how long a rank may be silent one in stopped_run_test."""
METRIC = "apps.common.testing.setting_effects:step_times"
CHANGES = {
    "metric": Change((METRIC,)),
    "objective.loss": Change("mse"),
    "objective.loss_options": Change(("tau=1",)),
    "metric_options": Change(("factor=3",), {"metric": (METRIC,)}),
    "engine.family": Change("llama"),
    "engine.family_options": Change(("biases=true",)),
    "cluster.rollout.engine_options": Change(("width=3",)),
    "cluster.schedule.options": Change(("every=2",)),
    "engine.weights": Change("replicated"),
    "nproc_per_node": Change(2),
    "batch_size": Change(7),
    "keep_checkpoints": Change(0),
    "tracker": Change(("trackio",)),
    "eval_every": Change(1),
    "save_every": Change(2),
    "engine.backend": Change("megatron"),
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
    "engine.lora.targets": Change(("q_proj",)),
    "engine.lora.target_parameters": Change(("experts.down_proj",)),
    "engine.transformer_options": Change(("deallocate_pipeline_outputs=true",)),
    "engine.learning_rates": Change(("embed_tokens=1e-2",)),
    "engine.recheck_every": Change(1),
    "engine.recheck_rows": Change(0),
    "engine.recheck_tokens": Change(2),
    "engine.recheck_bound": Change(1e-12),
    "engine.on_nonfinite": Change("skip", {"engine.lr": 1e30, "engine.grad_clip": None}),
    "cluster.rollout.cuda_graph_sizes": Change((1, 2)),
    "cluster.rollout.vllm": Change(("block_size=32",)),
    "cluster.env": Change(("NAME=value",)),
    "cluster.rollout.engine": Change("vllm"),
    "cluster.schedule.mode": Change("one_step_off"),
}


SWEEP = SettingSweep(run, BASE, NAMED | set(OWNED), CHANGES)


def test_equal_settings_make_equal_runs(tmp_path: Path) -> None:
    left = SWEEP.equal_runs(tmp_path)
    assert all(left[name] for name in ("metrics", "weights"))


@pytest.mark.parametrize("path", SWEEP.paths())
def test_a_setting_does_something_or_is_refused(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    assert SWEEP.effect(path, tmp_path)


def test_threads_are_those_of_the_rank(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        run(replace(BASE, run_dir=tmp_path, steps=1, threads=before + 1))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def chat(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name in ("train", "eval"):
        rows = [
            {
                "messages": chat(f"{name} {i}" + "?" * i, "yes"),
                "talk": chat(f"{i}", "no"),
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
                "functions": [{"type": "function", "function": {"name": "g", "parameters": {}}}],
                "prompt": f"{i}+1=",
                "question": f"{i}+2=",
                "completion": str(i + 1),
                "reply": str(i + 2),
                "text": f"{name} says {i}",
                "content": f"{name} has {i}",
            }
            for i in range(30)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def texts(data: DataConfig, folder: Path) -> tuple[Any, ...]:
    """What is trained and held out, and what was left out or cut: a pure function of the settings and the files."""
    tokenizer = build_tokenizer()
    sources = data.sources or [Source(write_demonstrations(data, 0, Path("demonstrations.jsonl")))]
    cache = data.cache_dir or folder / "tokens"
    conversations = load_conversations(data, sources, tokenizer, None, cache)
    order = Mixture(conversations.sizes, conversations.weights, 0).at(0, 40)
    trained = [
        tokenizer.decode(conversations.train[i]["input_ids"][conversations.train[i]["loss_mask"]]) for i in order
    ]
    sides = [
        [tokenizer.decode(sample["input_ids"]) for sample in side]
        for side in (conversations.train, conversations.held_out)
    ]
    return sides, trained, conversations.skipped.counts, conversations.skipped.cut


DATA_CHANGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "data": (("eval.jsonl",), {}),
    "eval_data": (Path("eval.jsonl"), {}),
    "form": ("text", {}),
    "train_on": (("user", "assistant"), {}),
    "messages_column": ("talk", {}),
    "tools_column": ("functions", {}),
    "prompt_column": ("question", {"form": "prompt_completion"}),
    "completion_column": ("reply", {"form": "prompt_completion"}),
    "text_column": ("content", {"form": "text"}),
    "eval_share": (0.5, {}),
    "max_tokens": (50, {}),
    "truncation": ("left", {"max_tokens": 50}),
    "cache_dir": (Path("elsewhere"), {}),
}


@pytest.mark.parametrize("name", [path.removeprefix("data.") for path in field_paths(BASE) if path.startswith("data.")])
def test_a_setting_of_the_data_changes_what_is_imitated(
    name: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    if name in DATA_CHANGES:
        value, both = DATA_CHANGES[name]
        base = DataConfig(data=("train.jsonl",), **both)
        folders = (tmp_path / "one", tmp_path / "two", tmp_path / "three")
        first = texts(base, folders[0])
        assert first == texts(base, folders[1])
        changed = texts(replace(base, **{name: value}), folders[2])
        if name == "cache_dir":
            assert list(value.glob("*.arrow"))
            assert not folders[2].exists()
        else:
            assert changed != first
        return
    if name in ("reasoning_weight", "end_of_turn"):  # marks_test and samples of chat_tools show what they change
        unread: dict[str, Any] = {name: 0.5 if name == "reasoning_weight" else "<end>"}
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}"):
            DataConfig(data=("train.jsonl",), form="text", **unread)
        return
    if name == "data_processes":  # tokenised_test shows that so many tokenise
        with pytest.raises(ValueError, match="--data-processes"):
            DataConfig(data_processes=0)
        return
    if name == "bad_rows":  # formats_test shows that they are told or left out
        with pytest.raises(ValueError, match="--bad-rows goes with --data"):
            DataConfig(bad_rows="skip")
        return
    base = DataConfig(data=("train.jsonl",))
    value = other_value(DataConfig, name, getattr(base, name)) if name == "task" else 40
    changes: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"--{name}"):
        replace(base, **changes)
    monkeypatch.chdir(tmp_path)
    synthetic = DataConfig(demonstrations=32)
    assert texts(replace(synthetic, **changes), tmp_path) != texts(synthetic, tmp_path / "base")
