"""megatron-core's own optimizer takes torch's steps; checkpoints fit the other. More: core_optimizer_ranks_test."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import megatron.core.optimizer as core
import pytest
import torch
from megatron.core.optimizer import distrib_optimizer, optimizer
from torch import Tensor

from engines import EngineConfig, TrainEngine
from engines.families.registry import family_of
from engines.inputs.model_inputs import PackedInputs
from engines.loading import cast_parameters
from engines.megatron.megatron_executor import MegatronExecutor
from engines.megatron.optimizers.buffer_optimizer import TorchUpdates
from engines.megatron.optimizers.core_optimizer import CoreUpdates, SteppedByGroup
from engines.megatron.runtime.buffer_offload import Moved
from engines.megatron.runtime.process_groups import release
from engines.parallel.groups import ParallelGroups
from engines.parallel.layout import ParallelLayout
from engines.parallel.planning import DataParallelPlanner
from engines.proofs.float64 import KeepFloat64
from engines.proofs.forked_ranks import launch_forked
from engines.proofs.megatron_layouts import (
    LENGTHS,
    OPTIONS,
    LayoutCase,
    engine_of,
    exported_by,
    largest_difference,
    model_of,
)
from engines.step import Engine
from engines.testing.executors import inside, weights
from engines.testing.one_megatron_rank import one_megatron_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch
from engines.weights.model_weights import ModelWeights
from objectives import GRPO, SFT, Objective
from seqpack.batches.batch import jagged

KINDS = ("torch", "core")
SCHEDULE: dict[str, Any] = {"lr_schedule": "linear", "warmup_steps": 2, "total_steps": 5, "on_nonfinite": "skip"}
SHARED = {"distributed_optimizer": True}
BFLOAT16 = {"dtype": "bfloat16"}
CASES: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "float32": ("Qwen3.5", {}, ["FP32Optimizer"]),
    "bfloat16": ("Qwen3.5", BFLOAT16, ["Float16OptimizerWithFloat16Params"]),
    "float32, shared": ("Qwen3.5", SHARED, ["DistributedOptimizer"]),
    "bfloat16, shared": ("Qwen3.5", BFLOAT16 | SHARED, ["DistributedOptimizer"]),
    "experts": ("Qwen3.5 MoE", {}, ["FP32Optimizer"] * 2),
    "experts, shared": ("Qwen3.5 MoE", BFLOAT16 | SHARED, ["DistributedOptimizer"] * 2),
    "adapters": ("Qwen3, LoRA", BFLOAT16, ["Float16OptimizerWithFloat16Params"]),
}
"""Model, fields of `EngineConfig`, and the classes of megatron-core that are to be there."""


Curves = dict[str, list[dict[str, float]]]
Ends = dict[str, dict[str, Tensor]]
Resumed = dict[str, tuple[list[dict[str, float]], dict[str, Tensor]]]
Found = tuple[Curves, Ends, Resumed, int]  # of a layout: what `two_ranks` says


def engine(kind: Any, model: str = "Qwen3.5", seed: int = 0, **options: Any) -> TrainEngine:
    return engine_of(LayoutCase(model), seed=seed, megatron_optimizer=kind, **{**SCHEDULE, **options})


def step(built: TrainEngine, seed: int, objective: Objective | None = None) -> dict[str, float]:
    return built.train_batch(tiny_batch(list(LENGTHS), seed=seed), objective or SFT())


def states(built: TrainEngine) -> dict[Any, Tensor]:
    """Moments and steps by name and box: what a checkpoint holds."""
    tensors = {}
    for name, state in inside(built).updates.state(inside(built).shapes).items():
        tensors[name, "step", ()] = state["step"].clone()
        for moment in ("exp_avg", "exp_avg_sq"):
            tensors |= {(name, moment, box.start): part.clone() for box, part, _ in state[moment].parts}
    return tensors


def same(one: Mapping[Any, Tensor], other: Mapping[Any, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.parametrize("case", CASES)
def test_its_steps_have_the_bits_of_torchs(case: str) -> None:
    """Under a schedule, clipped, with decay: weights, metrics, moments; what megatron-core made is what is meant."""
    model, options, classes = CASES[case]
    torchs, own = (engine(kind, model, **options) for kind in KINDS)
    assert isinstance(inside(torchs).updates, TorchUpdates)
    assert [type(one).__name__ for one in inside(own).updates.core.chained_optimizers] == classes
    before = weights(own)
    assert largest_difference(before, weights(torchs)) == 0
    for seed in range(4):
        want, got = step(torchs, seed), step(own, seed)
        assert got == want
        assert want["grad_norm"] > inside(own).config.grad_clip
    assert len({step(built, 9)["lr"] for built in (torchs, own)}) == 1
    assert same(states(torchs), states(own))
    assert largest_difference(weights(torchs), weights(own)) == 0
    assert largest_difference(before, weights(own)) > 1e-3


def exact(kind: Any) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Steps in float64, which no engine's configuration asks for."""
    config = EngineConfig(backend="megatron", megatron_optimizer=kind, **OPTIONS)
    module = cast_parameters(model_of("Qwen3.5"), torch.float64)
    weights = ModelWeights.of(family_of(module.config), module)
    groups = ParallelGroups.make(ParallelLayout())
    with KeepFloat64():
        executor = MegatronExecutor(config, groups, module, PackedInputs())
        built = Engine(config, executor, DataParallelPlanner(config.max_tokens_per_rank, 1), weights)
        assert isinstance(executor.updates, CoreUpdates) is (kind == "core")
        return [step(built, seed) for seed in range(3)], exported_by(built)


