"""GSPO, GMPO, SAPO and DPPO against their papers' formulas, a sequence at a time in Python floats; their gradients."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from objectives import losses
from objectives.losses import TokenLoss

log_prob = st.floats(-4, -0.02)
token = st.tuples(log_prob, log_prob, st.booleans())
sequence = st.tuples(st.floats(-3, 3), st.lists(token, min_size=1, max_size=6))
Sequence = tuple[float, list[tuple[float, float, bool]]]


def tensors(sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """log_probs, old_log_probs, advantages f64[T], mask bool[T], cu_seqlens i32[n+1]."""
    rows = [(new, old, advantage, keep) for advantage, tokens in sequences for new, old, keep in tokens]
    new, old, advantage = (torch.tensor([row[part] for row in rows], dtype=torch.float64) for part in range(3))
    ends = torch.tensor([0, *[len(tokens) for _, tokens in sequences]]).cumsum(0).to(torch.int32)
    return new.requires_grad_(), old, advantage, torch.tensor([row[3] for row in rows]), ends


def means(result: TokenLoss, mask: Tensor, ends: Tensor) -> list[Tensor]:
    """The mean loss over each sequence's trained tokens, of those that have any."""
    spans = [slice(*span) for span in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]
    return [result.loss[span][mask[span]].mean() for span in spans if bool(mask[span].any())]


def trained(sequences: list[Sequence]) -> list[tuple[float, list[float]]]:
    kept = [(advantage, [new - old for new, old, keep in tokens if keep]) for advantage, tokens in sequences]
    return [(advantage, gaps) for advantage, gaps in kept if gaps]


@given(st.lists(sequence, min_size=1, max_size=4), st.sampled_from([(3e-4, 4e-4), (0.2, 0.3)]))
def test_gspo_clips_one_ratio_a_sequence(sequences: list[Sequence], bounds: tuple[float, float]) -> None:
    new, old, advantage, mask, ends = tensors(sequences)
    got = means(losses.gspo(new, old, advantage, mask, ends, *bounds), mask, ends)
    want, slopes = [], []
    for a, gaps in trained(sequences):
        s = math.exp(sum(gaps) / len(gaps))
        want.append(-min(s * a, min(max(s, 1 - bounds[0]), 1 + bounds[1]) * a))
        cut = (a > 0 and s > 1 + bounds[1]) or (a < 0 and s < 1 - bounds[0])
        slopes.append([0.0 if cut else -s * a / len(gaps)] * len(gaps))
    assert [float(value) for value in got] == pytest.approx(want, rel=1e-9, abs=1e-12)
    if got:
        (gradient,) = torch.autograd.grad(torch.stack(got).sum(), new)
        assert gradient[mask].tolist() == pytest.approx([x for row in slopes for x in row], rel=1e-9, abs=1e-12)
        assert not gradient[~mask].any()


@given(st.lists(sequence, min_size=1, max_size=4))
def test_gmpo_is_the_geometric_mean_of_clipped_ratios(sequences: list[Sequence]) -> None:
    new, old, advantage, mask, ends = tensors(sequences)
    got = means(losses.gmpo(new, old, advantage, mask, ends, 0.4, 0.3), mask, ends)
    want = []
    for a, gaps in trained(sequences):
        bounded = [min(gap, 0.3) if a > 0 else max(gap, -0.4) for gap in gaps]
        want.append(-a * math.prod(math.exp(gap) for gap in bounded) ** (1 / len(gaps)))
    assert [float(value) for value in got] == pytest.approx(want, rel=1e-9, abs=1e-12)


@given(st.lists(st.tuples(log_prob, log_prob, st.floats(-3, 3)), min_size=1, max_size=9))
def test_sapo_is_a_gate_of_the_ratio(rows: list[tuple[float, float, float]]) -> None:
    new, old, advantage = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    want = []
    for p, q, a in rows:
        tau = 1.5 if a > 0 else 2.5
        want.append(-a * 4 / tau / (1 + math.exp(-tau * (math.exp(p - q) - 1))))
    got = losses.sapo(new, old, advantage, 1.5, 2.5).loss
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-12)


def total_variation(new: float, old: float) -> float:
    return abs(math.exp(new) - math.exp(old))


def divergence(new: float, old: float) -> float:
    p, q = math.exp(old), math.exp(new)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


