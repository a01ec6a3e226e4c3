"""Learning rates by group: torch's AdamW with param groups, every optimizer, resumed runs, and patterns that fail."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from engines import EngineConfig, LoraConfig, build_engine
from engines.adapters.lora import whole
from engines.execution.learning_rates import rate_scales
from engines.execution.lr_schedule import learning_rate
from engines.families.registry import family_of
from engines.families.torch_operations import choose_torch_operations
from engines.fsdp2.fsdp2_executor import FSDP2Executor
from engines.inputs.planner_and_inputs import planner_and_inputs
from engines.parallel.configured_layout import layout_of
from engines.parallel.groups import ParallelGroups
from engines.proofs.float64 import KeepFloat64
from engines.proofs.forked_ranks import launch_forked
from engines.step import Engine
from engines.testing.executors import inside
from engines.testing.expert_parallel import float64_shards, weights
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch, tiny_model
from engines.weights.disk_names import OWN_NAMES, DiskNames
from engines.weights.model_weights import ModelWeights
from objectives import SFT

LENGTHS = [7, 3, 12, 5, 9, 2]
STEPS = 4
RATES = ("embed_tokens=3e-2", r"layers\.0\.linear_attn=1e-3", "norm=0")
SCHEDULE: dict[str, Any] = {"lr_schedule": "linear", "warmup_steps": 2, "total_steps": 6, "min_lr_ratio": 0.1}
KINDS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "replicated": {"weights": "replicated"},
    "moments on the host": {"optimizer_on_host": True},
    "bfloat16 moments": {"moments_dtype": "bfloat16"},
    "adapters": {"lora": LoraConfig(rank=3), "learning_rates": ("lora_B=0.16", "embed_tokens|lora_A=0.01")},
}


def config_of(**options: Any) -> EngineConfig:
    usual: dict[str, Any] = {
        "device": "cpu",
        "lr": 1e-2,
        "eps": 1e-3,
        "weight_decay": 0.1,
        "grad_clip": 0.1,
        "max_tokens_per_rank": 40,
    }
    return EngineConfig(**{**usual, **SCHEDULE, "learning_rates": RATES, **options})


def model() -> Any:
    return tiny_model("dense", scale=2.0, num_hidden_layers=2)


def engine(**options: Any) -> Any:
    torch.manual_seed(0)  # of adapters
    return build_engine(config_of(**options), model())


def curve(built: Any, steps: Iterable[int] = range(STEPS)) -> list[float]:
    return [built.train_batch(tiny_batch(LENGTHS, seed=step), SFT())["loss"] for step in steps]


def rate_by_hand(name: str, base: float) -> float:
    """As RATES say, read by a person."""
    if "embed_tokens" in name:
        return 3e-2
    if name.startswith("model.layers.0.linear_attn."):
        return 1e-3
    return 0.0 if "norm" in name else base


def torchs() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a plain loop in float64: stock transformers, a sequence at a time, torch's AdamW."""
    net, config = model().double().eval(), config_of(grad_clip=None)
    choose_torch_operations(net)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p], "lr": rate_by_hand(n, config.lr), "weight_decay": 0.1 if p.ndim >= 2 else 0.0}
            for n, p in net.named_parameters()
        ],
        betas=config.betas,
        eps=config.eps,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(config, step) / config.lr)
    losses = []
    for seed in range(STEPS):
        batch = tiny_batch(LENGTHS, seed=seed)
        rows = list(zip(batch["input_ids"].unbind(), batch["loss_mask"].unbind(), strict=True))
        loss: Any = 0
        for ids, mask in rows:
            logits = net(input_ids=ids[None], use_cache=False).logits[0, :-1]
            loss = loss + functional.cross_entropy(logits[mask[1:]], ids[1:][mask[1:]], reduction="sum")
        loss = loss / sum(int(mask[1:].sum()) for _, mask in rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss))
    return losses, {name: p.detach().flatten() for name, p in net.named_parameters()}


