"""Muon beside AdamW against torch's own, on stock transformers; ranks, moments, files."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from engines import EngineConfig, LoraConfig, build_engine
from engines.families.registry import family_of
from engines.fast.settings import replication_refusal
from engines.fsdp2.fsdp2_executor import FSDP2Executor
from engines.inputs.planner_and_inputs import planner_and_inputs
from engines.loading import cast_parameters
from engines.muon.matrices import muon_matrices
from engines.muon.zeropower import rate_ratio, zeropower_via_newtonschulz
from engines.parallel.configured_layout import layout_of
from engines.parallel.groups import ParallelGroups
from engines.private_api import set_experts
from engines.proofs.forked_ranks import launch_forked
from engines.step import Engine
from engines.testing.executors import inside
from engines.testing.expert_parallel import float64_shards, weights
from engines.testing.one_rank import one_rank  # noqa: F401
from engines.testing.stock_muon import float64_muon, stock_muon_steps
from engines.tiny import tiny_batch, tiny_model
from engines.weights.model_weights import ModelWeights
from objectives import SFT

LENGTHS = [7, 3, 12, 5, 9, 2, 14, 6]
STEPS = 4
Weights = dict[str, torch.Tensor]


def config_of(**options: Any) -> EngineConfig:
    usual: dict[str, Any] = {"device": "cpu", "optimizer": "muon", "lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
    return EngineConfig(**{**usual, "grad_clip": None, "max_tokens_per_rank": 20, **options})


def model(kind: str) -> Any:
    return tiny_model(kind, scale=2.0, num_hidden_layers=4 if kind == "dense" else 2)


def batches(first: int = 0, steps: int = STEPS) -> list[TensorDict]:
    return [tiny_batch(LENGTHS, seed=seed) for seed in range(first, first + steps)]


def exact(kind: str, **options: Any) -> tuple[list[float], Weights]:
    """Losses and weights in float64, over all ranks."""
    config = config_of(**options)
    module: Any = cast_parameters(model(kind), torch.float64)
    set_experts(module.config, "eager")  # transformers' default has no float64
    groups = ParallelGroups.make(layout_of(config, dist.get_world_size()))
    with float64_muon(), float64_shards():
        planner, inputs = planner_and_inputs(config, module.config, groups)
        model_weights = ModelWeights.of(family_of(module.config), module)
        built = Engine(config, FSDP2Executor(config, groups, module, inputs), planner, model_weights)
        curve = [built.train_batch(batch, SFT())["loss"] for batch in batches()]
        return curve, weights(built)


def stock(kind: str) -> tuple[list[float], Weights]:
    curve, after = stock_muon_steps(config_of(), model(kind), batches(), SFT())
    return [row["loss"] for row in curve], after


def alone(folder: Path) -> dict[str, Any]:
    built = build_engine(config_of(), model("moe"))
    for batch in batches():
        built.train_batch(batch, SFT())
    built.save(folder / "one")
    found: dict[str, Any] = {"saved": weights(built)}
    built.train_batch(batches(STEPS, 1)[0], SFT())
    return found | {
        "after": weights(built),
        "dense": (stock("dense"), exact("dense"), exact("dense", weights="sharded")),
        "moe": (stock("moe"), exact("moe"), exact("moe", weights="sharded")),
    }


def on_four(folder: Path) -> dict[str, Any]:
    built = build_engine(config_of(expert_parallel=2), model("moe"))
    built.load(folder / "one")
    loaded = weights(built)
    built.train_batch(batches(STEPS, 1)[0], SFT())
    return {
        "loaded": loaded,
        "after": weights(built),
        "dense": (exact("dense"), exact("dense", shard_ranks=2)),
        "moe": (exact("moe"), exact("moe", expert_parallel=2), exact("moe", expert_parallel=4)),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("muon")
    one = launch_forked(alone, (folder,))
    return {"one": one, "four": launch_forked(on_four, (folder,), 4)}


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_steps_are_those_of_torchs_muon(found: dict[str, dict[str, Any]], kind: str) -> None:
    """A step moves a weight by about 2e-3. All of it is in float64, the iterations too."""
    (losses, want), *others = found["one"][kind]
    for curve, after in (*others, *found["four"][kind]):
        assert curve == pytest.approx(losses, rel=1e-10)
        assert after.keys() == want.keys()
        for name, value in want.items():
            torch.testing.assert_close(after[name], value, rtol=0, atol=1e-10, msg=name)


def test_a_checkpoint_goes_on_under_other_ranks(found: dict[str, dict[str, Any]]) -> None:
    """Bfloat16 products that round otherwise turn a matrix's step by up to 1 %, on some processors."""
    one, four = found["one"], found["four"]
    for name, value in one["saved"].items():
        assert torch.equal(four["loaded"][name], value), name
        step = one["after"][name] - value
        assert (four["after"][name] - one["after"][name]).norm() < 0.02 * step.norm(), name


