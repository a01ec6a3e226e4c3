"""Adapters against peft on stock transformers, one sequence at a time; and what stays as it was."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM

from engines import EngineConfig, LoraConfig, TrainEngine, base_policy, build_engine, save_adapter
from engines.adapters.adapter_export import adapter_layout
from engines.adapters.lora import is_adapter, whole
from engines.adapters.stacked import peft_tensors
from engines.families.torch_operations import choose_torch_operations
from engines.testing.edit_manifest import edit_metadata
from engines.testing.executors import assert_same, inside, state_of
from engines.testing.one_rank import one_rank
from engines.tiny import tiny_batch, tiny_model
from engines.weights.row_shards import own_part
from objectives import SFT

__all__ = ["one_rank"]
LENGTHS = [9, 2, 14, 1, 21, 6]
LORA = LoraConfig(rank=3, alpha=7.0)
EXPERTS = replace(LORA, target_parameters=("experts.gate_up_proj", "experts.down_proj"))


def base_of(tmp_path: Path, kind: str = "dense", dtype: torch.dtype = torch.float32) -> Path:
    path = tmp_path / "base"
    model: Any = tiny_model(kind, scale=2.0, num_hidden_layers=2).to(dtype)
    model.save_pretrained(path)
    return path


def engine_of(path: Path, lora: LoraConfig = LORA, **options: Any) -> TrainEngine:
    settings: dict[str, Any] = {"device": "cpu", "lr": 1e-2, "max_tokens_per_rank": 32, "weight_decay": 0.1}
    return build_engine(EngineConfig(**settings | options, model=str(path), lora=lora))


def adapters(built: TrainEngine) -> dict[str, Tensor]:
    return {n: whole(p.detach()).clone() for n, p in inside(built).model.named_parameters() if is_adapter(n)}


def perturb(built: TrainEngine) -> TrainEngine:
    """Leave nothing as it was initialised: B is zero, so that A would have no gradient."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in inside(built).model.named_parameters():
            if is_adapter(name):
                local = own_part(parameter).part
                local.add_(torch.randn(local.shape, generator=generator).to(local.dtype) * 0.1)
    return built


def stock(path: Path, folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    choose_torch_operations(model)
    return peft.PeftModel.from_pretrained(model, folder, is_trainable=True).eval()


def log_probs_of(model: Any, ids: Tensor) -> Tensor:
    table = model(input_ids=ids[None], use_cache=False).logits[0].float().log_softmax(-1)
    return torch.cat([torch.zeros(1), table[:-1].gather(1, ids[1:, None]).squeeze(1)])


def gradients(built: TrainEngine, batch: TensorDict) -> dict[str, Tensor]:
    """Of the adapters, right before the update."""
    grads = {}
    step = inside(built).optimizer_step

    def spied(*args: Any) -> Any:
        parameters = inside(built).model.named_parameters()
        grads.update({n: whole(p.grad).clone() for n, p in parameters if p.grad is not None})
        return step(*args)

    inside(built).optimizer_step = spied
    built.train_batch(batch, SFT())
    return grads


CASES = [
    ("dense", LORA, {}),
    ("dense", LORA, {"gradient_checkpointing": True}),
    ("dense", LORA, {"batching": "padded"}),
    ("dense", LoraConfig(rank=2, targets=("q_proj", "in_proj_qkv"), rank_stabilized=True), {}),
    ("moe", LORA, {}),
    ("moe", EXPERTS, {}),
    ("moe", EXPERTS, {"gradient_checkpointing": True}),
    ("moe", replace(EXPERTS, rank=8, targets=("q_proj",), rank_stabilized=True), {"batching": "padded"}),
    ("next", replace(EXPERTS, target_parameters=("mlp.experts.down_proj",)), {}),
    ("next", LORA, {}),
    ("attention", LORA, {}),
]


@pytest.mark.parametrize(("kind", "lora", "options"), CASES)
def test_log_probs_and_gradients_are_those_of_peft(
    tmp_path: Path, kind: str, lora: LoraConfig, options: dict[str, Any]
) -> None:
    path, batch = base_of(tmp_path, kind), tiny_batch(LENGTHS)
    built = perturb(engine_of(path, lora, **options))
    save_adapter(built, tmp_path / "adapter")
    model = stock(path, tmp_path / "adapter")
    rows = [log_probs_of(model, ids) for ids in batch["input_ids"].unbind()]
    scores = built.forward(batch)["log_probs"].values()
    assert float((scores - torch.cat(rows)).detach().abs().max()) < 1e-5
    mask = batch["loss_mask"].values()
    (-(torch.cat(rows) * mask).sum() / mask.sum()).backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    own = {f"base_model.model.{n}.default.weight": grad for n, grad in peft_tensors(gradients(built, batch))}
    assert own.keys() == wanted.keys()
    floor = 1e-3 * max(float(grad.abs().max()) for grad in wanted.values())
    for name, grad in wanted.items():
        assert float((own[name] - grad).abs().max()) < 1e-4 * max(float(grad.abs().max()), floor), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "lora"), [("dense", LORA), ("moe", EXPERTS)])
