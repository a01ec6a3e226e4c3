"""The rotary table holds the module's own factors, and asks as each supported release of transformers wants it."""

from typing import Any

import torch
from torch import nn
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from rollout.native.lean.rotary import Rotary

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
        cos, sin = module.own(torch.empty(1), torch.tensor(positions).expand(3, 1, -1))
        size = cos.shape[-1]
        assert torch.equal(turn.cos[:, 0, :size], cos[0])
        assert torch.equal(turn.sin[:, 0, :size], sin[0])
        assert (turn.cos[:, 0, size:] == 1).all()
        assert (turn.sin[:, 0, size:] == 0).all()
