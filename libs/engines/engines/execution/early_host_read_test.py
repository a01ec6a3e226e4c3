"""Numbers that the host reads early: on a CPU they are as they were when read (on CUDA: `fast/cuda_test.py`)."""

import torch

from engines.execution.early_host_read import EarlyRead


def test_values_and_one_value() -> None:
    assert EarlyRead(torch.tensor([1.5, 2.5], dtype=torch.float64)).read().tolist() == [1.5, 2.5]
    assert float(EarlyRead(torch.tensor(0.25, dtype=torch.float64))) == 0.25


def test_no_graph_is_kept() -> None:
    weight = torch.ones((), requires_grad=True)
    assert not EarlyRead(weight * 2).read().requires_grad
