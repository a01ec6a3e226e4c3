"""Eight gloo ranks, three kinds of parallelism at a time: the steps, scores, weights and files of one FSDP2 process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engines.launch import ensure_group
from engines.megatron.runtime.process_groups import release
from engines.proofs.forked_ranks import launch_forked
from engines.proofs.megatron_layouts import LayoutCase, Measured, largest_difference, measure
from objectives import GRPO

RANKS = 8
OBJECTIVE = GRPO(kl_coef=0.1, entropy_coef=0.01, off_policy="mask")
CASES = (
    LayoutCase("Qwen3.5 MoE", {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2}),
    LayoutCase("Qwen3.5", {"tensor_parallel": 2, "pipeline_parallel": 2, "context_parallel": "static:2"}),
    LayoutCase("Qwen3.5 MoE", {
        "tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 4, "context_parallel": "dynamic",
        "distributed_optimizer": True,
    }),
)  # fmt: skip
NAMES = ["TP2 PP2 EP2 DP2", "TP2 PP2 CP2", "TP2 PP2 EP4 dynamic CP"]


Found = tuple[dict[str, Measured], list[list[Measured]]]


def eight_ranks(folder: Path) -> list[list[Measured]]:
    results = []
    for number, case in enumerate(CASES):
        own = folder / f"megatron {number}"
        results.append(measure(case, OBJECTIVE, own, [folder / f"fsdp2 {case.model}", own]))
        release()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, results)
    return everyone


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """FSDP2 in this process, by model, and the ranks' own."""
    folder = tmp_path_factory.mktemp("eight")
    made = ensure_group("cpu")
    models = dict.fromkeys(case.model for case in CASES)
    alone = {
        model: measure(LayoutCase(model), OBJECTIVE, folder / f"fsdp2 {model}", backend="fsdp2") for model in models
    }
    if made:
        dist.destroy_process_group()
    return alone, launch_forked(eight_ranks, (folder,), world_size=RANKS)


def assert_same_step(want: dict[str, float], got: dict[str, float]) -> None:
    """A row of `forward_backward` has no norm, which `optimizer_step` computes."""
    for key in ("loss", *({"grad_norm", "auxiliary_loss"} & want.keys())):
        assert got[key] == pytest.approx(want[key], rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize("number", range(len(CASES)), ids=NAMES)
def test_eight_ranks_give_the_steps_of_one_process(measured: Found, number: int) -> None:
    want, everyone = measured[0][CASES[number].model], measured[1]
    assert len(everyone) == RANKS
    for ranks in everyone:
        for left, right in zip(want.curve, ranks[number].curve, strict=True):
            assert_same_step(left, right)
        for score, own in zip(want.scores, ranks[number].scores, strict=True):
            torch.testing.assert_close(own, score, atol=1e-5, rtol=1e-5)
        assert largest_difference(want.trained, ranks[number].trained) < 1e-5
        assert largest_difference(want.exported, ranks[number].exported) == 0


@pytest.mark.parametrize("number", range(len(CASES)), ids=NAMES)
def test_a_checkpoint_of_eight_ranks_or_of_one_continues(measured: Found, number: int) -> None:
    want = measured[0][CASES[number].model].resumed["itself"]
    for ranks in measured[1]:
        assert len(ranks[number].resumed) == 3
        for step in ranks[number].resumed.values():
            assert_same_step(want, step)
        assert ranks[number].same_bits