def test_its_steps_in_float64_are_torchs_to_nine_digits() -> None:
    (want, left), (got, right) = (exact(kind) for kind in KINDS)
    for one, other in zip(want, got, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-9)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-9)
    assert {value.dtype for value in right.values()} == {torch.float64}
    assert largest_difference(left, right) < 1e-9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loss_that_is_not_finite_changes_nothing(dtype: str) -> None:
    built = engine("core", dtype=dtype)
    step(built, 0)
    before, moments = weights(built), states(built)
    batch = tiny_batch(list(LENGTHS))
    batch["advantages"] = jagged([row * float("nan") for row in batch["advantages"].unbind()])
    assert built.train_batch(batch, GRPO())["skipped"] == 1.0
    assert largest_difference(before, weights(built)) == 0
    assert same(moments, states(built))
    assert step(built, 1)["skipped"] == 0.0
    assert largest_difference(before, weights(built)) > 1e-3


def test_matrices_alone_decay() -> None:
    constant: dict[str, Any] = {"lr_schedule": "constant", "total_steps": None, "warmup_steps": 0}
    plain, decayed = (engine("core", weight_decay=decay, **constant) for decay in (0.0, 0.5))
    shapes = inside(plain).shapes
    for built in (plain, decayed):
        step(built, 0)
    left, right = weights(plain), weights(decayed)
    for name, value in left.items():
        assert torch.equal(value, right[name]) is (len(shapes[name]) < 2), name


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kinds", [KINDS, KINDS[::-1], ("core", "core")], ids=" to ".join)
def test_a_checkpoint_of_one_resumes_under_the_other(
    tmp_path: Path, kinds: tuple[str, str], options: dict[str, Any]
) -> None:
    """Into an engine of other weights that has stepped already, and shares them out."""
    written = engine(kinds[0], **options)
    for seed in range(2):
        step(written, seed)
    written.save(tmp_path / "saved")
    other = engine(kinds[1], seed=1, distributed_optimizer=True, **options)
    step(other, 7)
    other.load(tmp_path / "saved")
    assert same(states(written), states(other))
    for seed in (2, 3):
        assert step(other, seed) == step(written, seed)
    assert largest_difference(weights(written), weights(other)) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["Qwen3.5", "Qwen3.5 MoE"])
def test_an_earlier_checkpoint_brings_its_number_of_steps(tmp_path: Path, kind: str, model: str) -> None:
    """A tensor of several experts has one in a file: those that it is not read into go back too."""
    built = engine(kind, model)
    step(built, 0)
    built.save(tmp_path / "saved")
    before = states(built)
    after = step(built, 1), weights(built)
    step(built, 2)
    built.load(tmp_path / "saved")
    assert {one.steps for one in inside(built).updates.stepped} == {1.0}
    assert same(before, states(built))
    assert step(built, 1) == after[0]
    assert largest_difference(weights(built), after[1]) == 0


