"""Two ranks by megatron-core's own optimizer: the layouts that core_optimizer_test leaves out."""

from pathlib import Path

from engines.megatron.optimizers.core_optimizer_test import (
    BFLOAT16,
    BY_GROUPS,
    RANKS,
    SHARED,
    Ranks,
    assert_same_losses,
    assert_same_steps,
    two_ranks,
)
from engines.proofs.forked_ranks import launch_forked

OTHERS: Ranks = {
    "DP2, shared, bfloat16": ("Qwen3.5", BFLOAT16 | SHARED),
    "TP2, experts, shared": ("Qwen3.5 MoE", {"tensor_parallel": 2, **SHARED}),
    "adapters, PP2, shared": ("Qwen3.5, LoRA of q", {"pipeline_parallel": 2, **SHARED}),
    "a stage without adapters": ("Qwen3.5, LoRA of q", {"pipeline_parallel": 2, "first_stage_layers": 1}),
}


def test_two_ranks_have_the_bits_of_torchs_and_resume_across(tmp_path: Path) -> None:
    for name, found in launch_forked(two_ranks, (tmp_path, OTHERS), world_size=2).items():
        assert_same_steps(found, "without" in name)


def test_two_ranks_by_an_adam_that_counts_steps_in_its_groups() -> None:
    assert_same_losses({name: layout for name, layout in (RANKS | OTHERS).items() if name not in BY_GROUPS})
