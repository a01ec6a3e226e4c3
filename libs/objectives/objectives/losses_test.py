"""Losses and their sums against the papers' formulas, token by token in float64; the registry; a loss from outside."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from objectives import GRPO, Totals, losses
from objectives.losses import POLICY_LOSSES, PolicyTokens, TokenLoss, register_policy_loss
from objectives.sums import sequence_sums
from seqpack import make_batch, pack_sequences

log_prob = st.floats(-6, -0.01)
token = st.tuples(log_prob, log_prob, st.floats(-3, 3))
Token = tuple[float, float, float]


def ppo_oracle(new: float, old: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    """PPO's equation 7, with the dual clip, for one token."""
    rho = math.exp(new - old)
    bounded = min(max(rho, 1 - low), 1 + high)
    objective = min(rho * advantage, bounded * advantage)
    if dual is not None and advantage < 0:
        objective = max(objective, dual * advantage)
    return -objective


@given(
    st.lists(token, min_size=1, max_size=12), st.sampled_from([(0.2, 0.2, None), (0.2, 0.28, None), (0.1, 0.3, 3.0)])
)
def test_ppo_clip_equals_the_formula(rows: list[Token], bounds: tuple[float, float, float | None]) -> None:
    new, old, advantage = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    got = losses.ppo_clip(new, old, advantage, *bounds)
    want = [ppo_oracle(*row, *bounds) for row in rows]
    torch.testing.assert_close(got.loss, torch.tensor(want, dtype=torch.float64), atol=1e-12, rtol=1e-12)
    assert set(got.metrics) == {"ratio", "clip/low", "clip/high"} | ({"clip/dual"} if bounds[2] else set())


@given(st.lists(token, min_size=1, max_size=12))
def test_ppo_defaults_are_those_of_the_paper(rows: list[Token]) -> None:
    new, old, advantage = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    torch.testing.assert_close(
        losses.ppo_clip(new, old, advantage).loss, losses.ppo_clip(new, old, advantage, 0.2, 0.2, None).loss
    )


@given(st.lists(token, min_size=1, max_size=12), st.sampled_from([(1.0, 0.28), (0.2, 0.2), (0.5, 3.0)]))
def test_cispo_equals_the_formula(rows: list[Token], bounds: tuple[float, float]) -> None:
    new, old, advantage = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    got = losses.cispo(new, old, advantage, *bounds)
    want = [-min(max(math.exp(lp - o), 1 - bounds[0]), 1 + bounds[1]) * a * lp for lp, o, a in rows]
    torch.testing.assert_close(got.loss, torch.tensor(want, dtype=torch.float64), atol=1e-12, rtol=1e-12)


def test_ppo_gradient_is_zero_exactly_where_clipped() -> None:
    ratio = torch.tensor([0.5, 0.9, 1.0, 1.1, 1.5, 0.5, 1.5, 9.0, 0.9, 1.1], dtype=torch.float64)
    advantage = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    new = ratio.log().requires_grad_()
    got = losses.ppo_clip(new, torch.zeros_like(ratio), advantage, 0.2, 0.2, dual_clip=3.0)
    got.loss.sum().backward()
    # With A > 0 only a ratio above the range is cut; with A < 0 only one below it, and the dual bound cuts the far one.
    want = torch.where(torch.tensor([0, 0, 0, 0, 1, 1, 0, 1, 0, 0], dtype=torch.bool), 0.0, -ratio * advantage)
    torch.testing.assert_close(new.grad, want)
    torch.testing.assert_close(got.metrics["ratio"], ratio)
    assert not got.metrics["ratio"].requires_grad
    for name, token in {"clip/high": 4, "clip/low": 5, "clip/dual": 7}.items():
        assert got.metrics[name].nonzero().flatten().tolist() == [token]


def test_a_zero_advantage_is_never_counted_as_clipped() -> None:
    ratio = torch.tensor([0.1, 9.0], dtype=torch.float64)
    got = losses.ppo_clip(ratio.log(), torch.zeros(2), torch.zeros(2), dual_clip=2.0)
    assert not any(bool(got.metrics[key].any()) for key in ("clip/low", "clip/high", "clip/dual"))


def test_a_ratio_on_the_bound_is_not_clipped() -> None:
    """On policy every ratio is exactly 1, and no bound cuts anything."""
    zero, advantage = torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)
    for kind in (losses.ppo_clip, losses.cispo):
        metrics = kind(zero, zero, advantage, clip_low=0.0, clip_high=0.0).metrics
        assert not metrics["clip/low"].any()
        assert not metrics["clip/high"].any()
    two = torch.full((1,), 2.0, dtype=torch.float64).log()
    assert two.exp() == 2
    assert not losses.ppo_clip(two, torch.zeros(1), -torch.ones(1), dual_clip=2.0).metrics["clip/dual"].any()