class FusedAdam(torch.optim.Optimizer):
    """A stand-in for those of Transformer Engine and apex: as they do, it counts steps in the group, and makes moments
    for a parameter that has no state at all."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool,
        capturable: bool = False,
    ) -> None:
        assert adam_w_mode
        assert not capturable
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # it takes none
        assert closure is None
        for group in self.param_groups:
            assert group["params"][0].device.type == "cpu"
            group["step"] = group.get("step", 0) + 1
            one, two = (1 - beta ** group["step"] for beta in group["betas"])
            for p in group["params"]:
                if len(self.state[p]) == 0:
                    self.state[p] = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                first, second = self.state[p].values()
                first.lerp_(p.grad, 1 - group["betas"][0])
                second.lerp_(p.grad.square(), 1 - group["betas"][1])
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * (first / one) / ((second / two).sqrt() + group["eps"]))


@contextmanager
def stand_in() -> Iterator[None]:
    """megatron-core where Transformer Engine is installed, as far as its Adam goes."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (core, distrib_optimizer):
            patch.setattr(module, "Adam", FusedAdam)
        patch.setattr(core, "USING_PYTORCH_OPTIMIZER", False)
        yield


@pytest.fixture
def fused() -> Iterator[None]:
    with stand_in():
        yield


@pytest.mark.parametrize(
    ("model", "options"),
    [("Qwen3.5", {}), ("Qwen3.5", {"dtype": "bfloat16"}), ("Qwen3.5 MoE", {"distributed_optimizer": True})],
    ids=["float32", "bfloat16", "experts, shared"],
)
def test_an_adam_that_counts_steps_in_its_groups(
    tmp_path: Path, fused: None, model: str, options: dict[str, Any]
) -> None:
    torchs, own = (engine(kind, model, **options) for kind in KINDS)
    assert "over engines's FusedAdam" in own.state_summary()["optimizer"]
    assert all(isinstance(one, SteppedByGroup) for one in inside(own).updates.stepped)
    for seed in range(2):
        want, got = step(torchs, seed), step(own, seed)
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-4)
    assert largest_difference(weights(torchs), weights(own)) < 1e-4
    assert {float(value) for key, value in states(own).items() if key[1] == "step"} == {2.0}
    own.save(tmp_path / "own")
    torchs.save(tmp_path / "torchs")
    again, under_torch = engine("core", model, seed=1, **options), engine("torch", model, seed=1, **options)
    again.load(tmp_path / "own")
    under_torch.load(tmp_path / "own")
    assert same(states(own), states(again))
    assert same(states(own), states(under_torch))
    for built in (own, again, under_torch):
        step(built, 2)
    assert largest_difference(weights(own), weights(again)) == 0
    assert largest_difference(weights(own), weights(under_torch)) < 1e-4
    again.load(tmp_path / "torchs")
    assert same(states(torchs), states(again))


@pytest.mark.parametrize("case", CASES)
def test_buffers_go_away_and_come_back(case: str) -> None:
    """What megatron-core holds of them are views still: of parameters, masters, shards and moments."""
    model, options, _ = CASES[case]
    built, straight = (engine("core", model, **options) for _ in range(2))
    for one in (built, straight):
        step(one, 0)
    executor, moved = inside(built), Moved()
    buffers = [*executor.chunks[0].buffers, *executor.chunks[0].expert_parallel_buffers]
    offloaded = [p.detach() for p in executor.stages[0].parameters()] + executor.updates.tensors()
    moved.offload(offloaded, [buffer.grad_data for buffer in buffers])
    optimizer_tensors = [p for inner in executor.updates.inner for group in inner.param_groups for p in group["params"]]
    optimizer_tensors += [value for one in executor.updates.stepped for value in one.state.values() if value.ndim]
    assert {tensor.untyped_storage().nbytes() for tensor in optimizer_tensors} == {0}
    assert {p.grad is None for p in optimizer_tensors} == {True}
    moved.back()
    for one in (built, straight):
        step(one, 1)
    assert largest_difference(weights(straight), weights(built)) == 0


def test_what_is_swapped_while_it_is_made_is_put_back() -> None:
    before = Tensor.type, optimizer.torch
    engine("core", dtype="bfloat16")
    assert (Tensor.type, optimizer.torch) == before
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)).type() == "torch.BFloat16Tensor"


