"""Tests of several CUDA devices: a file says how many (`WORLD`), and imports these fixtures and this test."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from engines.launch import ensure_group, launch
from engines.testing.cuda_curves import BOUNDS, KINDS, MODES, ROUTED, Curve, curves

Curves = dict[tuple[str, str, str], Curve]


def needs_devices(world: int) -> pytest.MarkDecorator:
    """Skip where there are fewer devices."""
    count = torch.cuda.device_count()
    return pytest.mark.skipif(count < world, reason=f"needs {world} CUDA devices, found {count}")


@pytest.fixture(scope="module")
def alone() -> Iterator[Curves]:
    """Yield the curves of one device."""
    made = ensure_group("cuda")
    yield curves()
    if made:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def together(request: pytest.FixtureRequest) -> Curves:
    """Return the curves of the file's `WORLD` devices."""
    results: Curves = launch(curves, (), world_size=request.module.WORLD, device="cuda")
    return results


@pytest.mark.parametrize("what", ["grpo", "lonely", *KINDS])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_same_curve(together: Curves, alone: Curves, dtype: str, mode: str, what: str) -> None:
    """Check loss and gradient norm of each step."""
    loss, norm = (ROUTED if "experts" in what else BOUNDS)[dtype]
    left, right = alone[dtype, "off", what], together[dtype, mode, what]
    print(left, right)
    for one, many in zip(left, right, strict=True):
        assert one[2] == many[2] == 0.0
        assert many[0] == pytest.approx(one[0], rel=loss, abs=loss)
        assert many[1] == pytest.approx(one[1], rel=norm)