def test_steps_are_those_of_torchs_adamw_with_a_group_for_each_rate() -> None:
    config, module = config_of(grad_clip=None), model().double()  # the norm that clips is float32
    groups = ParallelGroups.make(layout_of(config, 1))
    planner, inputs = planner_and_inputs(config, module.config, groups)
    model_weights = ModelWeights.of(family_of(module.config), module)
    began = {name: p.detach().flatten().clone() for name, p in module.named_parameters()}
    with KeepFloat64(), float64_shards():
        want, after = torchs()
        built = Engine(config, FSDP2Executor(config, groups, module, inputs), planner, model_weights)
        assert curve(built) == pytest.approx(want, rel=1e-12)
        own = weights(built)
    assert own.keys() == after.keys()
    for name, value in after.items():
        torch.testing.assert_close(own[name], value, rtol=1e-10, atol=1e-12, msg=name)
        assert torch.equal(own[name], began[name]) == (rate_by_hand(name, config.lr) == 0.0), name


@pytest.mark.parametrize("kind", ["replicated", "moments on the host", "bfloat16 moments"])
def test_every_optimizer_gives_each_group_its_rate(kind: str) -> None:
    mine, plain = engine(**KINDS[kind]), engine()
    got, want = curve(mine), curve(plain)
    loose = 5e-3 if kind == "bfloat16 moments" else 1e-5
    assert got == pytest.approx(want, rel=loose)
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(mine)[name], value, rtol=loose, atol=loose, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_a_rate_of_zero_keeps_its_bits_and_counts_in_the_norm(kind: str) -> None:
    frozen = "lora_A" if kind == "adapters" else "embed_tokens|gate_proj"
    rates = ((f"{frozen}=0",), ())
    built = [engine(**{**KINDS[kind], "learning_rates": one}) for one in rates]
    before = {name: value.clone() for name, value in values(built[0]).items()}
    norms = []
    for step in range(3):
        norms += [one.train_batch(tiny_batch(LENGTHS, seed=step), SFT())["grad_norm"] for one in built]
    assert norms[0] == norms[1] > 0.1  # where it is clipped
    moved = [{n for n, value in values(one).items() if not torch.equal(value, before[n])} for one in built]
    named = {name for name in before if re.search(frozen, name)}
    assert named
    assert named <= moved[1]
    assert not named & moved[0]
    assert len(moved[0]) >= 0.9 * len(before.keys() - named)  # a scalar may well keep its bits


def values(built: Any) -> dict[str, torch.Tensor]:
    """Of what is trained."""
    state = inside(built).state()["model"]
    return {name: whole(value) for name, value in state.items() if name != "lora_base"}


