"""For pytest by hand: says with which vector instructions the numeric tests ran."""

import torch


def pytest_report_header() -> str:
    """Return name the processor capability; ATEN_CPU_CAPABILITY=default, avx2 or avx512 chooses another."""
    return f"ATen CPU capability: {torch.backends.cpu.get_cpu_capability()}"