def test_no_gradient_reaches_the_old_policy_or_the_advantage() -> None:
    for kind in (losses.ppo_clip, losses.cispo):
        new, old, advantage = (torch.tensor([x], requires_grad=True) for x in (-1.0, -1.1, 0.5))
        kind(new, old, advantage).loss.sum().backward()
        assert new.grad is not None
        assert old.grad is None
        assert advantage.grad is None
    new, advantage = torch.tensor([-1.0], requires_grad=True), torch.tensor([2.0], requires_grad=True)
    losses.policy_gradient(new, advantage).sum().backward()
    assert new.grad is not None
    assert float(new.grad) == -2.0
    assert advantage.grad is None


def test_on_policy_ppo_has_the_policy_gradient() -> None:
    new = torch.randn(9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    advantage = torch.linspace(-1, 1, 9, dtype=torch.float64)
    (ppo,) = torch.autograd.grad(losses.ppo_clip(new, new.detach(), advantage).loss.sum(), new)
    (reinforce,) = torch.autograd.grad(losses.policy_gradient(new, advantage).sum(), new)
    (soft,) = torch.autograd.grad(losses.cispo(new, new.detach(), advantage).loss.sum(), new)
    torch.testing.assert_close(ppo, reinforce)
    torch.testing.assert_close(soft, reinforce)
    torch.testing.assert_close(reinforce, -advantage)


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    new = torch.tensor([2.0, -2.0, 0.1], dtype=torch.float64).requires_grad_()
    got = losses.cispo(new, torch.zeros_like(new), torch.tensor([1.0, -1.0, 2.0]), clip_low=0.5, clip_high=0.3)
    got.loss.sum().backward()
    weight = torch.tensor([1.3, 0.5, math.exp(0.1)], dtype=torch.float64)
    torch.testing.assert_close(new.grad, -weight * torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64))
    assert got.metrics["clip/low"].tolist() == [False, True, False]
    assert got.metrics["clip/high"].tolist() == [True, False, False]
    torch.testing.assert_close(got.metrics["ratio"], new.detach().exp())


def test_cispo_counts_a_ratio_right_above_its_bound() -> None:
    ratios = torch.tensor([0.49, 0.51, 1.29, 1.31], dtype=torch.float64)
    counted = losses.cispo(ratios.log(), torch.zeros(4), torch.ones(4), clip_low=0.5, clip_high=0.3).metrics
    assert counted["clip/low"].tolist() == [True, False, False, False]
    assert counted["clip/high"].tolist() == [False, False, False, True]