def run(folder: Path | None = None, **options: Any) -> tuple[Any, Weights]:
    built = build_engine(config_of(**options), model("dense"))
    for batch in batches():
        built.train_batch(batch, SFT())
    if folder is not None:
        built.save(folder)
    return built, weights(built)


def test_moments_on_the_host_change_no_bit_and_narrow_ones_little(one_rank: None) -> None:  # noqa: F811
    _, plain = run(weights="sharded")
    _, adamw = run(optimizer="adamw", muon_momentum=0.95)
    built, host = run(optimizer_on_host=True, weights="sharded")
    assert built.state_summary()["optimizer"].startswith("Muon for ")
    _, every = run(optimizer_on_host=True, parameters_on_host=True)
    _, narrow = run(moments_dtype="bfloat16")
    matrices = muon_matrices(config_of(), model("dense"))
    for name, value in plain.items():
        assert torch.equal(host[name], value), name
        assert torch.equal(every[name], value), name
        torch.testing.assert_close(narrow[name], value, rtol=0, atol=2e-3, msg=name)
        assert (name in matrices) <= (float((adamw[name] - value).abs().max()) > 3e-3), name


@pytest.mark.parametrize("options", [{}, {"moments_dtype": "bfloat16"}, {"optimizer_on_host": True}])
def test_a_resumed_run_has_the_bits_of_a_straight_one(
    options: dict[str, Any],
    tmp_path: Path,
    one_rank: None,  # noqa: F811
) -> None:
    straight, _ = run(tmp_path / "saved", **options)
    state = inside(straight).optimizer.state
    names = {key for each in state.values() for key in each}
    assert names == {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"}
    assert sum("momentum_buffer" in each for each in state.values()) == len(muon_matrices(config_of(), model("dense")))
    resumed = build_engine(config_of(**options), model("dense"))
    resumed.load(tmp_path / "saved")
    for built in (straight, resumed):
        for batch in batches(STEPS, 2):
            built.train_batch(batch, SFT())
    for name, value in weights(straight).items():
        assert torch.equal(weights(resumed)[name], value), name


def test_a_checkpoint_of_the_other_optimizer_is_refused_by_name(tmp_path: Path, one_rank: None) -> None:  # noqa: F811
    for own, other in (("muon", "adamw"), ("adamw", "muon")):
        run(tmp_path / own, optimizer=own)
        built = build_engine(config_of(optimizer=other), model("dense"))
        before = weights(built)
        with pytest.raises(ValueError, match=f"it was trained with optimizer '{own}': set optimizer='{own}', or begin"):
            built.load(tmp_path / own)
        assert all(torch.equal(value, before[name]) for name, value in weights(built).items())


def test_a_gradient_that_is_not_finite_changes_nothing(one_rank: None) -> None:  # noqa: F811
    built, before = run(on_nonfinite="skip")
    executor = inside(built)
    state = {p: dict(each) for p, each in executor.optimizer.state.items()}
    kept = {p: {key: value.clone() for key, value in each.items()} for p, each in state.items()}
    built.forward_backward(batches(9, 1)[0], SFT())
    next(executor.model.parameters()).grad[0, 0] = torch.nan
    built.optimizer_step()
    assert all(torch.equal(value, before[name]) for name, value in weights(built).items())
    for p, each in kept.items():
        assert all(torch.equal(executor.optimizer.state[p][key], value) for key, value in each.items())


@pytest.mark.parametrize("options", [{}, {"moments_dtype": "bfloat16"}, {"optimizer_on_host": True}])
def test_clipping_and_skipping_inside_the_update_are_those_before_it(
    options: dict[str, Any],
    one_rank: None,  # noqa: F811
) -> None:
    """As on a GPU, where the host waits for no norm: gradients come with their scale, and a flag that skips them."""
    (one, _), (two, before) = (run(weights="sharded", **options) for _ in range(2))
    optimizers = [inside(built).optimizer for built in (one, two)]
    for built in (one, two):
        built.forward_backward(batches(9, 1)[0], SFT())
    for p in inside(two).scorer.parameters():
        p.grad.mul_(4.0)
    optimizers[1].grad_scale, optimizers[1].found_inf = torch.tensor(4.0), torch.tensor(1.0)
    optimizers[1].step()
    assert all(torch.equal(value, before[name]) for name, value in weights(two).items())
    optimizers[1].found_inf = torch.tensor(0.0)
    for optimizer in optimizers:
        optimizer.step()
    for name, value in weights(one).items():
        torch.testing.assert_close(weights(two)[name], value, rtol=0, atol=1e-6, msg=name)
        assert not torch.equal(value, before[name]), name


def test_a_learning_rate_of_nothing_keeps_every_bit(one_rank: None) -> None:  # noqa: F811
    first = weights(build_engine(config_of(), model("dense")))
    _, after = run(learning_rates=("mlp=0", r"layers\.0\.=1e-3"))
    for name, value in after.items():
        assert torch.equal(value, first[name]) == (".mlp." in name), name


def test_only_matrices_of_the_decoder_are_muons() -> None:
    names = muon_matrices(config_of(), model("moe"))
    every = dict(model("moe").named_parameters())
    assert all(".layers." in name and every[name].ndim in (2, 3) for name in names)
    left = {re.sub(r".*layers\.\d+\.", "", name) for name in every.keys() - names}
    assert left == {
        *("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
        *("input_layernorm.weight", "post_attention_layernorm.weight", "mlp.shared_expert_gate.weight"),
        *("linear_attn.dt_bias", "linear_attn.A_log", "linear_attn.conv1d.weight", "linear_attn.norm.weight"),
        *("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    }
    frozen = model("dense").requires_grad_(False)
    assert not muon_matrices(config_of(), frozen)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8), (1, 5)])
def test_a_stack_is_orthogonalized_as_torchs_muon_does_each(shape: tuple[int, int]) -> None:
    stack = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    muon: Any = torch.optim.Muon
    for one, got in zip(stack, zeropower_via_newtonschulz(stack), strict=True):
        weight = torch.nn.Parameter(torch.zeros(shape))
        weight.grad = one.clone()
        muon([weight], lr=1.0, momentum=0.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
        torch.testing.assert_close(-rate_ratio(*shape) * got.float(), weight.detach(), rtol=0.02, atol=0.02)
    values = torch.linalg.svdvals(zeropower_via_newtonschulz(stack).double())
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    assert not zeropower_via_newtonschulz(torch.zeros(1, *shape)).any()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lora": LoraConfig(rank=2)}, "optimizer='muon' is for whole weights"),
        ({"optimizer": "adamw", "muon_momentum": 0.9}, "muon_momentum has no effect"),
        ({"muon_momentum": 1.0}, "muon_momentum must be at least 0 and below 1"),
        ({"optimizer": "sgd"}, "optimizer must be one of 'adamw', 'muon'"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config_of(**options)


def test_replicated_weights_are_refused() -> None:
    assert "set weights='sharded', or optimizer='adamw'" in str(replication_refusal(config_of()))
