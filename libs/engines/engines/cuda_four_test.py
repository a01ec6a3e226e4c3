"""On four CUDA devices over NCCL: each way to train gives the curve of one device."""

import pytest

from engines.testing.cuda_ranks import alone, needs_devices, test_same_curve, together  # noqa: F401  its tests

WORLD = 4
pytestmark = [pytest.mark.gpu4, needs_devices(WORLD)]
