"""Steps of tiny models whose ranks share the experts: for the tests that hold them to one process."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from engines.build import build_engine
from engines.config import EngineConfig
from engines.families.registry import family_of
from engines.fsdp2 import fsdp2_executor as fsdp2
from engines.fsdp2.fsdp2_executor import FSDP2Executor
from engines.inputs.model_inputs import PackedInputs
from engines.loading import cast_parameters
from engines.parallel.groups import ParallelGroups
from engines.parallel.layout import ParallelLayout
from engines.parallel.planning import DataParallelPlanner
from engines.private_api import set_experts
from engines.proofs.family_cases import CASES as FAMILY_CASES
from engines.proofs.float64 import KeepFloat64
from engines.proofs.plain_executor import PlainExecutor
from engines.step import Engine
from engines.testing.metrics import shared_metrics
from engines.tiny import tiny_batch, tiny_model
from engines.weights.model_weights import ModelWeights
from objectives import SFT
from seqpack.batches.batch import jagged
from seqpack.batches.schema import ROUTED_EXPERTS

LENGTHS = (7, 3, 12, 5, 9, 2, 14, 6)
EXPERTS, TOP_K, LAYERS, STEPS = 4, 2, 2, 2


@dataclass(frozen=True)
class Case:
    """One way to train; `replay`: the experts of tokens are set, `all` to any, `two` to the first two."""

    model: str = "moe"
    replay: str = ""
    coefficient: float = 0.5
    options: tuple[tuple[str, Any], ...] = ()


CASES = {
    "Qwen3.5 MoE": Case(),
    "Qwen3-Next": Case("next"),
    "Qwen3 MoE": Case("qwen3_moe"),
    "one micro-batch": Case(options=(("max_tokens_per_rank", 1000),)),
    "no router's loss": Case(coefficient=0.0),
    "replay": Case(replay="all"),
    "replay, a rank without tokens": Case(replay="two"),
    "recomputed": Case(replay="all", options=(("gradient_checkpointing", True),)),
    "gathered weights stay": Case(options=(("reshard_after_forward", False),)),
    "padded": Case(options=(("batching", "padded"), ("max_tokens_per_rank", 31))),
    "shared sequences": Case(options=(("context_parallel", "static:2"),)),
    "shared as needed": Case(options=(("context_parallel", "dynamic"),)),
}


class Found(NamedTuple):
    """Results of a run: metrics of each step, gradients of the first, exported weights, scores of the first batch."""

    curve: list[dict[str, float]]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    scores: Tensor


def model_of(case: Case) -> Any:
    """Return the model of a case, always the same."""
    if case.model == "qwen3_moe":
        return next(one for one in FAMILY_CASES if one.model_type == "qwen3_moe").model()
    return tiny_model(case.model, scale=4.0, num_hidden_layers=LAYERS)


def config_of(case: Case, ranks: int, alone: bool) -> EngineConfig:
    """Return the engine's settings; `ranks` share the experts. A process alone shares no sequences."""
    options: dict[str, Any] = {"device": "cpu", "lr": 1e-2, "eps": 1e-2, "weight_decay": 0.1, "grad_clip": 1.0}
    options |= {"max_tokens_per_rank": 16, "routing_replay": bool(case.replay), **dict(case.options)}
    options |= {"context_parallel": "off"} if alone else {}
    return EngineConfig(**options, expert_parallel=ranks, router_aux_loss_coef=case.coefficient)


def batch_of(case: Case, seed: int, layers: int = LAYERS) -> TensorDict:
    """Return the batch of step number `seed`."""
    batch = tiny_batch(list(LENGTHS), seed=seed)
    if not case.replay:
        return batch
    rng, rows = torch.Generator().manual_seed(seed), []
    for length in LENGTHS:
        chance = torch.rand(length, layers, EXPERTS, generator=rng)
        chance[..., 2:] -= float(case.replay == "two")
        rows.append(chance.topk(TOP_K).indices.to(torch.int16))
        if case.replay == "all":
            rows[-1][torch.rand(length, generator=rng) < 0.3] = -1  # the router's own
    batch[ROUTED_EXPERTS] = jagged(rows, 0)
    return batch


def build(case: Case, ranks: int = 1) -> Any:
    """Build the case's engine over all ranks."""
    return build_engine(config_of(case, ranks, dist.get_world_size() == 1), model_of(case))


def weights(built: Any) -> dict[str, Tensor]:
    """Return the exported weights of an engine."""
    return {part.name: part.flat.clone() for part in built.export_weights(max_bytes=2**40)}


