"""Chunked log-probs and entropies against one full matrix of logits, values and gradients, in float64."""

from typing import Any

import pytest
import torch

from engines.scoring.log_probs import several_log_probs, token_log_probs, token_log_probs_reference


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


@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("k", [1, 6, 16, 17])
def test_of_several_tokens_and_the_rest(chunk: int, k: int) -> None:
    """Against the whole softmax in float64: given tokens, and the likeliest ones."""
    h, w, targets = problem()
    table = torch.log_softmax(h @ w.T / 0.7, -1)
    given = torch.stack([torch.randperm(17)[:k] for _ in targets])
    for tokens in (given, table.topk(k).indices):
        asked = tokens if tokens is given else k
        got, entropy, several = several_log_probs(h, w, targets, asked, 0.7, chunk, True)
        chosen = table.gather(1, tokens)
        others = table.masked_fill(torch.zeros_like(table).scatter(1, tokens, 1).bool(), -torch.inf).logsumexp(1)
        assert several.tokens.equal(tokens)
        torch.testing.assert_close(several.log_probs, chosen, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(several.rest, others, atol=1e-12, rtol=1e-12)
        weights = torch.linspace(-1, 2, 11, dtype=torch.float64)
        every = torch.linspace(-2, 3, 11 * k, dtype=torch.float64).view(11, k)
        rests = 0 if k == 17 else 1  # nothing is left, and has no gradient
        want = token_log_probs_reference(h, w, targets, 0.7)
        assert entropy is not None
        sums = [
            (a * weights).sum() + (b * weights.flip(0)).sum() + (c * every).sum() + (d * weights).nan_to_num(0).sum()
            for a, b, c, d in (
                (got, entropy, several.log_probs, several.rest if rests else several.rest.detach()),
                (*want, chosen, others if rests else others.detach()),
            )
        ]
        for grad, other in zip(*(torch.autograd.grad(x, (h, w), retain_graph=True) for x in sums), strict=True):
            torch.testing.assert_close(grad, other, atol=1e-11, rtol=1e-11)


def test_tokens_that_are_none_are_left_out() -> None:
    h, w, targets = problem()
    tokens = torch.tensor([[3, -1, 0, -1]]).expand(11, 4)
    few, more = (several_log_probs(h, w, targets, x)[2] for x in (tokens[:, [0, 2]], tokens))
    assert more.log_probs[:, [0, 2]].equal(few.log_probs)
    assert more.log_probs[:, [1, 3]].eq(0).all()
    assert more.rest.equal(few.rest)
    grads = [torch.autograd.grad(x.log_probs.sum() + x.rest.sum(), h)[0] for x in (few, more)]
    torch.testing.assert_close(*grads)


def test_of_tokens_far_below_the_likeliest() -> None:
    """Probabilities that underflow in float32 have finite log-probs, and gradients."""
    h = torch.eye(1).requires_grad_()
    w = torch.tensor([[0.0], [-60.0], [-80.0], [-83.0]])
    _, _, several = several_log_probs(h, w, torch.tensor([0]), torch.tensor([[0, 1]]))
    assert several.rest.item() == pytest.approx(-80 + torch.log1p(torch.tensor(-3.0).exp()).item(), rel=1e-6)
    (grad,) = torch.autograd.grad(several.rest.sum(), h)
    assert grad.item() == pytest.approx(-80 - 3 * torch.tensor(-3.0).sigmoid().item(), rel=1e-5)


def test_more_likeliest_tokens_than_there_are_is_refused() -> None:
    h, w, targets = problem()
    with pytest.raises(ValueError, match="the 18 likeliest tokens of a vocabulary of 17"):
        several_log_probs(h, w, targets, 18)
