"""Pieces of weights are bounded, and assemble to what they were cut from."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.testing.assembled import assemble
from engines.weights.weight_pieces import pieces


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 64))
def test_pieces_and_back(sizes: list[int], max_bytes: int) -> None:
    tensors = {f"t{i}": torch.arange(n, dtype=torch.float32) for i, n in enumerate(sizes)}
    tensors["matrix"] = torch.arange(12, dtype=torch.float64).view(3, 4).t()
    parts = list(pieces(tensors.items(), max_bytes))
    for part in parts:
        assert part.flat.numel() * part.flat.element_size() <= max(max_bytes, part.flat.element_size())
    back = assemble(parts)
    assert list(back) == list(tensors)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_a_lost_piece_is_named() -> None:
    parts = list(pieces([("w", torch.arange(8.0))], 8))
    with pytest.raises(ValueError, match="w: a piece begins at 4"):
        assemble([parts[0], *parts[2:]])
    with pytest.raises(ValueError, match="w: 6 of 8"):
        assemble(parts[:-1])