def gradients(built: Any) -> dict[str, Tensor]:
    """Return the gradients of its parameters, whole."""
    every = built.executor.model.named_parameters()
    return {name: _whole(p.grad).clone() for name, p in every if p.grad is not None}


def run(case: Case, ranks: int = 1) -> Found:
    """Run the scores and the first steps of a case."""
    built = build(case, ranks)
    scores = built.forward(batch_of(case, 0))["log_probs"].values()
    seen: dict[str, Tensor] = {}
    step: Callable[..., Any] = built.executor.optimizer_step

    def looked(*args: Any) -> Any:
        seen.update(seen or gradients(built))
        return step(*args)

    built.executor.optimizer_step = looked
    curve = [built.train_batch(batch_of(case, seed), SFT()) for seed in range(STEPS)]
    return Found(curve, seen, weights(built), scores)


def run_all(names: Sequence[str], ranks: int) -> dict[str, Found]:
    """Run several cases."""
    return {name: run(CASES[name], ranks) for name in names}


def assert_same_steps(one: Found, many: Found, name: str) -> None:
    """Compare losses and norms to 1e-6; scores, every gradient and the weights after all steps to 1e-5.

    Raises:
        AssertionError: it says what differs.
    """
    for left, right in zip(one.curve, many.curve, strict=True):
        for key, value in shared_metrics(left).items():
            if key not in ("micro_batches", "fill", "plan_hash"):
                assert math.isclose(right[key], value, rel_tol=1e-6, abs_tol=1e-9), (name, key, value, right[key])
    torch.testing.assert_close(many.scores, one.scores, atol=1e-5, rtol=0)
    for part in ("gradients", "weights"):
        mine, other = getattr(one, part), getattr(many, part)
        assert mine.keys() == other.keys(), (name, part)
        for key, value in mine.items():
            torch.testing.assert_close(other[key], value, atol=1e-5, rtol=1e-5, msg=f"{name}, {part} of {key}")


def exact(kind: str, ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and weights in float64; `ranks` 0: stock transformers, a row at a time, on one process."""
    config = config_of(Case(kind, options=(("grad_clip", None),)), max(ranks, 1), alone=True)
    config = replace(config, router_aux_loss_coef=0.0)  # the plain executor has no router's loss
    module = cast_parameters(model_of(Case(kind)), torch.float64)
    set_experts(module.config, "eager")  # transformers' default has no float64
    model_weights = ModelWeights.of(family_of(module.config), module)
    groups = ParallelGroups.make(ParallelLayout.of_world(dist.get_world_size(), ep=max(ranks, 1)))
    with KeepFloat64(), float64_shards():
        executor: Any = (
            FSDP2Executor(config, groups, module, PackedInputs()) if ranks else PlainExecutor(config, groups, module)
        )
        planner = DataParallelPlanner(config.max_tokens_per_rank, groups.layout.plan_size)
        engine = Engine(config, executor, planner, model_weights)
        curve = [engine.train_batch(batch_of(Case(), seed), SFT())["loss"] for seed in range(STEPS)]
        return curve, weights(engine)


def save(folder: Path, name: str, ranks: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Train, save under `name`, and return the weights that were saved, and the metrics of the step after."""
    built = build(CASES["Qwen3.5 MoE"], ranks)
    for seed in range(STEPS):
        built.train_batch(batch_of(Case(), seed), SFT())
    built.offload()
    built.onload()
    built.save(folder / name)
    return weights(built), built.train_batch(batch_of(Case(), STEPS), SFT())


def load(folder: Path, name: str, ranks: int) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Load what `save` wrote, and return its results from a new engine."""
    built = build(CASES["Qwen3.5 MoE"], ranks)
    built.load(folder / name)
    return weights(built), built.train_batch(batch_of(Case(), STEPS), SFT())


def from_disk(directory: Path, ranks: int) -> dict[str, Tensor]:
    """Return the exported weights of an engine that read a directory, each rank its own part."""
    return weights(build_engine(EngineConfig(model=str(directory), device="cpu", expert_parallel=ranks)))


class float64_shards(nullcontext[None]):  # noqa: N801  used as a function
    """A context in which FSDP2 casts neither weights nor gradients."""

    def __enter__(self) -> None:
        self.policy = MixedPrecisionPolicy
        vars(fsdp2)["MixedPrecisionPolicy"] = lambda **_: self.policy(cast_forward_inputs=False)

    def __exit__(self, *_: object) -> None:
        vars(fsdp2)["MixedPrecisionPolicy"] = self.policy


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
