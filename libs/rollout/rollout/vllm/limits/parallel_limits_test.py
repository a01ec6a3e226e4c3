"""What can't be spread over several workers is known from a model's config."""

from typing import Any

import pytest

from rollout.vllm.limits.parallel_limits import nodes_refusal, spread_refusal, stages_refusal

HYBRID = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
MIXTURE = HYBRID | {"num_experts": 6, "moe_intermediate_size": 64}


@pytest.mark.parametrize(
    ("config", "workers", "by_experts", "cpu", "problem"),
    [
        (HYBRID, 4, False, True, None),
        (HYBRID, 3, False, True, "num_attention_heads 8 .*3 workers"),
        (HYBRID, 8, False, True, "linear_num_key_heads 4"),
        (HYBRID | {"linear_num_key_heads": 8, "num_key_value_heads": 3}, 2, False, True, "num_key_value_heads 3"),
        (HYBRID | {"vision_config": {"num_heads": 16}}, 4, False, True, None),
        (HYBRID | {"vision_config": {"num_heads": 6}}, 4, False, True, "num_heads 6 of its tower .*4 workers"),
        (HYBRID, 2, True, True, "has no experts"),
        ({"num_attention_heads": 4, "num_key_value_heads": 1}, 4, False, False, None),
        (MIXTURE, 2, False, True, None),
        (MIXTURE, 4, False, True, "moe_intermediate_size 64 .*4 workers into 32 rows"),
        (MIXTURE, 4, False, False, None),
        (MIXTURE | {"moe_intermediate_size": 65}, 2, False, False, "moe_intermediate_size 65 .*equal parts"),
        (MIXTURE | {"moe_intermediate_size": 65}, 1, False, True, None),
        (MIXTURE | {"moe_intermediate_size": 16}, 2, True, True, None),
        (HYBRID | {"num_local_experts": 6}, 4, True, True, "6 experts can't be shared by 4"),
        (MIXTURE, 4, True, True, "6 experts can't be shared by 4"),
    ],
)
def test_what_cannot_be_shared_is_told_by_name(
    config: dict[str, Any], workers: int, by_experts: bool, cpu: bool, problem: str | None
) -> None:
    found = spread_refusal(config, workers, by_experts, cpu)
    if problem is None:
        assert found is None
    else:
        with pytest.raises(ValueError, match=problem):
            raise ValueError(found)


def test_experts_are_dealt_to_the_workers_of_all_copies() -> None:
    assert spread_refusal(MIXTURE, 1, True, True, copies=2) is None
    found = spread_refusal(MIXTURE, 2, True, True, copies=2)
    assert found == "6 experts can't be shared by 4 workers: use a divisor of it for tensor_parallel x data_parallel"


@pytest.mark.parametrize(
    ("stages", "cpu", "sees", "problem"),
    [
        (1, False, True, None),
        (4, True, False, None),
        (2, False, False, "no accelerator has run them"),
        (2, True, True, "never ran with images"),
        (5, True, False, "4 layers can't fill 5 stages"),
    ],
)
def test_stages_that_cannot_be_are_told_by_name(stages: int, cpu: bool, sees: bool, problem: str | None) -> None:
    found = stages_refusal({"num_hidden_layers": 4}, stages, cpu, sees)
    assert found is None if problem is None else found is not None and problem in found


def test_a_machine_of_several_has_one_worker_on_a_cpu() -> None:
    assert nodes_refusal(4, 1, True) is None
    assert nodes_refusal(2, 2, True) is None
    assert nodes_refusal(4, 2, False) is None
    assert "4 workers over 2 machines: on a CPU vLLM can have one on each" in str(nodes_refusal(4, 2, True))
