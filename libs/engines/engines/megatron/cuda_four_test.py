"""On four CUDA devices over NCCL: Megatron's products of layouts give the curve of FSDP2 on one device."""

import pytest

from engines.testing.cuda_ranks import needs_devices
from engines.testing.megatron_ranks import (  # noqa: F401  its tests
    alone,
    pytest_generate_tests,
    test_same_curve_as_fsdp2_on_one_device,
    together,
)

WORLD = 4
pytestmark = [pytest.mark.gpu4, needs_devices(WORLD)]