def test_a_master_that_megatron_core_does_not_have_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A map of weights and an optimizer that differ would train a part of the model without a word."""
    made = core.get_megatron_optimizer

    def losing(*args: Any, **options: Any) -> Any:
        optimizer = made(*args, **options)
        optimizer.chained_optimizers[0].optimizer.param_groups[0]["params"].pop()
        return optimizer

    monkeypatch.setattr("engines.megatron.optimizers.core_optimizer.get_megatron_optimizer", losing)
    with pytest.raises(RuntimeError, match="megatron-core's optimizer does not update"):
        engine("core")


Ranks = dict[str, tuple[str, dict[str, Any]]]
RANKS: Ranks = {
    "DP2, shared": ("Qwen3.5", SHARED),
    "TP2": ("Qwen3.5", {"tensor_parallel": 2}),
    "PP2, virtual": ("Qwen3.5", {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}),
    "EP2": ("Qwen3.5 MoE", {"expert_parallel": 2}),
    "a stage without adapters, shared": (
        "Qwen3.5, LoRA of q",
        {"pipeline_parallel": 2, "first_stage_layers": 1, **SHARED, **BFLOAT16},
    ),
}
BY_GROUPS = {name: RANKS[name] for name in ("DP2, shared", "EP2", "a stage without adapters, shared")}


def two_ranks(folder: Path, layouts: Ranks) -> dict[str, Found]:
    """Of each layout: metrics and weights of both optimizers, and of each after the other's checkpoint."""
    results = {}
    for name, (model, sizes) in layouts.items():
        curves, ends, resumed = {}, {}, {}
        for kind in KINDS:
            built = engine(kind, model, **sizes)
            curves[kind] = [step(built, seed) for seed in range(2)]
            built.save(folder / f"{name} {kind}")
            curves[kind].append(step(built, 2))
            ends[kind] = exported_by(built)
        parts = len(inside(built).updates.parts)
        for kind, other in zip(KINDS, KINDS[::-1], strict=True):
            built = engine(kind, model, seed=1, **sizes)
            built.load(folder / f"{name} {other}")
            resumed[kind] = [step(built, 2)], exported_by(built)
        results[name] = curves, ends, resumed, parts
        release()
    return results


def two_ranks_by_groups(layouts: Ranks) -> dict[str, list[list[float]]]:
    """Losses of both optimizers where an Adam that counts in its groups is inside, and some ranks' groups are empty."""
    results = {}
    with stand_in():
        for name, (model, sizes) in layouts.items():
            built = [engine(kind, model, **sizes) for kind in KINDS]
            results[name] = [[step(one, seed)["loss"] for seed in range(3)] for one in built]
            release()
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Found]]:
    folder = tmp_path_factory.mktemp("ranks")
    return folder, launch_forked(two_ranks, (folder, RANKS), world_size=2)


def assert_same_steps(found: Found, without: bool) -> None:
    curves, ends, resumed, parts = found
    assert (parts == 0) is without
    assert curves["torch"] == curves["core"]
    assert same(ends["torch"], ends["core"])
    for metrics, end in resumed.values():
        assert metrics == curves["torch"][2:]
        assert same(end, ends["torch"])


def assert_same_losses(layouts: Ranks) -> None:
    for name, (want, got) in launch_forked(two_ranks_by_groups, (layouts,), world_size=2).items():
        assert got == pytest.approx(want, rel=1e-3 if "dtype" in layouts[name][1] else 1e-5), name


@pytest.mark.parametrize("name", RANKS)
def test_two_ranks_have_the_bits_of_torchs_and_resume_across(ranks: tuple[Path, dict[str, Found]], name: str) -> None:
    assert_same_steps(ranks[1][name], "without" in name)


def test_two_ranks_by_an_adam_that_counts_steps_in_its_groups() -> None:
    assert_same_losses(BY_GROUPS)


@pytest.mark.parametrize("name", ["TP2", "DP2, shared", "EP2"])
def test_one_rank_goes_on_from_the_files_of_two(ranks: tuple[Path, dict[str, Found]], name: str) -> None:
    folder, results = ranks
    curves, ends, *_ = results[name]
    for kind, other in zip(KINDS, KINDS[::-1], strict=True):
        built = engine(kind, RANKS[name][0], seed=1)
        built.load(folder / f"{name} {other}")
        assert step(built, 2)["loss"] == pytest.approx(curves["core"][2]["loss"], rel=1e-5)
        assert largest_difference(exported_by(built), ends["core"]) < 1e-5
