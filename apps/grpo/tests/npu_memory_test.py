"""The plan's memory beside what a run takes, counted to the byte by the stand-in for an NPU (docs/ascend.md).

By hand, some minutes: `./bazelw test //apps/grpo:tests/npu_memory_test`.
"""

import pytest

from engines.fake_npu.build import reason_against
from engines.fake_npu.path import fake_npu_on_path
from engines.megatron.runtime.process_groups import release
from engines.proofs.forked_ranks import launch_forked
from runplan.testing.plan_vs_memory import BOUND, Compared, MemoryCase, measure

pytestmark = pytest.mark.skipif(reason_against() is not None, reason=str(reason_against()))
SMALL = (133, 9, 64, 240, 37, 91)
DEEP = {"vocab_size": 1024, "num_hidden_layers": 6}
EXPERTS = {**DEEP, "num_experts": 12, "moe_intermediate_size": 192}
SHARED = {"backend": "megatron", "tensor_parallel": 2, "distributed_optimizer": True}
MEASURED = {
    1: [
        MemoryCase("attention", DEEP, lengths=SMALL),
        MemoryCase("attention", {"vocab_size": 8192, "num_hidden_layers": 2}, lengths=SMALL),
        MemoryCase("moe", EXPERTS, lengths=SMALL[:3]),
        MemoryCase("attention", {**DEEP, "intermediate_size": 1024}, {"backend": "megatron"}, lengths=SMALL),
        MemoryCase("moe", EXPERTS, {"backend": "megatron"}, lengths=SMALL[:3]),
    ],
    2: [
        MemoryCase("attention", {**DEEP, "intermediate_size": 1024}, ranks=2, lengths=SMALL),
        MemoryCase("moe", EXPERTS, ranks=2, lengths=SMALL[:4]),
        MemoryCase("attention", DEEP, {"backend": "megatron", "tensor_parallel": 2}, ranks=2, lengths=SMALL),
        MemoryCase("moe", EXPERTS, SHARED, ranks=2, lengths=SMALL[:3]),
    ],
}


def measured(cases: list[MemoryCase]) -> list[Compared]:
    found = []
    for case in cases:
        found.append(measure(case, "npu"))
        if case.settings.get("backend") == "megatron":
            release()
    return found


@pytest.mark.parametrize("ranks", MEASURED)
def test_planned_memory_is_within_a_tenth_of_what_is_counted(ranks: int) -> None:
    """Layers as they are, not compiled; recomputed, so that what a kernel keeps inside weighs little."""
    with fake_npu_on_path():
        counted = launch_forked(measured, (MEASURED[ranks],), ranks, device="npu")
    print(*counted, sep="\n")
    assert [one.case for one in counted if abs(one.error) > BOUND] == []
    assert [one.case for one in counted if one.planned.states != pytest.approx(one.states, rel=0.01)] == []
