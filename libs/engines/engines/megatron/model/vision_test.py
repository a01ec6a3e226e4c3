"""Images under Megatron: layouts of four gloo ranks gives the steps, scores, weights and files of one process."""

import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import Tensor, nn

from engines import EngineConfig, LoraConfig, TrainEngine, build_engine
from engines.families.registry import family_of
from engines.inputs.model_inputs import PackedInputs
from engines.launch import ensure_group
from engines.loading import cast_parameters
from engines.media.vision_settings import VisionSettings
from engines.megatron.megatron_executor import MegatronExecutor
from engines.megatron.runtime.process_groups import release
from engines.parallel.groups import ParallelGroups
from engines.parallel.layout import ParallelLayout
from engines.parallel.planning import DataParallelPlanner
from engines.proofs.float64 import KeepFloat64
from engines.proofs.forked_ranks import launch_forked
from engines.proofs.megatron_layouts import exported_by, largest_difference
from engines.step import Engine
from engines.testing.vision import TOWER, Sample, as_stock, samples, stock_loss, text_only, vision_model
from engines.weights.model_weights import ModelWeights
from objectives import GRPO, SFT
from seqpack import make_batch

OBJECTIVE = GRPO(off_policy="mask")
OPTIONS: dict[str, Any] = {"device": "cpu", "lr": 1e-2, "eps": 1e-3, "max_tokens_per_rank": 40, "weight_decay": 0.1}
STEPS = (text_only, samples, samples)
BALANCED: dict[str, Any] = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.05}
TRAINED: dict[str, Any] = {"vision": "trained"}
LORA = LoraConfig(rank=3, alpha=7.0)
LORA_BESIDE_EXPERTS = LoraConfig(rank=3, alpha=7.0, targets=("q_proj", "v_proj", "o_proj", "in_proj_qkv", "out_proj"))
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "vision": ("vision", {}),
    "vision_moe": ("vision_moe", {}),
    "trained tower": ("vision", TRAINED),
    "trained tower, moe": ("vision_moe", TRAINED),
    "lora": ("vision", {"lora": LORA}),
    "lora, moe": ("vision_moe", {"lora": LORA_BESIDE_EXPERTS}),
}
"""By name: kind of `vision_model`, and fields of `EngineConfig`."""
Case = tuple[str, dict[str, Any]]
CASES: list[Case] = [
    ("vision", {"pipeline_parallel": 2, "context_parallel": "static:2"}),
    ("vision_moe", {
        "tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "expert_parallel": 2,
        "gradient_checkpointing": True, "distributed_optimizer": True,
    }),
    ("trained tower", {"tensor_parallel": 2, "context_parallel": "dynamic", "max_tokens_per_rank": 24}),
    ("lora, moe", {"tensor_parallel": 2, "expert_parallel": 2}),
]  # fmt: skip
"""Each size with a frozen tower or a trained one; the pairs that are left are in `EXACT` and vision_layouts_test."""


def name_of(case: Case) -> str:
    return " ".join([case[0], *(f"{key}={value}" for key, value in case[1].items())])


EXACT = {
    "vision": ParallelLayout(tp=2, pp=2),
    "trained tower, moe": ParallelLayout(dp=2, tp=2, ep=2),
}


Metrics = dict[str, float]
Weights = dict[str, Tensor]
Run = tuple[Weights, list[Metrics], list[Tensor], Weights, list[Metrics]]  # what `run` says
Exact = tuple[list[float], Weights]
Alone = tuple[dict[str, Run], Path, dict[str, Exact]]
Together = tuple[list[list[Run]], dict[str, Exact]]


