"""On four CUDA devices over NCCL: each way to train gives the curve of one device."""

import pytest
import torch
import torch.distributed as dist

from engines.launch import ensure_group, launch
from engines.testing.cuda_curves import BOUNDS, KINDS, MODES, ROUTED, curves

WORLD = 4
pytestmark = [
    pytest.mark.gpu4,
    pytest.mark.skipif(
        torch.cuda.device_count() < WORLD, reason=f"needs {WORLD} CUDA devices, found {torch.cuda.device_count()}"
    ),
]


@pytest.fixture(scope="module")
def alone():
    made = ensure_group("cuda")
    yield curves()
    if made:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def together():
    return launch(curves, (), world_size=WORLD, device="cuda")


@pytest.mark.parametrize("what", ["grpo", "lonely", *KINDS])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_same_curve(together, alone, dtype, mode, what):
    loss, norm = (ROUTED if "experts" in what else BOUNDS)[dtype]
    left, right = alone[dtype, "off", what], together[dtype, mode, what]
    print(left, right)
    for one, many in zip(left, right, strict=True):
        assert one[2] == many[2] == 0.0
        assert many[0] == pytest.approx(one[0], rel=loss, abs=loss)
        assert many[1] == pytest.approx(one[1], rel=norm)
