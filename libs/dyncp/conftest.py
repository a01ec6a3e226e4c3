"""For pytest by hand: the vector instructions with which the numeric tests ran."""

import torch


def pytest_report_header() -> str:
    """Return the processor capability for pytest's header; ATEN_CPU_CAPABILITY=default, avx2 or avx512 selects it."""
    return f"ATen CPU capability: {torch.backends.cpu.get_cpu_capability()}"