def test_a_merged_export_is_pefts(tmp_path: Path, kind: str, lora: LoraConfig, dtype: torch.dtype) -> None:
    path = base_of(tmp_path, kind, dtype=dtype)
    built = perturb(engine_of(path, lora))
    save_adapter(built, tmp_path / "adapter")
    built.save_hf(tmp_path / "merged")
    base = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    wanted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=dtype).state_dict()
    before = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).state_dict()
    assert merged.keys() == wanted.keys() == before.keys()
    for name, tensor in wanted.items():
        if ".experts." in name and dtype == torch.bfloat16:  # peft rounds their adapters too
            torch.testing.assert_close(merged[name], tensor, atol=2e-3, rtol=2**-7, msg=name)
            continue
        assert torch.equal(merged[name], tensor), name
    assert sum(not torch.equal(merged[name], before[name]) for name in merged) == len(adapters(built)) // 2
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("base", "merged")]
    assert {n: t.dtype for n, t in files[0].items()} == {n: t.dtype for n, t in files[1].items()}
    live = {piece.name: piece.flat for piece in built.export_weights(live=True, max_bytes=2**40)}
    assert {flat.dtype for flat in live.values()} == {torch.float32}
    assert all(torch.equal(flat.to(dtype), merged[name].flatten()) for name, flat in live.items())


def test_adapters_on_experts_go_on_and_come_off(tmp_path: Path) -> None:
    """A resumed run has the bits of a straight one; without its adapters the model is the base; a sync is merged."""
    path, batch = base_of(tmp_path, "moe"), tiny_batch(LENGTHS)
    plain = build_engine(EngineConfig(device="cpu", model=str(path), max_tokens_per_rank=32), trainable=False)
    straight, resumed = engine_of(path, EXPERTS), engine_of(path, EXPERTS)
    straight.train_batch(batch, SFT())
    straight.save(tmp_path / "saved")
    resumed.load(tmp_path / "saved")
    for built in (straight, resumed):
        built.train_batch(tiny_batch(LENGTHS, seed=1), SFT())
    mine, other = adapters(straight), adapters(resumed)
    assert all(torch.equal(value, other[name]) for name, value in mine.items())
    assert sum(".experts." in name for name in mine) == 2 * 2 * 2
    with base_policy(straight) as base:
        scores = base.forward(batch)["log_probs"].values()
    torch.testing.assert_close(scores, plain.forward(batch)["log_probs"].values(), atol=0, rtol=0)
    assert adapter_layout(straight) is None
    assert adapter_layout(engine_of(path)) is not None


