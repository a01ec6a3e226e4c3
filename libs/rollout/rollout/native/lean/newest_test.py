"""Attention of newest tokens: small heads in one product a row are what they are one by one."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rollout.native.lean import newest
from rollout.native.lean.lean_decoder import LeanDecoder
from rollout.native.lean.newest import attend_newest


def case(
    rows: int, heads: int, kv_heads: int, dim: int, span: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows + span)
    q, kv = torch.randn(rows, heads, dim, dtype=dtype), torch.randn(rows, 2 * span, 2, kv_heads, dim, dtype=dtype)
    return q, kv.narrow(1, 0, span)


def attend(q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    keys, values = kv.transpose(1, 3).unbind(2)
    return attend_newest(q, keys, values, mask, scale)


def one_by_one(q: torch.Tensor, kv: torch.Tensor, seen: Sequence[int], scale: float) -> torch.Tensor:
    """From the formula: each head of each row by itself."""
    out = torch.empty_like(q)
    share = q.shape[1] // kv.shape[3]
    for row in range(q.shape[0]):
        for head in range(q.shape[1]):
            keys, values = kv[row, : seen[row], :, head // share].unbind(1)
            out[row, head] = ((keys @ q[row, head] * scale).softmax(0)[:, None] * values).sum(0)
    return out


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (4, 4, 8), (6, 1, 16), (4, 2, 64)])
@pytest.mark.parametrize("rows", [1, 3, newest.FUSED_ROWS, newest.FUSED_ROWS + 5])
def test_is_the_formula(rows: int, heads: int, kv_heads: int, dim: int) -> None:
    q, kv = case(rows, heads, kv_heads, dim, span=9)
    whole = attend(q, kv, None, 0.3)
    torch.testing.assert_close(whole, one_by_one(q, kv, [9] * rows, 0.3), rtol=0, atol=1e-12)
    seen = [1 + row % 9 for row in range(rows)]
    mask = torch.zeros(rows, 1, 1, 9, dtype=q.dtype)
    for row, count in enumerate(seen):
        mask[row, ..., count:] = -torch.inf
    torch.testing.assert_close(attend(q, kv, mask, 0.3), one_by_one(q, kv, seen, 0.3), rtol=0, atol=1e-12)


def test_small_heads_of_many_rows_stand_in_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    fused: list[torch.dtype] = []
    inner = newest._fused

    def noted(q: torch.Tensor, *others: Any) -> torch.Tensor:
        fused.append(q.dtype)
        return inner(q, *others)

    monkeypatch.setattr(newest, "_fused", noted)
    many = newest.FUSED_ROWS
    for dtype in (torch.float64, torch.float32):
        q, kv = case(many, 4, 2, 16, 5, dtype)
        attend(q, kv, None, 1.0)
    assert fused == [torch.float64, torch.float32]
    few, wide = case(many - 1, 4, 2, 16, 5), case(many, 4, 2, 64, 5)
    rounded = case(many, 4, 2, 16, 5, torch.bfloat16)  # whose scores it would round
    for q, kv in (few, wide, rounded):
        attend(q, kv, None, 1.0)
    assert len(fused) == 2


def test_a_short_row_is_looked_at_as_a_whole_vector() -> None:
    """What is beyond its tokens counts as nothing: the logits are those of a pass over all tokens."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval().double()
    decoder = LeanDecoder(model)
    prompts = [[1 + (row * step) % 49 for step in range(1, 4 + row % 3)] for row in range(newest.FUSED_ROWS)]
    with torch.no_grad():
        _, cache = decoder.prefill(prompts)
        decoder.place(cache, range(len(prompts)), range(len(prompts)))
        logits = decoder.step(torch.arange(len(prompts)))
        assert decoder._slots.span == newest.LEAST_SPAN
        for row, prompt in enumerate(prompts):
            (wanted,) = model(torch.tensor([[*prompt, row]])).logits[:, -1]
            torch.testing.assert_close(logits[row], wanted, rtol=0, atol=1e-6)  # its rotary is float32


@pytest.mark.parametrize("lengths", [[3, 3], [2, 14, 5], [30, 1]])
def test_steps_count_on_as_if_each_was_laid_out_anew(lengths: list[int]) -> None:
    """Across a span's bound and a growth of the buffers."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    model, logits = Qwen3ForCausalLM(config).eval(), []
    for anew in (True, False):
        decoder = LeanDecoder(model)
        with torch.no_grad():
            _, cache = decoder.prefill([[1 + i % 49 for i in range(n)] for n in lengths])
            decoder.place(cache, range(len(lengths)), range(len(lengths)))
            for step in range(20):
                if anew:
                    decoder._slots._steady = 0
                logits.append(decoder.step(torch.arange(len(lengths)) + step))
    assert all(a.equal(b) for a, b in zip(logits[:20], logits[20:], strict=True))
