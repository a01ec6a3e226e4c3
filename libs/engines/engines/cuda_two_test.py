"""On two CUDA devices over NCCL: each way to train gives the curve of one device."""

import pytest

from engines.testing.cuda_ranks import alone, needs_devices, test_same_curve, together  # noqa: F401  its tests

WORLD = 2
pytestmark = [pytest.mark.gpu2, needs_devices(WORLD)]
