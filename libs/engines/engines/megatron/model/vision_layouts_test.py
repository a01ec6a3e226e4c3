"""Images under Megatron: the layouts that vision_test leaves out, held to what it holds the others to."""

import pytest
import torch

from engines.megatron.model.vision_test import (
    Alone,
    Case,
    Together,
    assert_checkpoints_continue,
    assert_same_exports,
    assert_same_steps,
    four_ranks,
    name_of,
    ranks_of,
    run_alone,
)
from engines.parallel.layout import ParallelLayout
from engines.proofs.forked_ranks import launch_forked

CASES: list[Case] = [
    ("vision", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    ("vision", {"tensor_parallel": 2, "context_parallel": "dynamic", "max_tokens_per_rank": 24}),
    ("vision_moe", {"tensor_parallel": 2, "expert_parallel": 2}),
    ("vision_moe", {"tensor_parallel": 2, "expert_parallel": 2, "context_parallel": "static:2"}),
    ("trained tower", {"tensor_parallel": 2, "pipeline_parallel": 2, "gradient_checkpointing": True}),
    ("trained tower, moe", {
        "tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "expert_parallel": 2,
    }),
    ("trained tower, moe", {"tensor_parallel": 2, "expert_parallel": 2, "distributed_optimizer": True}),
    ("lora", {"tensor_parallel": 2, "pipeline_parallel": 2}),
]  # fmt: skip
EXACT = {"vision_moe": ParallelLayout(dp=2, tp=2, ep=2)}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return run_alone(tmp_path_factory.mktemp("vision"), {kind for kind, _ in CASES}, EXACT)


@pytest.fixture(scope="module")
def together(alone: Alone) -> Together:
    results: Together = launch_forked(four_ranks, (alone[1], CASES, EXACT), world_size=4)
    return results


@pytest.mark.parametrize("number", range(len(CASES)), ids=map(name_of, CASES))
def test_every_layout_does_what_one_process_does(alone: Alone, together: Together, number: int) -> None:
    kind = CASES[number][0]
    one = alone[0][kind]
    ranks = ranks_of(together, number)
    assert_same_steps(one, ranks)
    assert_same_exports(one, ranks, "trained" in kind)
    assert_checkpoints_continue(one, ranks)


@pytest.mark.parametrize("kind", EXACT)
def test_float64_steps_equal_those_of_stock_transformers(alone: Alone, together: Together, kind: str) -> None:
    want, got = alone[2][kind], together[1][kind]
    assert got[0] == pytest.approx(want[0], rel=1e-9)
    for name, value in want[1].items():
        torch.testing.assert_close(got[1][name].view_as(value), value, atol=1e-9, rtol=1e-9, msg=name)