@pytest.mark.parametrize(
    ("kind", "lora", "options", "text"),
    [
        (
            "moe",
            replace(EXPERTS, target_parameters=("experts.up_proj",)),
            {},
            "no 'experts.up_proj' in this model",
        ),
        ("dense", EXPERTS, {}, "in this model, but none: it has no stacked experts"),
        ("moe", replace(EXPERTS, rank=64), {}, "lora rank 64 is larger than model.layers.0.mlp.experts.gate_up_proj"),
        ("moe", EXPERTS, {"expert_parallel": 2}, "leave expert_parallel at 1, or set backend='megatron'"),
        ("moe", EXPERTS, {"device": "npu"}, "have not been run on an NPU"),
        ("moe", EXPERTS, {"compile": "on"}, "experts with adapters are not compiled"),
    ],
)
def test_what_experts_with_adapters_are_not_is_refused(
    tmp_path: Path, kind: str, lora: LoraConfig, options: dict[str, Any], text: str
) -> None:
    path = base_of(tmp_path, kind)
    with pytest.raises(ValueError, match=text):
        engine_of(path, lora, **options)


def test_the_base_stays_as_it_is_and_is_the_reference(tmp_path: Path) -> None:
    path, batch = base_of(tmp_path, dtype=torch.bfloat16), tiny_batch(LENGTHS)
    plain = build_engine(EngineConfig(device="cpu", model=str(path), max_tokens_per_rank=32), trainable=False)
    wanted = plain.forward(batch)["log_probs"].values()
    built = engine_of(path)
    assert torch.equal(built.forward(batch)["log_probs"].values(), wanted)  # B is zero
    for step in range(3):
        built.train_batch(tiny_batch(LENGTHS, seed=step), SFT())
    assert not torch.equal(built.forward(batch)["log_probs"].values(), wanted)
    with base_policy(built):
        assert torch.equal(built.forward(batch)["log_probs"].values(), wanted)
    assert not torch.equal(built.forward(batch)["log_probs"].values(), wanted)
    source = AutoModelForCausalLM.from_pretrained(path, dtype="auto").state_dict()
    for name, parameter in inside(built).model.named_parameters():
        assert parameter.requires_grad == is_adapter(name)
        if not is_adapter(name):
            assert torch.equal(whole(parameter), source[name])
            assert parameter.dtype == source[name].dtype
        else:
            assert parameter.dtype == torch.float32
    with pytest.raises(ValueError, match="no adapters"), base_policy(plain):
        pass


def test_resume_is_bitwise_and_a_checkpoint_holds_the_adapters_alone(tmp_path: Path) -> None:
    path = base_of(tmp_path, dtype=torch.bfloat16)
    whole_run = engine_of(path)
    curve = [whole_run.train_batch(tiny_batch(LENGTHS, seed=step), SFT()) for step in range(4)]
    half = engine_of(path)
    for step in range(2):
        half.train_batch(tiny_batch(LENGTHS, seed=step), SFT())
    half.save(tmp_path / "checkpoint")
    torch.manual_seed(99)
    resumed = engine_of(path)
    resumed.load(tmp_path / "checkpoint")
    again = [resumed.train_batch(tiny_batch(LENGTHS, seed=step), SFT()) for step in range(2, 4)]
    assert [m["loss"] for m in again] == [m["loss"] for m in curve[2:]]
    left, right = adapters(whole_run), adapters(resumed)
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert all(is_adapter(name) or name == "lora_base" for name in inside(half).state()["model"])