def test_a_first_step_of_adapters_is_as_long_as_its_rate() -> None:
    """Adam's first step is lr * gradient / (|gradient| + eps): of B, 16 times A's; under frozen weights nothing."""
    built = engine(**KINDS["adapters"], eps=1e-30, weight_decay=0.0, warmup_steps=1)
    parts = {n: p for n, p in built.executor.scorer.named_parameters() if p.requires_grad}
    before = {name: whole(p.detach()).clone() for name, p in parts.items()}
    curve(built, range(1))  # B is zero: A has no gradient
    moved = {name: (whole(p.detach()) - before[name]).abs().max() for name, p in parts.items()}
    assert all(float(m) == pytest.approx(0.16, rel=1e-5) for name, m in moved.items() if name.endswith("lora_B"))
    assert all(float(m) == 0 for name, m in moved.items() if name.endswith("lora_A"))
    before = {name: whole(p.detach()).clone() for name, p in parts.items()}
    curve(built, range(1))
    lengths = {name: float((whole(p.detach()) - before[name]).abs().max()) for name, p in parts.items()}
    scheduled = learning_rate(built.config, 1)
    for name, length in lengths.items():
        if name.endswith(
            "lora_A"
        ):  # its second step, the first with a gradient: (1 - beta1) / sqrt(1 - beta2) corrected
            first = (0.1 / (1 - 0.9**2)) / (0.02 / (1 - 0.98**2)) ** 0.5
            assert length == pytest.approx(scheduled * first, rel=1e-3), name


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_resumed_run_has_the_bits_of_a_straight_one(tmp_path: Path, kind: str) -> None:
    whole = engine(**KINDS[kind])
    curve(whole, range(2))
    whole.save(tmp_path / "at")
    rest = curve(whole, range(2, STEPS))
    resumed = engine(**KINDS[kind])
    resumed.load(tmp_path / "at")
    assert curve(resumed, range(2, STEPS)) == rest
    ends = [weights(built) for built in (whole, resumed)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.parametrize(("saves", "loads"), [("sharded", "replicated"), ("replicated", "sharded"), ("sharded",) * 2])
def test_a_checkpoint_goes_on_at_the_rates_of_who_loads_it(tmp_path: Path, saves: str, loads: str) -> None:
    """Saved without groups of rates, or with them, and loaded with others."""
    first = engine(**KINDS[saves] | {"learning_rates": ("linear_attn=1e-3",)})
    curve(first, range(2))
    first.save(tmp_path / "at")
    resumed = engine(**KINDS[loads])
    resumed.load(tmp_path / "at")
    loaded = weights(resumed)
    curve(resumed, range(2, 3))
    still = {name for name, value in weights(resumed).items() if torch.equal(value, loaded[name])}
    assert still >= {name for name in loaded if rate_by_hand(name, 1.0) == 0.0}
    assert not still.intersection(name for name, p in model().named_parameters() if p.ndim > 1)


def ranks(kind: str, shards: int | None) -> tuple[list[float], dict[str, torch.Tensor]]:
    built = engine(**KINDS[kind], shard_ranks=shards, max_tokens_per_rank=40 if dist.get_world_size() == 1 else 20)
    return curve(built), weights(built)


@pytest.mark.parametrize(("kind", "shards"), [("sharded", None), ("sharded", 1), ("replicated", None)])
def test_two_ranks_give_the_steps_of_one(kind: str, shards: int | None) -> None:
    one, two = ranks(kind, None), launch_forked(ranks, (kind, shards), world_size=2)
    assert two[0] == pytest.approx(one[0], rel=1e-5)
    for name, value in one[1].items():
        torch.testing.assert_close(two[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("kind", "rates", "message"),
    [
        ("dense", ("embed_token_=1",), "name on disk holds 'embed_token_'; the nearest are model.embed_tokens.weight"),
        ("dense", ("^embed_tokens=1",), "no parameter's name on disk holds"),
        ("dense", ("norm=1", "q_norm=2"), "an earlier pattern has all that 'q_norm' names: put it first"),
        ("moe", (r"experts\.1\.=1",), "experts.1.gate_proj.weight and not .*, which are one parameter here"),
        ("moe", ("up_proj=1",), "which are one parameter here"),
    ],
)
def test_a_pattern_that_changes_nothing_or_splits_a_parameter_is_refused(
    kind: str, rates: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_engine(EngineConfig(device="cpu", learning_rates=rates), tiny_model(kind))


def test_what_is_frozen_has_no_rate() -> None:
    with pytest.raises(ValueError, match=r"all that 'embed_tokens' names is frozen, as model.embed_tokens.weight"):
        engine(lora=LoraConfig(rank=3), learning_rates=("embed_tokens=1",))
    options: dict[str, Any] = {"vision": "frozen", "learning_rates": ("visual=1",)}
    with pytest.raises(ValueError, match=r"is frozen, as model.visual"):
        build_engine(EngineConfig(device="cpu", **options), tiny_model("vision"))
    built: Any = build_engine(EngineConfig(device="cpu", **options | {"vision": "trained"}), tiny_model("vision"))
    towers = [name for name in built.executor.scales if ".visual." in name]
    assert len(towers) == len(built.executor.scales) == len(list(built.executor.model.model.visual.parameters()))


def test_names_are_those_on_disk() -> None:
    """Experts in pieces, and a text part under its prefix."""
    net = tiny_model("moe")
    config = EngineConfig(learning_rates=(r"\.mlp\.experts\.\d+\.=1e-4",))
    scales = rate_scales(config, net, OWN_NAMES)
    assert scales.keys() == {n for n, _ in net.named_parameters() if re.search("experts.(gate_up|down)_proj", n)}
    assert set(scales.values()) == {1e-4 / 1e-5}
    text = rate_scales(EngineConfig(learning_rates=(r"^model\.language_model\.embed=1",)), net, DiskNames(True, True))
    assert text.keys() == {"model.embed_tokens.weight"}
    with pytest.raises(ValueError, match="no parameter"):
        rate_scales(config, net, DiskNames(split_experts=False))


def test_a_reference_policy_has_no_rates() -> None:
    reference: Any = build_engine(config_of(learning_rates=("nothing=1",)), model(), trainable=False)
    assert reference.executor.scales == {}
