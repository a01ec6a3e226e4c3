"""Tests of Megatron on several CUDA devices: a file says how many (`WORLD`), and imports the fixtures and the test."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from engines.launch import ensure_group, launch
from engines.testing.megatron_curves import LAYOUTS, MODELS, PRODUCTS, Curve, curve, layout_curves
from objectives import GRPO

OBJECTIVE = GRPO(kl_coef=0.1, entropy_coef=0.01)
# (loss, gradient norm), relative: see megatron/cuda_test.
BOUNDS = {"float32": (1e-5, 1e-3), "bfloat16": (5e-3, 0.03)}
Curves = dict[tuple[str, str], Curve]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests with every layout of the file's `WORLD` devices, in both dtypes."""
    if "layout" in metafunc.fixturenames:
        metafunc.parametrize("layout", LAYOUTS if metafunc.module.WORLD == 2 else PRODUCTS)
        metafunc.parametrize("dtype", BOUNDS)


@pytest.fixture(scope="module")
def alone() -> Iterator[Curves]:
    """Yield FSDP2's curves on one device, by model and dtype."""
    made = ensure_group("cuda")
    yield {(model, dtype): curve("cuda", dtype, "fsdp2", model, OBJECTIVE) for model in MODELS for dtype in BOUNDS}
    if made:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def together(request: pytest.FixtureRequest) -> Curves:
    """Return the layouts' curves, by name and dtype."""
    arguments = ("cuda", list(BOUNDS), OBJECTIVE)
    results: Curves = launch(layout_curves, arguments, world_size=request.module.WORLD, device="cuda")
    return results


def test_same_curve_as_fsdp2_on_one_device(together: Curves, alone: Curves, dtype: str, layout: str) -> None:
    """Check loss and gradient norm of each step."""
    loss, norm = BOUNDS[dtype]
    want, got = alone[{**LAYOUTS, **PRODUCTS}[layout][0], dtype], together[layout, dtype]
    print(want, got)
    for one, many in zip(want, got, strict=True):
        assert one[2] == many[2] == 0.0
        assert many[0] == pytest.approx(one[0], rel=loss, abs=loss)
        assert many[1] == pytest.approx(one[1], rel=norm)
