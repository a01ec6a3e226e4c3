"""What each kind of device is given, without vLLM."""

from itertools import pairwise
from typing import Any

import pytest

from rollout.vllm.server.ascend import LAYOUT, LAYOUT_VARIABLE
from rollout.vllm.server.platforms import SAMPLER, settle

PLAIN = {"model": "m", "enforce_eager": True}
GRAPHS = {"model": "m", "enforce_eager": False, "gpu_memory_utilization": 0.5}
IN_TURN = {"async_scheduling": False}
TOGETHER = {"rank": 1, "size": 2, "port": 4000}
RIGHT = "0.23.0.post1"


def test_a_cpu_takes_them_as_they_are_and_copies_that_share_experts_are_told_so() -> None:
    in_turn = PLAIN | IN_TURN
    assert settle("cpu", PLAIN, {}, None, None) == (in_turn, {})
    assert settle("cpu", PLAIN | {"async_scheduling": True}, {}, None, None)[0]["async_scheduling"], "as asked"
    arguments, variables = settle("cpu", PLAIN, {}, TOGETHER, None)
    assert arguments == in_turn
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
    assert settle("cuda", GRAPHS, {LAYOUT_VARIABLE: "1"}, None, ascend) == (GRAPHS | IN_TURN, {})
    sleeping = GRAPHS | {"enable_sleep_mode": True}
    assert settle("cuda", sleeping, {}, None, ascend) == (sleeping, {}), "its steps overlap, by vLLM's default"
    asked = GRAPHS | {"async_scheduling": True}
    assert settle("cuda", asked, {}, None, ascend) == (asked, {})


def test_cuda_captures_graphs_up_to_all_requests_unless_told_otherwise() -> None:
    open_ended = {"model": "m", "max_num_seqs": 100}
    arguments, _ = settle("cuda", open_ended, {}, None, None)
    sizes = arguments["compilation_config"]["cudagraph_capture_sizes"]
    assert (sizes[0], sizes[-2:], arguments["enforce_eager"]) == (1, [96, 100], False)
    assert all(2 * b <= 3 * a or b <= 16 for a, b in pairwise(sizes)), "half of a step's rows at most are idle"
    assert settle("cuda", open_ended | {"enforce_eager": True}, {}, None, None)[0]["enforce_eager"]
    assert settle("cpu", open_ended, {}, None, None)[0]["enforce_eager"]
    assert settle("npu", open_ended, {}, None, RIGHT)[0]["enforce_eager"]


def test_cuda_without_flashinfer_takes_tritons_kernels() -> None:
    own = {"additional_config": {"gdn_prefill_backend": "cutedsl"}}
    found, variables = settle("cuda", PLAIN, {}, None, None, flashinfer=False)
    assert found == PLAIN | IN_TURN | {"additional_config": {"gdn_prefill_backend": "triton"}}
    assert variables == {SAMPLER: "0"}
    assert settle("cuda", PLAIN | own, {SAMPLER: "1"}, None, None, flashinfer=False) == (PLAIN | IN_TURN | own, {})


def test_npus_have_plain_matrices_under_the_version_that_was_read() -> None:
    arguments, variables = settle("npu", GRAPHS, {}, None, RIGHT)
    assert arguments == GRAPHS | {"additional_config": {LAYOUT: 0}} | IN_TURN
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
