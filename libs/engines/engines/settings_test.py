"""Configuration, learning rates, capabilities, weight pieces and metric sums: everything that needs no model."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.capability import FSDP2, No, Yes, refuse_unsupported, supports
from engines.config import EngineConfig, parse_context_parallel
from engines.execution.schedule import learning_rate
from engines.weights.pieces import assemble, pieces


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "fsdp"}, "backend must be one of 'fsdp2', 'megatron'"),
        ({"batching": "rows"}, "batching"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank"),
        ({"temperature": 0.0}, "temperature"),
        ({"grad_clip": 0.0}, "grad_clip"),
        ({"lr_schedule": "cosine"}, "total_steps"),
        ({"lr_schedule": "linear", "warmup_steps": 5, "total_steps": 5}, "total_steps"),
        ({"min_lr_ratio": 0.1}, "no effect"),
        ({"context_parallel": "static"}, "static:N"),
    ],
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_context_parallel_values():
    assert [parse_context_parallel(v) for v in ("off", "static:4", "dynamic")] == [1, 4, "dynamic"]


def test_learning_rates_by_hand():
    config = EngineConfig(lr=8.0, warmup_steps=4)
    assert [learning_rate(config, step) for step in range(6)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    config = EngineConfig(lr=8.0, lr_schedule="linear", total_steps=4)
    assert [learning_rate(config, step) for step in range(6)] == [8.0, 6.0, 4.0, 2.0, 0.0, 0.0]
    config = EngineConfig(lr=8.0, lr_schedule="cosine", warmup_steps=2, total_steps=6, min_lr_ratio=0.5)
    rates = [learning_rate(config, step) for step in range(9)]
    assert rates[:3] == [4.0, 8.0, 8.0]
    assert rates[4] == pytest.approx(6.0)
    assert rates[6:] == pytest.approx([4.0] * 3)


def test_every_capability_answers_with_its_ground():
    config = EngineConfig()
    for feature in FSDP2:
        answer = supports(config, feature)
        assert isinstance(answer, (Yes, No))
        assert bool(answer) == isinstance(answer, Yes)
        assert (answer.evidence if isinstance(answer, Yes) else answer.reason).strip()
        assert not supports(EngineConfig(backend="megatron"), feature)
    assert not supports(config, "megatron")
    with pytest.raises(ValueError, match="known are"):
        supports(config, "teleport")


@pytest.mark.parametrize("options", [{"backend": "megatron"}, {"device": "npu"}])
def test_unsupported_settings_are_refused_with_the_reason(options):
    with pytest.raises(ValueError, match="is not supported:"):
        refuse_unsupported(EngineConfig(**options))


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 64))
def test_pieces_and_back(sizes, max_bytes):
    tensors = {f"t{i}": torch.arange(n, dtype=torch.float32) for i, n in enumerate(sizes)}
    tensors["matrix"] = torch.arange(12, dtype=torch.float64).view(3, 4).t()
    parts = list(pieces(tensors.items(), max_bytes))
    for part in parts:
        assert part.flat.numel() * part.flat.element_size() <= max(max_bytes, part.flat.element_size())
    back = assemble(parts)
    assert list(back) == list(tensors)
    assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


def test_a_lost_piece_is_named():
    parts = list(pieces([("w", torch.arange(8.0))], 8))
    with pytest.raises(ValueError, match="w: a piece begins at 4"):
        assemble([parts[0], *parts[2:]])
    with pytest.raises(ValueError, match="w: 6 of 8"):
        assemble(parts[:-1])
