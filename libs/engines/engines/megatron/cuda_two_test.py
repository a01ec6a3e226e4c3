"""On two CUDA devices over NCCL: Megatron's layouts give the curve of FSDP2 on one device."""

import pytest
import torch
import torch.distributed as dist

from engines.launch import ensure_group, launch
from engines.testing.megatron_curves import LAYOUTS, MODELS, curve, layout_curves
from objectives import GRPO

WORLD = 2
pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif(
        torch.cuda.device_count() < WORLD, reason=f"needs {WORLD} CUDA devices, found {torch.cuda.device_count()}"
    ),
]
OBJECTIVE = GRPO(kl_coef=0.1, entropy_coef=0.01)
# (loss, gradient norm), relative: see cuda_test.
BOUNDS = {"float32": (1e-5, 1e-3), "bfloat16": (5e-3, 0.03)}


@pytest.fixture(scope="module")
def alone():
    made = ensure_group("cuda")
    yield {(model, dtype): curve("cuda", dtype, "fsdp2", model, OBJECTIVE) for model in MODELS for dtype in BOUNDS}
    if made:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def together():
    return launch(layout_curves, ("cuda", list(BOUNDS), OBJECTIVE), world_size=WORLD, device="cuda")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_same_curve_as_fsdp2_on_one_device(together, alone, dtype, layout):
    loss, norm = BOUNDS[dtype]
    want, got = alone[LAYOUTS[layout][0], dtype], together[layout, dtype]
    print(want, got)
    for one, two in zip(want, got, strict=True):
        assert one[2] == two[2] == 0.0
        assert two[0] == pytest.approx(one[0], rel=loss, abs=loss)
        assert two[1] == pytest.approx(one[1], rel=norm)
