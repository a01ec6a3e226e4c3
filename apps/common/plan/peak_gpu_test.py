"""Planned peak memory against what a GPU's allocator counted; two devices by `plan_vs_memory --ranks 2`."""

import pytest
import torch

from apps.common.plan.plan_vs_memory import BOUND, CASES, Compared, MemoryCase, measure
from engines.launch import launch
from engines.megatron.runtime.process_groups import release

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def measured(case: MemoryCase) -> Compared:
    found = measure(case, "cuda")
    if case.settings.get("backend") == "megatron":
        release()
    return found


@pytest.mark.parametrize("case", [case for case in CASES if case.ranks == 1], ids=str)
def test_the_plan_is_within_a_tenth(case: MemoryCase) -> None:
    found = launch(measured, (case,), 1, "cuda")
    print(found)
    assert abs(found.error) < BOUND, str(found)
