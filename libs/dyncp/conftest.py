"""For pytest by hand: the vector instructions that the numeric tests ran with, and property tests without deadlines."""

import torch
from hypothesis import settings

settings.register_profile("by hand", deadline=None)
settings.load_profile("by hand")


def pytest_report_header() -> str:
    """Name the processor capability; ATEN_CPU_CAPABILITY=default, avx2 or avx512 chooses another."""
    return f"ATen CPU capability: {torch.backends.cpu.get_cpu_capability()}"
