"""A pipeline schedule fits the step without bending: two stages of two data-parallel ranks give one process' steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engines import EngineConfig, TrainEngine, build_engine
from engines.families.registry import family_of
from engines.launch import ensure_group
from engines.parallel.groups import ParallelGroups
from engines.parallel.layout import ParallelLayout
from engines.parallel.planning import DataParallelPlanner
from engines.proofs.forked_ranks import launch_forked
from engines.step import Engine
from engines.testing.metrics import shared_metrics
from engines.testing.pipeline_executor import PipelineExecutor
from engines.tiny import tiny_batch, tiny_model
from engines.weights.model_weights import ModelWeights
from objectives import GRPO, SFT

LENGTHS = [7, 3, 12, 5, 9, 2, 14, 6, 4]
CONFIG = EngineConfig(device="cpu", lr=1e-2, eps=1e-3, max_tokens_per_rank=20, weight_decay=0.1, grad_clip=0.5)
OBJECTIVE = GRPO(kl_coef=0.1, entropy_coef=0.01, off_policy="mask")


def model(seed: int = 0) -> Any:
    return tiny_model("dense", seed=seed, scale=2.0, tie_word_embeddings=False)


def piped(seed: int = 0) -> Engine:
    groups = ParallelGroups.make(ParallelLayout(dp=2, pp=2))
    module = model(seed)
    shapes = ModelWeights.of(family_of(module.config), module)
    executor = PipelineExecutor(CONFIG, groups, module)
    planner = DataParallelPlanner(CONFIG.max_tokens_per_rank, groups.layout.plan_size)
    return Engine(CONFIG, executor, planner, shapes)


def weights(built: TrainEngine) -> dict[str, torch.Tensor]:
    return {part.name: part.flat.clone() for part in built.export_weights(max_bytes=2**40)}


def cases(built: TrainEngine, folder: Path, name: str) -> dict[str, Any]:
    out: dict[str, Any] = {"curve": [built.train_batch(tiny_batch(LENGTHS, seed=step), OBJECTIVE) for step in range(2)]}
    out["lonely"] = [built.train_batch(tiny_batch([9]), SFT())]
    scored = built.forward(tiny_batch(LENGTHS), entropy=True)
    out["scores"] = [scored[key].values().clone() for key in ("log_probs", "entropy")]
    out["weights"] = weights(built)
    built.save(folder / name)
    out["resumed"] = [built.train_batch(tiny_batch(LENGTHS, seed=3), SFT())]
    return out


def four_ranks(folder: Path) -> list[Any]:
    out = cases(piped(), folder, "piped")
    other = piped(seed=5)
    other.load(folder / "piped")
    out["again"] = [other.train_batch(tiny_batch(LENGTHS, seed=3), SFT())]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, out)
    return everyone


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    folder = tmp_path_factory.mktemp("pipeline")
    everyone = launch_forked(four_ranks, (folder,), world_size=4)
    made = ensure_group("cpu")
    yield cases(build_engine(CONFIG, model()), folder, "alone"), everyone
    if made:
        dist.destroy_process_group()


@pytest.mark.parametrize("what", ["curve", "lonely", "resumed", "again"])
def test_same_steps_on_every_rank_of_every_stage(
    results: tuple[dict[str, Any], list[dict[str, Any]]], what: str
) -> None:
    alone, everyone = results
    for result in everyone:
        for one, other in zip(alone["resumed" if what == "again" else what], result[what], strict=True):
            left, right = shared_metrics(one), shared_metrics(other)  # this executor has no plain path to be held to
            assert left.keys() == right.keys()
            for key in left:
                if key not in ("plan_hash", "micro_batches", "fill"):
                    assert right[key] == pytest.approx(left[key], rel=5e-5, abs=1e-6), key


def test_same_weights_and_scores(results: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
    alone, everyone = results
    for result in everyone:
        for name, value in alone["weights"].items():
            torch.testing.assert_close(result["weights"][name], value, atol=1e-5, rtol=1e-5, msg=name)
        for left, right in zip(alone["scores"], result["scores"], strict=True):
            torch.testing.assert_close(right, left, atol=2e-5, rtol=2e-5)
