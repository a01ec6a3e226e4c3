"""The rotary table holds the module's own factors, and asks as each supported release of transformers wants it."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3_5TextConfig, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from rollout.native.lean.rotary import HalfRotation, Rotary, pair_order

CONFIG = Qwen3_5TextConfig(hidden_size=32, num_attention_heads=2, head_dim=16)


class OneAxisEach(nn.Module):
    """Up to transformers 5.17 the module expands nothing: position_ids [3, B, T], one plane an axis."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Qwen3_5TextRotaryEmbedding(CONFIG)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        assert position_ids.ndim == 3
        assert position_ids.shape[0] == 3
        return self.own(x, position_ids)


def test_the_table_is_the_modules_and_grows() -> None:
    module = OneAxisEach()
    rotary = Rotary(module, head_dim=16, like=torch.empty(0), axes=3)
    for positions in ([0, 5, 3], [70, 2], [200]):
        turn = rotary.take(torch.tensor(positions), max(positions) + 1)
        assert isinstance(turn, HalfRotation)
        cos, sin = module.own(torch.empty(1), torch.tensor(positions).expand(3, 1, -1))
        size = cos.shape[-1]
        assert torch.equal(turn.cos[:, 0, :size], cos[0])
        assert torch.equal(turn.sin[:, 0, :size], sin[0])
        assert (turn.cos[:, 0, size:] == 1).all()
        assert (turn.sin[:, 0, size:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_pairs_turn_as_halves_do(share: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=32, num_attention_heads=2, head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": share},
    )  # fmt: skip
    module, like = Qwen3RotaryEmbedding(config), torch.empty(1, dtype=dtype)
    if share < 1:  # as Qwen3.5's, which rotates the first dimensions alone
        module.inv_freq = module.inv_freq[: int(8 * share)]
    order, positions = pair_order(module, 16, like), torch.tensor([0, 7, 70])
    assert order is not None
    halves, pairs = (Rotary(module, 16, like, axes=1, pairs=p).take(positions, 71) for p in (False, True))
    x = torch.randn(3, 5, 16, dtype=dtype)
    bound = 1e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(pairs(x[..., order]), halves(x)[..., order], rtol=0, atol=bound)


def test_types_without_complex_numbers_have_no_pairs() -> None:
    module = Qwen3RotaryEmbedding(Qwen3Config(hidden_size=32, num_attention_heads=2, head_dim=16))
    assert pair_order(module, 16, torch.empty(1, dtype=torch.bfloat16)) is None
    assert pair_order(module, 16, torch.empty(1, device="meta")) is None