CU = torch.tensor([0, 3, 4, 8], dtype=torch.int32)
MASK = torch.tensor([0, 1, 1, 0, 0, 1, 0, 1], dtype=torch.bool)
VALUES = torch.tensor([math.nan, 1.0, 2.0, math.inf, 50.0, 4.0, 60.0, 8.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("how", "want"),
    [
        ("token", (1 + 2 + 4 + 8) / 4),
        ("sequence", ((1 + 2) / 2 + (4 + 8) / 2) / 2),
        ("constant", (1 + 2 + 4 + 8) / (2 * 10)),
    ],
)
def test_aggregations_by_hand(how: losses.Aggregation, want: float) -> None:
    limit = 10 if how == "constant" else None
    got = losses.aggregate(VALUES, MASK, CU, how, tokens=4, sequences=2, max_tokens=limit)
    assert float(got) == pytest.approx(want, abs=1e-12)


def test_nothing_trained_is_zero_not_nan() -> None:
    for how in losses.AGGREGATIONS:
        assert float(losses.aggregate(VALUES, torch.zeros_like(MASK), CU, how, 0, 0, max_tokens=5)) == 0.0
        assert float(losses.aggregate(VALUES[:0], MASK[:0], CU[:1], how, 7, 3, max_tokens=5)) == 0.0


@pytest.mark.parametrize(("how", "want"), [("token", 7.0), ("sequence", 7.0), ("constant", 7.0 / 5)])
def test_a_single_trained_token_is_the_loss(how: losses.Aggregation, want: float) -> None:
    one, mask = torch.tensor([9.0, 7.0], dtype=torch.float64), torch.tensor([False, True])
    cu_seqlens = torch.tensor([0, 2], dtype=torch.int32)
    assert float(losses.aggregate(one, mask, cu_seqlens, how, 1, 1, max_tokens=5)) == want


def test_sequence_sums_of_any_layout() -> None:
    values = torch.arange(1.0, 9.0, dtype=torch.float64)
    assert sequence_sums(values, CU).tolist() == [6.0, 4.0, 26.0]
    assert sequence_sums(values, torch.tensor([0, 0, 8, 8], dtype=torch.int32)).tolist() == [0.0, 36.0, 0.0]
    assert sequence_sums(values[:0], torch.tensor([0], dtype=torch.int32)).tolist() == []


def test_refusals() -> None:
    one = torch.ones(1)
    for options, name in [({"dual_clip": 1.0}, "dual_clip"), ({"clip_low": -0.1}, "clip_low")]:
        with pytest.raises(ValueError, match=name):
            losses.ppo_clip(one, one, one, **options)
    for kind in (losses.ppo_clip, losses.cispo):
        for options in ({"clip_low": 1.1}, {"clip_low": math.nan}, {"clip_high": -0.1}, {"clip_high": math.nan}):
            with pytest.raises(ValueError, match=next(iter(options))):
                kind(one, one, one, **options)
        kind(one, one, one, clip_low=1, clip_high=0)
        kind(one, one, one, clip_low=0, clip_high=math.inf)
    for max_tokens in (None, 0, 2.5):
        with pytest.raises(ValueError, match=f"max_tokens >= 1.*got {max_tokens}"):
            losses.aggregate(VALUES, MASK, CU, "constant", 1, 1, max_tokens=max_tokens)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown aggregation 'mean': use one of token, sequence, constant"):
        losses.aggregate(VALUES, MASK, CU, "mean", 1, 1)  # type: ignore[arg-type]


# ------------------------------------------------------------------ the registry


def tokens_of(advantages: Tensor) -> PolicyTokens:
    """PolicyTokens of one packed row of seven tokens, the first of each sequence untrained."""
    rows = [{"input_ids": torch.arange(n), "loss_mask": torch.arange(n) > 0} for n in (3, 4)]
    packed = pack_sequences(make_batch(rows))
    rng = torch.Generator().manual_seed(1)
    new, old = (-2 * torch.rand(7, dtype=torch.float64, generator=rng) for _ in "ab")
    mask = packed.values["loss_mask"]
    return PolicyTokens(torch.where(mask, new, 0.0), torch.where(mask, old, 0.0), advantages * mask, mask, packed)


@pytest.mark.parametrize("name", ["ppo", "cispo"])
def test_the_objective_clips_where_the_function_does(name: str) -> None:
    """E8: GRPO's own defaults must not replace those of the loss."""
    function: Callable[..., losses.TokenLoss] = {"ppo": losses.ppo_clip, "cispo": losses.cispo}[name]
    tokens = tokens_of(torch.tensor([0.0, 1.0, -2.0, 0.0, 3.0, -1.0, 0.5], dtype=torch.float64))
    keys = ("log_probs", "old_log_probs", "advantages")
    packed = tokens.batch.with_values(**{key: getattr(tokens, key) for key in keys[1:]})
    cases: list[dict[str, Any]] = [{}, {"clip_low": 0.05}, {"clip_high": 0.01}, {"clip_low": 0.0, "clip_high": 0.0}]
    for options in cases:
        want = function(*(getattr(tokens, key) for key in keys), **options)
        loss, metrics = GRPO(policy_loss=name, **options)(tokens.log_probs, None, packed, Totals(5, 2))
        assert float(loss) == pytest.approx(float(want.loss.sum()) / 5, rel=1e-12)
        for key, value in want.metrics.items():
            assert metrics[key].tolist() == pytest.approx([float(value[tokens.mask].double().sum()), 5.0])


@pytest.mark.parametrize("name", [name for name, loss in POLICY_LOSSES.items() if loss.scales_with_advantage])
def test_a_loss_that_claims_to_scale_with_the_advantage_does(name: str) -> None:
    """Engines skip rows on this claim."""
    tokens = tokens_of(torch.zeros(7, dtype=torch.float64))
    tokens.batch.values["high_covariance"] = torch.arange(7) == 2
    new = tokens.log_probs.clone().requires_grad_()
    loss = POLICY_LOSSES[name].function(tokens._replace(log_probs=new), **POLICY_LOSSES[name].defaults).loss
    assert loss.eq(0).all()
    assert torch.autograd.grad(loss.sum(), new)[0].eq(0).all()


@pytest.fixture
def gspo() -> Iterator[Callable[..., TokenLoss]]:
    """GSPO (arXiv 2507.18071, equation 5): a ratio of the whole sequence, clipped; written as a user's file would."""

    @register_policy_loss("test-gspo", keys=("marker",), clip_low=3e-4, clip_high=4e-4)
    def function(tokens: PolicyTokens, clip_low: float, clip_high: float) -> TokenLoss:
        cu_seqlens, mask = tokens.batch.cu_seqlens, tokens.mask.to(tokens.log_probs.dtype)
        gap = sequence_sums(tokens.log_probs - tokens.old_log_probs, cu_seqlens)
        ratio = torch.exp(gap / sequence_sums(mask, cu_seqlens).clamp(min=1))
        ratio = torch.repeat_interleave(ratio, cu_seqlens.diff().long())
        bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
        loss = torch.maximum(-ratio * tokens.advantages, -bounded * tokens.advantages)
        return TokenLoss(loss, {"gspo/ratio": ratio.detach()})

    yield function
    del POLICY_LOSSES._entries["test-gspo"]


@pytest.mark.parametrize("keys", [(), ("old_log_probs",)])
def test_all_but_the_log_probs_are_constants_to_a_loss(keys: tuple[str, ...]) -> None:
    """Also on policy, where the old log-probs are the current ones: a loss from outside need not detach them."""
    seen: list[PolicyTokens] = []

    @register_policy_loss("test-constants")
    def keep(tokens: PolicyTokens) -> TokenLoss:
        seen.append(tokens)
        return TokenLoss(-(tokens.log_probs - tokens.old_log_probs).exp() * tokens.advantages, {})

    try:
        tokens = tokens_of(torch.linspace(-1, 1, 7, dtype=torch.float64))
        packed = tokens.batch.with_values(advantages=tokens.advantages, **{key: getattr(tokens, key) for key in keys})
        log_probs = tokens.log_probs.clone().requires_grad_()
        loss, _ = GRPO(policy_loss="test-constants")(log_probs, None, packed, Totals(5, 2))
        loss.backward()
    finally:
        del POLICY_LOSSES._entries["test-constants"]
    assert [name for name in ("log_probs", "old_log_probs", "advantages") if getattr(seen[0], name).requires_grad] == [
        "log_probs"
    ]
    ratio = (tokens.log_probs - tokens.old_log_probs).exp() if keys else torch.ones(7, dtype=torch.float64)
    torch.testing.assert_close(log_probs.grad, -ratio * tokens.advantages * tokens.mask / 5)


@pytest.mark.usefixtures("gspo")
def test_a_loss_from_outside_needs_no_other_edit() -> None:
    objective = GRPO(policy_loss="test-gspo", clip_high=0.5, aggregation="sequence")
    assert objective.required_keys == ("advantages", "marker")
    assert "test-gspo" in tuple(POLICY_LOSSES)
    assert POLICY_LOSSES["test-gspo"].scales_with_advantage is False
    assert POLICY_LOSSES["test-gspo"].name == "test-gspo"
    tokens = tokens_of(torch.full((7,), 2.0, dtype=torch.float64))
    packed = tokens.batch.with_values(old_log_probs=tokens.old_log_probs, advantages=tokens.advantages)
    loss, metrics = objective(tokens.log_probs, None, packed, Totals(5, 2))
    ratios = [math.exp(float((tokens.log_probs - tokens.old_log_probs)[a:b].mean())) for a, b in ((1, 3), (4, 7))]
    assert float(loss) == pytest.approx(-sum(2.0 * min(r, 1.5) for r in ratios) / 2, rel=1e-12)
    assert metrics["gspo/ratio"].tolist() == pytest.approx([2 * ratios[0] + 3 * ratios[1], 5.0])
    # It does not claim to scale with the advantage, so no row is skipped for having none.
    batch = make_batch([{"input_ids": [1, 2], "loss_mask": [False, True], "advantages": [0.0, 0.0]}])
    assert objective.zero_gradient_rows(batch).tolist() == [False]
    with pytest.raises(ValueError, match=r"dual_clip=2\.0 has no effect: policy_loss 'test-gspo' takes clip_low"):
        GRPO(policy_loss="test-gspo", dual_clip=2.0)
    with pytest.raises(ValueError, match="registered already"):
        register_policy_loss("test-gspo")(losses.ppo_clip)


def test_registering_an_option_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown options \['beta'\]: GRPO has clip_low, clip_high, dual_clip"):
        register_policy_loss("test-other", beta=1.0)
    assert "test-other" not in POLICY_LOSSES


def test_what_the_built_in_losses_declare() -> None:
    assert dict(POLICY_LOSSES["ppo"].defaults) == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    assert dict(POLICY_LOSSES["cispo"].defaults) == {"clip_low": 1.0, "clip_high": 0.28}
    for name, entry in POLICY_LOSSES.items():
        assert entry.name == name
        assert entry.keys == (("high_covariance",) if name.endswith("_cov") else ())
        assert entry.scales_with_advantage is (name != "kl_cov")
