"""The head for multi-token prediction on two processes: the losses, gradients and weights of one."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from engines import EngineConfig, build_engine
from engines.mtp.head import add_head
from engines.proofs.forked_ranks import launch_forked
from engines.testing.expert_parallel import weights
from engines.testing.one_rank import one_rank  # noqa: F401
from engines.tiny import tiny_batch, tiny_model
from objectives import GRPO

LENGTHS = [29, 3, 12, 5, 17, 2, 1, 6, 4]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sharded": ("dense", {}),
    "replicated": ("dense", {"weights": "replicated"}),
    "recomputed": ("dense", {"gradient_checkpointing": True}),
    "shared sequences": ("dense", {"context_parallel": "static:2"}),
    "shared as needed": ("dense", {"context_parallel": "dynamic"}),
    "experts": ("moe", {"router_aux_loss_coef": 0.5}),
    "shared experts": ("moe", {"expert_parallel": 2}),
    "replayed experts": ("moe", {"routing_replay": True}),
    "copies of shards": ("dense", {"shard_ranks": 1}),
    "moments on the host": ("dense", {"optimizer_on_host": True}),
    "all on the host": ("dense", {"optimizer_on_host": True, "parameters_on_host": True}),
    "recomputed from the host": ("dense", {"gradient_checkpointing": True, "activation_offload": True}),
    "gathered weights stay": ("dense", {"reshard_after_forward": False}),
    "forward passes ahead": ("moe", {"router_aux_loss_coef": 0.5, "router_forwards_ahead": 1}),
}


def curve(name: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    kind, options = CASES[name]
    if dist.get_world_size() == 1:
        options = {key: value for key, value in options.items() if key not in ("context_parallel", "expert_parallel")}
    made: Any = tiny_model(kind, scale=2.0, num_hidden_layers=2, mtp_num_hidden_layers=1)
    add_head(made)
    config = {"device": "cpu", "lr": 1e-2, "eps": 1e-2, "max_tokens_per_rank": 32, "mtp_loss_scaling_factor": 0.5}
    built = build_engine(EngineConfig(**{**config, **options}), made)
    return [built.train_batch(batch_of(name, step), GRPO()) for step in range(2)], weights(built)


def batch_of(name: str, step: int) -> Any:
    batch = tiny_batch(LENGTHS, seed=step)
    if name == "replayed experts":
        draw = torch.Generator().manual_seed(step)
        rows = [torch.rand(length, 2, 4, generator=draw).topk(2).indices.short() for length in LENGTHS]
        batch["routed_experts"] = torch.nested.nested_tensor(rows, layout=torch.jagged)
    return batch


def every() -> dict[str, Any]:
    return {name: curve(name) for name in CASES}


@pytest.fixture(scope="module")
def two() -> dict[str, Any]:
    found: dict[str, Any] = launch_forked(every, (), world_size=2)
    return found


@pytest.mark.parametrize("name", list(CASES))
def test_two_processes_give_the_steps_of_one(name: str, two: dict[str, Any]) -> None:
    steps, tensors = curve(name)
    other_steps, other_tensors = two[name]
    for one, other in zip(steps, other_steps, strict=True):
        for key in ("loss", "mtp_loss", "mtp_accuracy", "grad_norm", "trained_tokens"):
            assert other[key] == pytest.approx(one[key], rel=5e-5, abs=2e-6), key
    assert tensors.keys() == other_tensors.keys()
    for key, tensor in tensors.items():
        torch.testing.assert_close(other_tensors[key], tensor, rtol=1e-3, atol=2e-5)