def engine(name: str, sizes: dict[str, Any] | None = None, seed: int = 0, **options: Any) -> TrainEngine:
    """`seed` 1: another tower, or under adapters, which are for one base, other ones of these."""
    kind, fields = KINDS[name]
    layout = {"backend": "megatron", **sizes} if sizes is not None else {}
    losses = BALANCED if kind == "vision_moe" else {}
    module: Any = None if "model" in options else vision_model(kind)
    if seed and "lora" not in fields:
        cast_parameters(module.model.visual, torch.bfloat16).float()
    torch.manual_seed(seed)
    return build_engine(EngineConfig(**OPTIONS | {"vision": "frozen"} | losses | fields | layout | options), module)


def batches() -> list[TensorDict]:
    return [make_batch(make(10 * step)) for step, make in enumerate(STEPS)]


def run(kind: str, folder: Path, sizes: dict[str, Any] | None = None, load: Path | None = None) -> Run:
    """Export, two steps, scores, a checkpoint, a step after it; and that step from `load`, a checkpoint of others."""
    built = engine(kind, sizes)
    before, (*first, last) = exported_by(built), batches()
    curve = [built.train_batch(batch, OBJECTIVE) for batch in first]
    scores = [built.forward(batch)["log_probs"].values().clone() for batch in (*first, last)]
    built.save(folder)
    after = exported_by(built)
    curve.append(built.train_batch(last, OBJECTIVE))
    resumed = []
    for path in (folder, load) if load else ():
        other = engine(kind, sizes, seed=1)
        other.load(path)
        resumed.append(other.train_batch(last, OBJECTIVE))
    return before, curve, scores, after, resumed


def exact(name: str, layout: ParallelLayout | None) -> Exact:
    """Losses and weights in float64: Megatron's on a layout; of stock transformers, a row at a time, without one."""
    kind, fields = KINDS[name]
    module = cast_parameters(vision_model(kind), torch.float64)
    module.config._experts_implementation = "eager"  # transformers' default has no float64
    config = EngineConfig(**OPTIONS | {"grad_clip": None, "vision": "frozen"} | fields)
    rows = [make(10 * step) for step, make in enumerate(STEPS)]
    with KeepFloat64():
        if layout is None:
            return plain(as_stock(module), rows, config)
        weights = ModelWeights.of(family_of(module.config), module)
        groups = ParallelGroups.make(layout)
        executor = MegatronExecutor(
            config, groups, module, PackedInputs(vision=VisionSettings.of(module.config)), trainable=True
        )
        planner = DataParallelPlanner(config.max_tokens_per_rank, groups.layout.plan_size)
        built = Engine(config, executor, planner, weights)
        losses = [built.train_batch(make_batch(step), SFT())["loss"] for step in rows]
        exported = {piece.name: piece.flat.clone() for piece in built.export_weights(2**40, live=True)}
    release()
    return losses, exported