@pytest.mark.parametrize(("loss", "moved"), [(losses.dppo_tv, total_variation), (losses.dppo_kl, divergence)])
@given(rows=st.lists(st.tuples(log_prob, log_prob, st.floats(-3, 3)), min_size=1, max_size=9))
def test_dppo_leaves_out_what_moved_too_far_the_way_it_is_pushed(
    loss: Callable[..., TokenLoss],
    moved: Callable[[float, float], float],
    rows: list[tuple[float, float, float]],
) -> None:
    new, old, advantage = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    new.requires_grad_()
    (gradient,) = torch.autograd.grad(loss(new, old, advantage, 0.1, 0.15, ratio_cap=3.0).loss.sum(), new)
    want = []
    for p, q, a in rows:
        bound = 0.15 if a > 0 else 0.1
        cut = moved(p, q) > bound and (p - q) * a > 0
        want.append(0.0 if cut else -a * min(math.exp(p - q), 3.0))
    assert gradient.tolist() == pytest.approx(want, rel=1e-9, abs=1e-12)


columns = st.tuples(log_prob, log_prob, st.floats(-3, 3), st.booleans())


@given(st.lists(columns, min_size=1, max_size=9), st.sampled_from([0.0, 0.2, 0.7, 1.0]), st.booleans())
def test_covariance_chooses_tokens_of_the_batch_and_no_gradient_or_a_kl(
    rows: list[tuple[float, float, float, bool]], share: float, bounded: bool
) -> None:
    new, old, advantage = (torch.tensor(column, dtype=torch.float64) for column in list(zip(*rows, strict=True))[:3])
    mask = torch.tensor([row[3] for row in rows])
    half = len(rows) // 2

    def jagged(x: Tensor) -> Tensor:
        return torch.nested.nested_tensor([x[:half], x[half:]], layout=torch.jagged)

    bounds = (-0.5, 0.5) if bounded else None
    chosen = losses.high_covariance(jagged(advantage), jagged(old), jagged(mask), share, bounds).values()
    kept = [(q, a) for _, q, a, keep in rows if keep]
    mean_q, mean_a = (sum(column) / max(1, len(kept)) for column in (list(zip(*kept, strict=True)) or [(), ()]))
    covariance = [(a - mean_a) * (q - mean_q) if keep else None for _, q, a, keep in rows]
    wanted = min(max(1, int(share * len(kept))), len(kept))
    picked = [c for c, is_chosen in zip(covariance, chosen.tolist(), strict=True) if is_chosen]
    assert None not in picked
    if bounded:
        assert len(picked) == min(wanted, sum(c is not None and -0.5 < c < 0.5 for c in covariance))
        assert all(c is not None and -0.5 < c < 0.5 for c in picked)
    else:
        largest = sorted((c for c in covariance if c is not None), reverse=True)[:wanted]
        assert sorted((c for c in picked if c is not None), reverse=True) == pytest.approx(largest, abs=1e-12)
    new.requires_grad_()
    cut, held = losses.clip_cov(new, old, advantage, chosen, 0.2, 0.3), losses.kl_cov(new, old, advantage, chosen, 0.5)
    for loss, kind in ((cut.loss, "cut"), (held.loss, "held")):
        (gradient,) = torch.autograd.grad(loss.sum(), new)
        want, slopes = [], []
        for (p, q, a, _), is_chosen in zip(rows, chosen.tolist(), strict=True):
            rho, sign = math.exp(p - q), (p > q) - (p < q)
            plain, bounded_one = -rho * a, -min(max(rho, 0.8), 1.3) * a
            if kind == "cut":
                want.append(0.0 if is_chosen else max(plain, bounded_one))
                slopes.append(0.0 if is_chosen or plain < bounded_one else plain)
            else:
                want.append(plain + 0.5 * abs(p - q) * is_chosen)
                slopes.append(plain + 0.5 * sign * is_chosen)
        assert loss.tolist() == pytest.approx(want, rel=1e-9, abs=1e-12)
        assert gradient.tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", ["gspo", "gmpo", "sapo", "dppo_tv", "dppo_kl"])
def test_on_policy_each_has_the_policy_gradient(name: str) -> None:
    new = -torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    advantage, mask = torch.tensor([0.5, 0.5, 0.5, -1.0, -1.0, -1.0]).double(), torch.ones(6, dtype=torch.bool)
    shape = (mask, torch.tensor([0, 3, 6], dtype=torch.int32)) if name in ("gspo", "gmpo") else ()
    loss = getattr(losses, name)(new, new.detach(), advantage, *shape).loss
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    torch.testing.assert_close(gradient, -advantage)
