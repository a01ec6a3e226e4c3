"""Chunked log-probs and entropies against one full matrix of logits, values and gradients, in float64."""

from typing import Any

import pytest
import torch

from engines.scoring.log_probs import token_log_probs, token_log_probs_reference


def problem(
    tokens: int = 11, hidden: int = 5, vocab: int = 17, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    h = torch.randn(tokens, hidden, generator=rng, dtype=dtype).requires_grad_()
    w = torch.randn(vocab, hidden, generator=rng, dtype=dtype).requires_grad_()
    return h, w, torch.randint(0, vocab, (tokens,), generator=rng)


@pytest.mark.parametrize("chunk", [1, 4, 11, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_equals_the_reference(chunk: int, temperature: float, soft_cap: float | None) -> None:
    h, w, targets = problem()
    got, entropy = token_log_probs(h, w, targets, temperature, chunk, entropy=True, soft_cap=soft_cap)
    want, want_entropy = token_log_probs_reference(h, w, targets, temperature, soft_cap)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(entropy, want_entropy, atol=1e-12, rtol=1e-12)
    assert entropy is not None
    assert want_entropy is not None
    weights = torch.linspace(-1, 2, 11, dtype=torch.float64)
    grads = torch.autograd.grad((got * weights + entropy * weights.flip(0)).sum(), (h, w))
    want_grads = torch.autograd.grad((want * weights + want_entropy * weights.flip(0)).sum(), (h, w))
    for grad, other in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(grad, other, atol=1e-12, rtol=1e-12)


def test_against_numerical_differentiation() -> None:
    h, w, targets = problem(tokens=4, hidden=3, vocab=5)
    for cap in (None, 2.0):
        assert torch.autograd.gradcheck(lambda a, b: token_log_probs(a, b, targets, 0.9, 3, True, cap), (h, w))  # type: ignore[arg-type,return-value] # noqa: B023


def test_no_tokens_stay_connected() -> None:
    h, w, targets = problem()
    got, entropy = token_log_probs(h[:0], w, targets[:0])
    assert got.shape == (0,)
    assert entropy is None
    got.sum().backward()
    assert w.grad is not None
    assert h.grad is not None
    assert w.grad.eq(0).all()
    assert h.grad.eq(0).all()


def test_bfloat16_gives_float32() -> None:
    h, w, targets = problem(dtype=torch.float32)
    got, _ = token_log_probs(h.bfloat16(), w.bfloat16(), targets)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, token_log_probs_reference(h, w, targets)[0], atol=0.05, rtol=0.05)


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the largest tensor any operation returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(item, torch.Tensor):
                self.numel = max(self.numel, item.numel())
        return out


def test_never_more_than_a_chunk_of_logits() -> None:
    h, w, targets = problem(tokens=64, hidden=2, vocab=128)
    with Largest() as largest:
        token_log_probs(h, w, targets, chunk=8, entropy=True)[0].sum().backward()
    assert largest.numel <= 8 * 128
