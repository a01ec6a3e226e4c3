"""Compare two runs of a layout (`proofs.megatron_layouts.Measured`): steps, scores, weights, exports."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.proofs.megatron_layouts import largest_difference

LAYOUT_METRICS = ("plan_hash", "micro_batches", "fill")
"""Metrics that depend on the layout itself."""


def assert_same_step(want: Mapping[str, float], got: Mapping[str, float]) -> None:
    """Compare all metrics of a step. Megatron's routers do not count the tokens of each expert; which steps are checked
    (`proof/`) depends on when an engine was built."""
    left, right = ({k: v for k, v in row.items() if not k.startswith(("expert", "proof/"))} for row in (want, got))
    assert left.keys() == right.keys()
    for key in left.keys() - set(LAYOUT_METRICS):
        assert right[key] == pytest.approx(left[key], rel=1e-5, abs=1e-6), key


def assert_same_run(want: Any, got: Any) -> None:
    """Compare the metrics of every step, the scores of every batch, and the weights after them."""
    for left, right in zip(want.curve, got.curve, strict=True):
        assert_same_step(left, right)
    for left, right in zip(want.scores, got.scores, strict=True):
        torch.testing.assert_close(right, left, atol=1e-5, rtol=1e-5)
    assert largest_difference(want.trained, got.trained) < 1e-5


def assert_same_bits(want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> None:
    """Check that names are the same, and dtype and bits by each name."""
    assert want.keys() == got.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        assert got[name].shape == value.shape, name
        assert torch.equal(_bits(got[name]), _bits(value)), name


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
