"""The fused head against one full matrix of logits, kept or computed again, in float64 and in bfloat16."""

import pytest
import torch

from engines.fast.fused_log_probs import fused_log_probs
from engines.fast.log_prob_kernels import gradient, gradient_plain, statistics_plain
from engines.scoring.log_probs import token_log_probs, token_log_probs_reference


def problem(
    tokens: int = 11, hidden: int = 5, vocab: int = 17, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    h = torch.randn(tokens, hidden, generator=rng, dtype=dtype).requires_grad_()
    w = torch.randn(vocab, hidden, generator=rng, dtype=dtype).requires_grad_()
    return h, w, torch.randint(0, vocab, (tokens,), generator=rng)


@pytest.mark.parametrize("kept_bytes", [0, 2**20])
@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equals_the_reference(chunk: int, temperature: float, kept_bytes: int) -> None:
    h, w, targets = problem()
    got, entropy = fused_log_probs(h, w, targets, temperature, chunk, True, kept_bytes)
    want, want_entropy = token_log_probs_reference(h, w, targets, temperature)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(entropy, want_entropy, atol=1e-12, rtol=1e-12)
    assert entropy is not None
    assert want_entropy is not None
    weights = torch.linspace(-1, 2, 11, dtype=torch.float64)
    grads = torch.autograd.grad((got * weights + entropy * weights.flip(0)).sum(), (h, w))
    expected = torch.autograd.grad((want * weights + want_entropy * weights.flip(0)).sum(), (h, w))
    for mine, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kept_bytes", [0, 2**20])
def test_a_frozen_head_has_no_gradient_and_changes_no_other(kept_bytes: int) -> None:
    h, w, targets = problem()
    expected = torch.autograd.grad(fused_log_probs(h, w, targets, chunk=4, kept_bytes=kept_bytes)[0].sum(), h)[0]
    frozen = w.detach()
    got = fused_log_probs(h, frozen, targets, chunk=4, kept_bytes=kept_bytes)[0].sum()
    assert torch.equal(torch.autograd.grad(got, h)[0], expected)


def test_no_tokens_stay_connected() -> None:
    h, w, targets = problem()
    got, entropy = fused_log_probs(h[:0], w, targets[:0])
    assert got.shape == (0,)
    assert entropy is None
    got.sum().backward()
    assert w.grad is not None
    assert h.grad is not None
    assert w.grad.eq(0).all()
    assert h.grad.eq(0).all()


@pytest.mark.parametrize("kept_bytes", [0, 2**20])
def test_bfloat16_errors_are_no_larger_than_the_plain_paths(kept_bytes: int) -> None:
    h, w, targets = problem(64, 32, 80, torch.float32)
    low = h.detach().bfloat16().requires_grad_(), w.detach().bfloat16().requires_grad_()
    exact = low[0].detach().double().requires_grad_(), low[1].detach().double().requires_grad_()
    expected = torch.autograd.grad(token_log_probs_reference(*exact, targets)[0].sum(), exact)
    plain = torch.autograd.grad(token_log_probs(*low, targets, chunk=16)[0].sum(), low)
    fused = fused_log_probs(*low, targets, chunk=16, kept_bytes=kept_bytes)[0]
    assert fused.dtype == torch.float32
    for mine, other, true in zip(torch.autograd.grad(fused.sum(), low), plain, expected, strict=True):
        assert (mine.double() - true).norm() <= 1.05 * (other.double() - true).norm()


def test_the_gradient_is_written_over_the_logits() -> None:
    h, w, targets = problem()
    logits = (h @ w.t()).detach()
    log_probs, normalizers, _ = statistics_plain(logits, targets, 1.0, False)
    expected = gradient_plain(logits, targets, normalizers, torch.ones_like(log_probs), 1.0)
    assert gradient(logits, targets, normalizers, torch.ones_like(log_probs), 1.0) is logits
    assert torch.equal(logits, expected)


def test_a_second_backward_pass_computes_the_logits_again() -> None:
    h, w, targets = problem()
    loss = fused_log_probs(h, w, targets)[0].sum()
    first = torch.autograd.grad(loss, (h, w), retain_graph=True)
    for one, other in zip(first, torch.autograd.grad(loss, (h, w)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)
