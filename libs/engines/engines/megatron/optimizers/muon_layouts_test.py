"""Muon on Megatron's parameters: any layout gives the weights of stock transformers with `torch.optim.Muon`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from engines import EngineConfig, build_engine
from engines.families.registry import family_of
from engines.inputs.planner_and_inputs import planner_and_inputs
from engines.loading import cast_parameters
from engines.megatron.megatron_executor import MegatronExecutor
from engines.megatron.runtime.process_groups import release
from engines.parallel.configured_layout import layout_of
from engines.parallel.groups import ParallelGroups
from engines.private_api import set_experts
from engines.proofs.forked_ranks import launch_forked
from engines.proofs.megatron_exact import TP_PP
from engines.proofs.megatron_layouts import LENGTHS, OPTIONS, LayoutCase, exported_by, largest_difference, model_of
from engines.step import Engine
from engines.testing.stock_muon import float64_muon, stock_muon_steps
from engines.tiny import tiny_batch
from engines.weights.model_weights import ModelWeights
from objectives import SFT

CONFIG = EngineConfig(**{**OPTIONS, "grad_clip": None, "optimizer": "muon"})
STEPS = 3
CASES = (
    LayoutCase("Qwen3", TP_PP),
    LayoutCase("Qwen3.5", {"tensor_parallel": 2}),
    LayoutCase("Qwen3.5", {"tensor_parallel": 2, "distributed_optimizer": True}),
    LayoutCase("Qwen3.5", {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "optimizer_on_host": True}),
    LayoutCase("Qwen3.5 MoE", {"expert_parallel": 2, "distributed_optimizer": True}),
    LayoutCase("Qwen3.5 MoE", {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 2}),
    LayoutCase("Qwen3 MoE, raw top k, tied", {**TP_PP, "expert_parallel": 2}),
)
"""Queries, keys and values joined by heads; gates over ups; columns; experts; any range of elements."""
Weights = dict[str, torch.Tensor]


def batches(first: int = 0, steps: int = STEPS) -> list[TensorDict]:
    return [tiny_batch(list(LENGTHS), seed=seed) for seed in range(first, first + steps)]


def exact(case: LayoutCase) -> Weights:
    config = replace(CONFIG, backend="megatron", **case.sizes)
    module: Any = cast_parameters(model_of(case.model), torch.float64)
    set_experts(module.config, "eager")  # transformers' default has no float64
    weights = ModelWeights.of(family_of(module.config), module)
    groups = ParallelGroups.make(layout_of(config, dist.get_world_size()))
    with float64_muon():
        planner, inputs = planner_and_inputs(config, module.config, groups)
        engine = Engine(config, MegatronExecutor(config, groups, module, inputs), planner, weights)
        for batch in batches():
            engine.train_batch(batch, SFT())
        after = exported_by(engine)
    release()
    return after


def trained(case: LayoutCase, folder: Path, **options: Any) -> tuple[Weights, Weights]:
    """Weights that are saved under a folder's name, and after one step more."""
    engine = build_engine(replace(CONFIG, **options), model_of(case.model))
    for batch in batches():
        engine.train_batch(batch, SFT())
    engine.save(folder)
    return exported_by(engine), stepped(engine)


def stepped(engine: Any) -> Weights:
    with float64_muon():
        engine.train_batch(batches(STEPS, 1)[0], SFT())
    return exported_by(engine)


def resumed(case: LayoutCase, folder: Path, **options: Any) -> tuple[Weights, Weights]:
    engine = build_engine(replace(CONFIG, **options), model_of(case.model, seed=1))
    engine.load(folder)
    return exported_by(engine), stepped(engine)


MOE = CASES[5]


def alone(folder: Path) -> tuple[dict[str, Weights], Any]:
    want = {name: stock_muon_steps(CONFIG, model_of(name), batches(), SFT())[1] for name in {c.model for c in CASES}}
    return want, trained(MOE, folder / "fsdp2")


def on_four(folder: Path) -> tuple[dict[str, Weights], Any, Any]:
    exact_ones = {str(case): exact(case) for case in CASES}
    sizes: dict[str, Any] = {"backend": "megatron", **MOE.sizes}
    saved = trained(MOE, folder / "megatron", **sizes)
    release()
    loaded = resumed(MOE, folder / "fsdp2", **sizes)
    release()
    return exact_ones, saved, loaded


def back(folder: Path) -> Any:
    return resumed(MOE, folder / "megatron")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("muon")
    want, saved = launch_forked(alone, (folder,))
    got, own, loaded = launch_forked(on_four, (folder,), 4)
    return {
        "want": want,
        "got": got,
        "fsdp2": saved,
        "megatron": own,
        "loaded": loaded,
        "back": launch_forked(back, (folder,)),
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_gives_the_steps_of_torchs_muon(found: dict[str, Any], case: LayoutCase) -> None:
    """A step moves a weight by about 2e-3. All of it is in float64, the iterations too."""
    assert largest_difference(found["want"][case.model], found["got"][str(case)]) < 1e-10


def test_a_checkpoint_of_either_backend_goes_on_under_the_other(found: dict[str, Any]) -> None:
    """The step after it is in float32: what decays get has directions of hardly any length, whose rounding the
    iterations enlarge to some percent of a step."""
    for saved, loaded in (("fsdp2", "loaded"), ("megatron", "back")):
        assert largest_difference(found[saved][0], found[loaded][0]) == 0
        decays, others = (
            [{name: w for name, w in found[one][1].items() if ("in_proj_a" in name) == of} for one in (saved, loaded)]
            for of in (True, False)
        )
        assert largest_difference(*decays) < 1e-4
        assert largest_difference(*others) < 1e-6
