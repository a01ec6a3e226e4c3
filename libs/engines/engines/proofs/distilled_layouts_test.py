"""Distillation under TP, PP and CP, in float64, is that of stock transformers on one rank."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engines.launch import ensure_group
from engines.proofs.forked_ranks import launch_forked
from engines.proofs.megatron_exact import exact_steps, stock_steps, teacher_batch
from engines.proofs.megatron_layouts import RANKS, LayoutCase
from objectives import Distillation


@dataclass(frozen=True)
class TopKEntropy:
    """Over trained tokens the negative entropy of the policy's three likeliest tokens and all others together."""

    required_keys: tuple[str, ...] = ()
    needs_entropy: bool = False
    needs_top_k: int = 3

    def zero_gradient_rows(self, batch: Any) -> Tensor:
        """Leave out no rows."""
        return torch.zeros(len(batch), dtype=torch.bool)

    def __call__(self, log_probs: Tensor, entropy: Tensor | None, packed: Any, totals: Any, /) -> tuple[Tensor, Any]:
        """See `seqpack.Objective`."""
        del log_probs, entropy
        events = torch.cat([packed.values["several_log_probs"], packed.values["several_rest"][None]])
        mask = packed.values["loss_mask"]
        events = events.masked_fill(~mask, 0)
        return ((events.exp() * events).sum(0) * mask).sum() / totals.tokens, {}


OBJECTIVES: dict[str, Any] = {
    "forward": Distillation(),
    "reverse": Distillation("reverse"),
    "jsd": Distillation("jsd", 0.3),
    "top-k of the policy": TopKEntropy(),
}
CASES = (
    LayoutCase("Qwen3", {"tensor_parallel": 2}),  # 49 tokens: the ranks' parts of the head differ
    LayoutCase("Qwen3", {"pipeline_parallel": 2}),
    LayoutCase("Qwen3.5", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    LayoutCase("Qwen3.5", {"tensor_parallel": 2, "context_parallel": "static:2"}),
)
HELD = [(case, kind) for case in CASES for kind in OBJECTIVES]


def four_ranks() -> list[Any]:
    return [exact_steps(case, OBJECTIVES[kind]) for case, kind in HELD]


@pytest.fixture(scope="module")
def together() -> Any:
    return launch_forked(four_ranks, (), world_size=RANKS)


@pytest.fixture(scope="module")
def alone() -> Iterator[dict[tuple[str, str], Any]]:
    made = ensure_group("cpu")
    models = {case.model for case in CASES}
    yield {(model, kind): stock_steps(model, OBJECTIVES[kind]) for model in models for kind in OBJECTIVES}
    if made:
        dist.destroy_process_group()


@pytest.mark.parametrize("number", range(len(HELD)), ids=[f"{case}, {kind}" for case, kind in HELD])
def test_loss_gradient_and_steps_are_those_of_one_rank(
    alone: dict[tuple[str, str], Any], together: list[Any], number: int
) -> None:
    case, kind = HELD[number]
    (curve, weights), (steps, moved) = alone[case.model, kind], together[number]
    for want, got in zip(curve, steps, strict=True):
        assert abs(want["loss"]) > 0.1
        for name in {"loss", "distill/divergence", "distill/policy_mass", "distill/teacher_mass"} & want.keys():
            near = 1e-6 if name == "distill/teacher_mass" else 1e-9  # a teacher's are float32
            assert got[name] == pytest.approx(want[name], rel=near), name
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-7)  # the plain one's is float32
    for name, value in weights.items():
        assert moved[name].dtype == torch.float64
        torch.testing.assert_close(moved[name], value, atol=1e-9, rtol=1e-9, msg=name)


def test_the_objectives_train_apart(alone: dict[tuple[str, str], Any]) -> None:
    """What is compared above is of each: the steps of one are not those of another."""
    ends = [alone["Qwen3", kind][1]["model.embed_tokens.weight"] for kind in OBJECTIVES]
    assert min(float((one - other).abs().max()) for one, other in zip(ends, [*ends[1:], ends[0]], strict=True)) > 1e-4
    assert (teacher_batch(0, 49)["teacher_tokens"].values() == -1).any()
