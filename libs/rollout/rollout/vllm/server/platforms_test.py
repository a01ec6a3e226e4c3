"""What each kind of device is given, without vLLM."""

from typing import Any

import pytest

from rollout.vllm.server.ascend import LAYOUT, LAYOUT_VARIABLE
from rollout.vllm.server.platforms import settle

PLAIN = {"model": "m", "enforce_eager": True}
GRAPHS = {"model": "m", "enforce_eager": False, "gpu_memory_utilization": 0.5}
TOGETHER = {"rank": 1, "size": 2, "port": 4000}
RIGHT = "0.23.0.post1"


def test_a_cpu_takes_them_as_they_are_and_copies_that_share_experts_are_told_so() -> None:
    assert settle("cpu", PLAIN, {}, None, None) == (PLAIN, {})
    arguments, variables = settle("cpu", PLAIN, {}, TOGETHER, None)
    assert arguments == PLAIN
    assert (variables["VLLM_DP_RANK"], variables["VLLM_DP_SIZE"], variables["VLLM_DP_MASTER_PORT"]) == (
        "1",
        "2",
        "4000",
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"gpu_memory_utilization": 0.5}, "memory_share is of an accelerator's memory .* use kv_cache_gib"),
        ({"enforce_eager": False}, "graph_sizes and enforce_eager=false are of CUDA graphs .* leave them out"),
    ],
)
def test_a_cpu_refuses_settings_of_accelerators(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        settle("cpu", PLAIN | changes, {}, None, None)


@pytest.mark.parametrize("ascend", [None, "0.18.0", RIGHT])
def test_cuda_takes_them_as_they_are_whatever_else_is_installed(ascend: str | None) -> None:
    assert settle("cuda", GRAPHS, {LAYOUT_VARIABLE: "1"}, None, ascend) == (GRAPHS, {})


def test_npus_have_plain_matrices_under_the_version_that_was_read() -> None:
    arguments, variables = settle("npu", GRAPHS, {}, None, RIGHT)
    assert arguments == GRAPHS | {"additional_config": {LAYOUT: 0}}
    assert variables == {LAYOUT_VARIABLE: "0"}
    assert "additional_config" not in GRAPHS, "the caller's are left as they were"


@pytest.mark.parametrize(
    ("ascend", "environ", "says"),
    [
        ("0.24.0", {}, "written for vllm-ascend .*, and 0.24.0 is installed"),
        ("0.22.1", {}, "written for vllm-ascend .*, and 0.22.1 is installed"),
        (None, {}, "needs vllm-ascend .*, which is not installed"),
        (RIGHT, {LAYOUT_VARIABLE: "1"}, f"{LAYOUT_VARIABLE}=1: .* set it to 0"),
    ],
)
def test_npus_are_refused_by_any_other_version_or_layout(
    ascend: str | None, environ: dict[str, str], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        settle("npu", GRAPHS, environ, None, ascend)