def plain(stock: nn.Module, rows: list[list[Sample]], config: EngineConfig) -> Exact:
    """Torch's AdamW on all but a frozen tower; a trained one has a gradient of zero where a step has no images."""
    trained = [(n, p) for n, p in stock.named_parameters() if config.vision == "trained" or not n.startswith(TOWER)]
    groups = [
        {"params": [p for _, p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for _, p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer, losses = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps), []
    for step in rows:
        for _, parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        loss = stock_loss(stock, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in stock.named_parameters()}


def four_ranks(folder: Path, cases: list[Case], in_float64: dict[str, ParallelLayout]) -> Together:
    results = []
    for number, (kind, sizes) in enumerate(cases):
        results.append(run(kind, folder / str(number), sizes, folder / kind))
        release()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    return everyone, {kind: exact(kind, layout) for kind, layout in in_float64.items()}


def run_alone(folder: Path, kinds: Collection[str], in_float64: Collection[str]) -> Alone:
    """What one process does, by FSDP2; stock transformers where it is float64."""
    made = ensure_group("cpu")
    runs = {kind: run(kind, folder / kind) for kind in sorted(kinds)}
    stock = {kind: exact(kind, None) for kind in in_float64}
    if made:
        dist.destroy_process_group()
    return runs, folder, stock


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return run_alone(tmp_path_factory.mktemp("vision"), {kind for kind, _ in CASES}, EXACT)


@pytest.fixture(scope="module")
def together(alone: Alone) -> Together:
    results: Together = launch_forked(four_ranks, (alone[1], CASES, EXACT), world_size=4)
    return results


def assert_same_step(got: dict[str, float], want: dict[str, float]) -> None:
    for key in ("loss", "grad_norm", *({"auxiliary_loss"} & want.keys())):
        assert got[key] == pytest.approx(want[key], rel=1e-5, abs=1e-6), key


def assert_same_steps(alone: Run, ranks: list[Run]) -> None:
    _, curve, scores, after, _ = alone
    for run in ranks:
        for left, right in zip(run[1], curve, strict=True):
            assert_same_step(left, right)
        for own, want in zip(run[2], scores, strict=True):
            torch.testing.assert_close(own, want, atol=1e-5, rtol=1e-5)
        assert largest_difference(run[3], after) < 1e-5


def assert_same_exports(alone: Run, ranks: list[Run], trained: bool) -> None:
    before = alone[0]
    assert any(name.startswith(TOWER) for name in before)
    for run in ranks:
        assert run[0].keys() == before.keys()
        for name, value in before.items():
            assert torch.equal(run[0][name], value), name
            assert not name.startswith(TOWER) or torch.equal(run[3][name], value) != trained, name


def assert_checkpoints_continue(alone: Run, ranks: list[Run]) -> None:
    last = alone[1][-1]
    assert len(ranks[0][4]) == 2
    for step in ranks[0][4]:
        assert_same_step(step, last)


def ranks_of(together: Together, number: int) -> list[Run]:
    return [results[number] for results in together[0]]


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(name_of, CASES))
def test_every_layout_gives_the_steps_of_one_process(alone: Alone, together: Together, number: int) -> None:
    assert_same_steps(alone[0][CASES[number][0]], ranks_of(together, number))


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(name_of, CASES))
def test_exports_have_the_bits_of_fsdp2s_and_frozen_towers_stay(alone: Alone, together: Together, number: int) -> None:
    kind = CASES[number][0]
    assert_same_exports(alone[0][kind], ranks_of(together, number), "trained" in kind)


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(name_of, CASES))
def test_a_checkpoint_of_its_own_or_of_fsdp2_continues(alone: Alone, together: Together, number: int) -> None:
    assert_checkpoints_continue(alone[0][CASES[number][0]], ranks_of(together, number))


@pytest.mark.parametrize("kind", EXACT)
def test_float64_steps_equal_those_of_stock_transformers_to_nine_digits(
    alone: Alone, together: Together, kind: str
) -> None:
    want, got = alone[2][kind], together[1][kind]
    assert got[0] == pytest.approx(want[0], rel=1e-9)
    assert len({*map(float, itertools.chain(want[0]))}) == len(STEPS)
    for name, value in want[1].items():
        torch.testing.assert_close(got[1][name].view_as(value), value, atol=1e-9, rtol=1e-9, msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_directory_is_read_and_its_tower_written_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    """In bfloat16 too, whatever the files hold."""
    made = ensure_group("cpu")
    try:
        vision_model("vision_moe").save_pretrained(tmp_path / "source")
        files = load_file(tmp_path / "source/model.safetensors")
        built = engine("vision_moe", {}, model=str(tmp_path / "source"), dtype=dtype, lr=0.1, eps=1e-8)
        built.train_batch(batches()[1], OBJECTIVE)
        built.save_hf(tmp_path / "written")
        written = load_file(tmp_path / "written/model.safetensors")
        assert written.keys() == files.keys()
        changed = {name for name, value in files.items() if not torch.equal(written[name], value)}
        assert not any(name.startswith(TOWER) for name in changed)
        assert len(changed) > 20
        release()
    finally:
        if made:
            dist.destroy_process_group()
