"""Planned peak memory against what a GPU's allocator counted; two devices by `plan_vs_memory --ranks 2`."""

import pytest
import torch

from engines.launch import launch
from engines.megatron.runtime.process_groups import release
from runplan.testing.plan_vs_memory import BOUND, CASES, Compared, MemoryCase, measure

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def measured(case: MemoryCase) -> Compared:
    compared = measure(case, "cuda")
    if case.settings.get("backend") == "megatron":
        release()
    return compared


@pytest.mark.parametrize("case", [case for case in CASES if case.ranks == 1], ids=str)
def test_the_plan_is_within_a_tenth(case: MemoryCase) -> None:
    compared = launch(measured, (case,), 1, "cuda")
    print(compared)
    assert abs(compared.error) < BOUND, str(compared)
