"""The head for multi-token prediction in an engine: its loss and gradient, and what it leaves as it was."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engines import EngineConfig, LoraConfig, build_engine
from engines.families.registry import family_of
from engines.fsdp2.fsdp2_executor import FSDP2Executor
from engines.inputs.planner_and_inputs import planner_and_inputs
from engines.loading import empty_module, load_model
from engines.mtp.head import add_head
from engines.parallel.configured_layout import layout_of
from engines.parallel.groups import ParallelGroups
from engines.proofs.float64 import KeepFloat64
from engines.step import Engine
from engines.testing.expert_parallel import float64_shards, gradients
from engines.testing.mtp_reference import mtp_loss
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.testing.vision import samples, vision_model
from engines.tiny import tiny_batch, tiny_config, tiny_model
from engines.weight_sharing import SharedParameters, shared_parameters
from engines.weights.model_weights import ModelWeights
from objectives import GRPO, SFT
from seqpack import make_batch

LENGTHS = [7, 1, 12, 2, 9, 3]
FACTOR = 0.3
EXPERTS = "mtp.layers.0.mlp.experts"
QWEN3_5_HEAD = (
    *("fc.weight", "norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"),
    *("layers.0.input_layernorm.weight", "layers.0.post_attention_layernorm.weight"),
    *(f"layers.0.self_attn.{x}.weight" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"layers.0.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
)
"""Names of the head in published checkpoints of Qwen3.5, behind `mtp.`."""


def model(kind: str = "dense", seed: int = 0) -> Any:
    made: Any = tiny_model(kind, seed=seed, scale=2.0, mtp_num_hidden_layers=1)
    add_head(made)
    with torch.no_grad():
        for name, one in made.mtp.named_parameters():
            one.add_(0.1 * torch.randn_like(one)) if "norm" in name else one.mul_(4)
    return made


def engine(made: Any, **options: Any) -> Any:
    config = {"device": "cpu", "lr": 1e-2, "eps": 1e-3, "max_tokens_per_rank": 20, "grad_clip": None}
    return build_engine(EngineConfig(**{**config, "mtp_loss_scaling_factor": FACTOR, **options}), made)


def in_float64(made: Any, batching: Any) -> Engine:
    config = EngineConfig(device="cpu", batching=batching, max_tokens_per_rank=20, mtp_loss_scaling_factor=FACTOR)
    weights = ModelWeights.of(family_of(made.config), made)
    groups = ParallelGroups.make(layout_of(config, 1))
    planner, inputs = planner_and_inputs(config, made.config, groups)
    return Engine(config, FSDP2Executor(config, groups, made, inputs), planner, weights)


@pytest.mark.parametrize("batching", ["packed", "padded"])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_heads_loss_and_gradient_are_those_of_one_sequence_at_a_time(kind: str, batching: Any) -> None:
    """In float64, against a head written out in plain torch: tokens of other sequences would show."""
    made, batch = model(kind).double(), tiny_batch(LENGTHS)
    if kind == "moe":
        made.set_experts_implementation("eager")
    plain = {name: p.detach().clone().requires_grad_() for name, p in made.named_parameters()}
    with KeepFloat64(), float64_shards():
        total, hits, tokens = torch.zeros((), dtype=torch.float64), 0, 0
        for ids, mask in zip(batch["input_ids"].unbind(), batch["loss_mask"].unbind(), strict=True):
            hidden = made.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            loss, right = mtp_loss(plain, made.config, ids, hidden, mask)
            total, hits, tokens = total + loss, hits + right, tokens + int(mask.sum())
        (FACTOR * total / tokens).backward()
        built = in_float64(made, batching)
        got = built.forward_backward(batch, SFT())
    assert got["mtp_loss"] == pytest.approx(float(total) / tokens, rel=1e-9)
    assert got["mtp_accuracy"] == pytest.approx(hits / tokens)
    assert got["loss"] == pytest.approx(got["nll"] + FACTOR * got["mtp_loss"], rel=1e-9)
    for name, grad in gradients(built).items():
        if name.startswith("mtp."):
            wanted = plain[name].grad
            assert wanted is not None
            assert (grad - wanted).abs().max() <= 1e-8 * wanted.abs().max(), name
        else:
            assert plain[name].grad is None, name


def dense_batch(seed: int = 0) -> Any:
    """Nearly all tokens are trained, so that no shortcut for those that are not read changes the sizes of products."""
    batch = tiny_batch([9, 11, 8, 12], seed=seed)
    for row in batch["loss_mask"].unbind():
        row[1:] = True
    return batch


@pytest.mark.parametrize(
    "options",
    [{}, {"batching": "padded"}, {"weights": "sharded"}, {"weights": "replicated"}, {"optimizer": "muon"}],
    ids=str,
)
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_no_bit_of_the_models_gradient_changes(kind: str, options: dict[str, Any]) -> None:
    """The engine without the head has the same gradients, losses of the objective, scores and updates."""
    found = []
    for factor in (FACTOR, None):
        made: Any = model(kind)
        if factor is None:
            del made.mtp
        built = engine(made, mtp_loss_scaling_factor=factor, **options)
        scores = built.forward(dense_batch())["log_probs"].values()
        steps = [built.train_batch(dense_batch(step), SFT()) for step in range(2)]
        found.append((scores, [step["nll"] for step in steps], exported(built), steps))
    (scores, losses, weights, steps), (other_scores, other_losses, other_weights, other_steps) = found
    assert torch.equal(scores, other_scores)
    assert losses == other_losses
    assert {"mtp_loss", "mtp_accuracy"} <= steps[0].keys() - other_steps[0].keys()
    assert {name for name in weights if not name.startswith("mtp.")} == other_weights.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in other_weights.items())


def exported(built: Any) -> dict[str, Tensor]:
    return {part.name: part.flat.clone() for part in built.export_weights(max_bytes=2**40)}


def test_it_learns_the_token_after_the_next_and_the_objective_does_not_matter() -> None:
    """By rows without any advantage too: what was sampled is what is to be drafted."""
    built, batch = engine(model(), lr=3e-2, mtp_loss_scaling_factor=1.0), dense_batch()
    batch["advantages"] = 0 * batch["advantages"]
    steps = [built.train_batch(batch, GRPO()) for _ in range(100)]
    assert steps[-1]["mtp_loss"] < 0.2 * steps[0]["mtp_loss"]
    assert steps[-1]["mtp_accuracy"] > 0.8 > steps[0]["mtp_accuracy"]
    assert steps[0]["computed_sequences"] == 4


def test_a_checkpoint_an_export_and_a_directory_hold_the_head(tmp_path: Path) -> None:
    built = engine(model())
    built.train_batch(tiny_batch(LENGTHS), SFT())
    built.save(tmp_path / "checkpoint")
    built.save_hf(tmp_path / "export")
    wanted = built.train_batch(tiny_batch(LENGTHS, seed=1), SFT())
    resumed = engine(model(seed=1))
    resumed.load(tmp_path / "checkpoint")
    assert resumed.train_batch(tiny_batch(LENGTHS, seed=1), SFT()) == wanted
    names = {name for name in load_file(tmp_path / "export/model.safetensors") if name.startswith("mtp.")}
    assert names == {f"mtp.{name}" for name in QWEN3_5_HEAD}
    assert json.loads((tmp_path / "export/config.json").read_text())["mtp_num_hidden_layers"] == 1
    again = engine(None, model=str(tmp_path / "export"))
    first = {name: t for name, t in exported(again).items() if name.startswith("mtp.")}
    files = load_file(tmp_path / "export/model.safetensors")
    assert all(torch.equal(t.view(files[name].shape), files[name]) for name, t in first.items())
    assert len(first) == len(QWEN3_5_HEAD)
    carried = engine(None, model=str(tmp_path / "export"), mtp_loss_scaling_factor=None)
    carried.train_batch(tiny_batch(LENGTHS), SFT())
    carried.save_hf(tmp_path / "carried")
    assert all(torch.equal(files[n], load_file(tmp_path / "carried/model.safetensors")[n]) for n in names)


def test_it_sees_what_is_in_the_place_of_images() -> None:
    """Packed and padded rows with images agree, and differ from those of the same tokens under other pixels."""
    found = []
    for batching in ("packed", "padded"):
        made = vision_model(mtp_num_hidden_layers=1)
        add_head(made)
        built = engine(made, vision="trained", batching=batching, max_tokens_per_rank=60)
        found.append(built.train_batch(make_batch(samples()), SFT()))
        other = built.forward_backward(make_batch(other_pixels()), SFT())
        found[-1]["other"] = other["mtp_loss"]
    for name in ("loss", "mtp_loss", "grad_norm", "other"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4), name
    assert found[0]["other"] != pytest.approx(found[0]["mtp_loss"], rel=1e-3)


def other_pixels() -> list[Any]:
    every = samples()
    return [{**one, **{key: -value for key, value in one.items() if key.startswith("pixel")}} for one in every]


@pytest.mark.parametrize(
    ("options", "changes", "text"),
    [
        ({"lora": LoraConfig(rank=2)}, {}, "adapters leave all as they are"),
        ({"mtp_loss_scaling_factor": 0.0}, {}, "must be above 0"),
        ({}, {"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers is 0"),
        ({}, {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
        ({}, {"mtp_use_dedicated_embeddings": True}, "embeddings of its own"),
        ({}, {"mtp_layer_types": ["linear_attention"]}, "mtp_layer_types"),
    ],
)
def test_what_is_not_trained_is_refused_by_name(options: Any, changes: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        engine(tiny_config(**{"mtp_num_hidden_layers": 1, **changes}), **options)


def test_a_head_that_nothing_trains_is_refused() -> None:
    with pytest.raises(ValueError, match="set mtp_loss_scaling_factor, or take it off"):
        engine(model(), mtp_loss_scaling_factor=None)


def test_a_family_without_this_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"for Qwen3\.5"):
        engine(tiny_config("attention"))


def test_a_directory_without_the_head_is_refused(tmp_path: Path) -> None:
    made: Any = tiny_model(mtp_num_hidden_layers=1)
    made.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks mtp\."):
        engine(None, model=str(tmp_path))


def test_a_sampler_over_transformers_own_class_gets_no_head(tmp_path: Path) -> None:
    built = engine(model())
    plain: Any = tiny_model()
    stock = {name for name, _ in plain.named_parameters()}
    assert {piece.name for piece in built.export_weights(live=True)} == stock
    assert {shard.name for shard in built.export_shards(live=True)} == stock
    shared = shared_parameters(built)
    assert isinstance(shared, SharedParameters)
    assert shared.tensors.keys() == stock
    built.save_hf(tmp_path)
    for module in (
        load_model(config := replace(built.config, model=str(tmp_path))),
        empty_module(config, torch.float32),
    ):
        assert {name for name, _ in module.named_parameters()} == stock
    assert {shard.name for shard in built.export_shards()} == {piece.name for piece in built.export_weights()}


@pytest.mark.parametrize("joined", [False, True])
def test_experts_of_the_head_keep_the_form_that_they_have_on_disk(tmp_path: Path, joined: bool) -> None:
    """Whatever form those of the layers have."""
    engine(model("moe")).save_hf(tmp_path / "split")
    files = load_file(tmp_path / "split/model.safetensors")
    assert f"{EXPERTS}.3.down_proj.weight" in files
    if joined:
        matrices = {x: [files.pop(f"{EXPERTS}.{e}.{x}_proj.weight") for e in range(4)] for x in ("gate", "up", "down")}
        pairs = zip(matrices["gate"], matrices["up"], strict=True)
        files[f"{EXPERTS}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        files[f"{EXPERTS}.down_proj"] = torch.stack(matrices["down"])
        save_file(files, tmp_path / "split/model.safetensors", metadata={"format": "pt"})
    engine(None, model=str(tmp_path / "split")).save_hf(tmp_path / "again")
    again = load_file(tmp_path / "again/model.safetensors")
    assert again.keys() == files.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in files.items())