def test_an_adapter_of_another_base_is_refused_by_name(tmp_path: Path) -> None:
    path = base_of(tmp_path)
    built = engine_of(path)
    built.train_batch(tiny_batch(LENGTHS), SFT())
    built.save(tmp_path / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():  # one bit of one weight
        model.model.layers[0].mlp.up_proj.weight[3, 5] *= 1 + 2**-22
    model.save_pretrained(tmp_path / "other")
    other = engine_of(tmp_path / "other")
    other.train_batch(tiny_batch(LENGTHS, seed=5), SFT())
    before = state_of(other)
    with pytest.raises(ValueError, match=r"another base than .*other"):
        other.load(tmp_path / "checkpoint")
    assert_same(state_of(other), before)
    with pytest.raises(ValueError, match=r"lora_A has shape \(3, 32\) in the checkpoint"):
        engine_of(path, replace(LORA, rank=2)).load(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="lora_A is in the checkpoint and not in this model"):
        engine_of(path, LoraConfig(rank=3, alpha=7.0, targets=("q_proj",))).load(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match="checkpoint of another model"):
        engine_of(path, LoraConfig()).load(tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"alpha": 700.0}, r"lora alpha 7.0, this engine has 700.0.*set lora alpha to 7.0"),
        ({"rank_stabilized": True}, "lora rank_stabilized False, this engine has True"),
    ],
)
def test_an_adapter_of_another_scale_is_refused_by_name(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    path = base_of(tmp_path)
    built = engine_of(path)
    built.train_batch(tiny_batch(LENGTHS), SFT())
    built.save(tmp_path / "checkpoint")
    other = engine_of(path, replace(LORA, **change))
    other.train_batch(tiny_batch(LENGTHS, seed=5), SFT())
    before = state_of(other)
    with pytest.raises(ValueError, match=text):
        other.load(tmp_path / "checkpoint")
    assert_same(state_of(other), before)


def test_an_adapter_whose_scale_was_not_written_down_loads_with_a_warning(tmp_path: Path) -> None:
    path = base_of(tmp_path)
    built = engine_of(path)
    built.train_batch(tiny_batch(LENGTHS), SFT())
    built.save(tmp_path / "checkpoint")
    edit_metadata(tmp_path / "checkpoint", lambda metadata: metadata.pop("adapter"))
    other = engine_of(path)
    with pytest.warns(UserWarning, match=r"how its adapters were scaled: .* lora alpha 7.0 and rank_stabilized False"):
        other.load(tmp_path / "checkpoint")
    assert_same(state_of(other), state_of(built))


def test_what_cannot_be_had_is_refused(tmp_path: Path) -> None:
    path = base_of(tmp_path)
    with pytest.raises(ValueError, match=r"no linear layer 'query' in this model, but .*q_proj"):
        engine_of(path, LoraConfig(rank=2, targets=("query",)))
    experts: Any = tiny_model("moe")
    experts.save_pretrained(tmp_path / "moe")
    with pytest.raises(ValueError, match="no linear layer 'up_proj'"):
        engine_of(tmp_path / "moe", LoraConfig(rank=2, targets=("up_proj",)))
    with pytest.raises(ValueError, match=r"lora rank 33 is larger than .*q_proj"):
        engine_of(path, LoraConfig(rank=33, targets=("q_proj",)))
    with pytest.raises(ValueError, match="adapters and the weights under them are sharded"):
        engine_of(path, weights="replicated")
    with pytest.raises(ValueError, match="compile='on' cannot be had: on a CPU the plain layers are as fast"):
        engine_of(path, compile="on")
    with pytest.raises(ValueError, match="the engine has no adapter to save"):
        save_adapter(engine_of(path, LoraConfig()), tmp_path / "adapter")


@pytest.mark.parametrize(
    "options",
    [
        *({"rank": value} for value in (-1, 1.5, True, "16", None)),
        *({"rank": 4, "alpha": value} for value in (0, -1.0, float("nan"), float("inf"), "1")),
        *({"rank": 4, "targets": value} for value in ("q_proj", ["q_proj"], ("",), (1,))),
        {"rank": 4, "rank_stabilized": 1},
        {"alpha": 8.0},
        {"targets": ("q_proj",)},
        {"rank_stabilized": True},
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"lora {list(options)[-1]}"):
        LoraConfig(**options)


def test_the_files_say_what_peft_wants_to_know(tmp_path: Path) -> None:
    path = base_of(tmp_path)
    save_adapter(engine_of(path, replace(LORA, targets=("q_proj", "v_proj"))), tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 7.0, ["q_proj", "v_proj"])
    assert config["base_model_name_or_path"] == str(path)
    known = peft.PeftConfig.from_pretrained(tmp_path / "adapter").to_dict()
    assert {name: known[name] for name in config if name not in ("target_modules", "peft_type", "task_type")} == {
        name: value for name, value in config.items() if name not in ("target_modules", "peft_type", "task_type")
    }
