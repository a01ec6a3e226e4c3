"""Every option of every objective is checked where it is made: by choice, by range, and for having an effect."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest

from objectives import GRPO, SFT
from objectives.losses import OPTIONS, POLICY_LOSSES, policy_gradient, register_policy_loss
from objectives.off_policy import CORRECTIONS

# Option: (the others it needs to have an effect, values that are good, values that are not).
NUMBERS_BELOW_0 = (-1, -0.001, math.nan, -math.inf, "1", True)
GRPO_OPTIONS: dict[str, tuple[dict[str, Any], Sequence[Any], Sequence[Any]]] = {
    "policy_loss": ({}, ["ppo", "cispo"], ["cipso", "", "PPO", None, 1]),
    "policy_loss_options": ({}, [()], [("tau=1",)]),
    "clip_low": ({}, [0, 0.0, 0.2, 1.0], [1.001, 2, *NUMBERS_BELOW_0]),
    "clip_high": ({}, [0, 0.28, 5.0, math.inf], NUMBERS_BELOW_0),
    "dual_clip": ({}, [1.001, 3, 10.0], [1, 1.0, 0.5, 0, *NUMBERS_BELOW_0]),
    "covariance_share": ({"policy_loss": "kl_cov"}, [0, 0.5, 1, None], [1.5, *NUMBERS_BELOW_0]),
    "aggregation": ({}, ["token", "sequence"], ["constant", "mean", "", None]),
    "max_tokens": ({"aggregation": "constant"}, [1, 7, 4096], [None, 0, -1, math.nan, 1.5, "7", True]),
    "kl_coef": ({}, [0, 0.0, 0.04, 1], [math.inf, *NUMBERS_BELOW_0, None]),
    "kl_estimator": ({"kl_coef": 0.1}, ["k2", "k3", "k1+", "k3+", None], ["k1", "k4", "", "K3"]),
    "entropy_coef": ({}, [0, 0.0, 0.01], [math.inf, *NUMBERS_BELOW_0, None]),
    "off_policy": ({}, [*CORRECTIONS, None], ["tis", ""]),
    "off_policy_floor": ({"off_policy": "geometric_mask"}, [0, 0.5, 1, None], [1.5, *NUMBERS_BELOW_0]),
    "off_policy_cap": ({"off_policy": "mask"}, [1, 1.0, 2.0, 100, None], [0.999, 0, *NUMBERS_BELOW_0]),
}


def test_the_table_has_every_option() -> None:
    assert set(GRPO_OPTIONS) == {field.name for field in dataclasses.fields(GRPO)}
    assert {field.name for field in dataclasses.fields(SFT)} == {"aggregation", "loss", "loss_options"}


@pytest.mark.parametrize("name", GRPO_OPTIONS)
def test_good_values_are_taken(name: str) -> None:
    others, good, _ = GRPO_OPTIONS[name]
    for value in good:
        assert getattr(GRPO(**others, **{name: value}), name) == value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, row in GRPO_OPTIONS.items() for value in row[2]])
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        GRPO(**GRPO_OPTIONS[name][0], **{name: value})


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 5},
        {"covariance_share": 0.1},
        {"max_tokens": 5, "aggregation": "sequence"},
        {"kl_estimator": "k3"},
        {"kl_estimator": "k2", "kl_coef": 0.0},
        {"off_policy_cap": 2.0},
        {"off_policy_cap": 3, "off_policy": "none"},
        {"off_policy_floor": 0.5, "off_policy": "truncate"},
        {"dual_clip": 3.0, "policy_loss": "cispo"},
    ],
)
def test_an_option_without_effect_is_refused(options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(ValueError, match=f"{name}={options[name]!r} has no effect: "):
        GRPO(**options)


@pytest.mark.parametrize("kind", POLICY_LOSSES)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_policy_loss_takes_the_options_that_it_declares_and_no_other(kind: str, name: str) -> None:
    value = {"clip_low": 0.5, "clip_high": 0.5, "dual_clip": 2.0}[name]
    options: dict[str, Any] = {name: value}
    if name in POLICY_LOSSES[kind].defaults:
        assert getattr(GRPO(policy_loss=kind, **options), name) == value
        return
    with pytest.raises(ValueError, match=f"{name}={value} has no effect: policy_loss '{kind}' takes"):
        GRPO(policy_loss=kind, **options)


def test_the_texts_name_the_fix() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"policy_loss": "cipso"}, "unknown policy_loss 'cipso': use one of ppo, cispo"),
        ({"kl_coef": -1.0}, "kl_coef must be a number at least 0, got -1.0"),
        ({"kl_coef": math.inf}, "kl_coef must be finite"),
        ({"clip_low": 2.0}, "clip_low must be a number from 0 to 1, got 2.0"),
        ({"dual_clip": 1.0}, "dual_clip must be a number above 1, got 1.0"),
        ({"aggregation": "constant"}, "needs max_tokens >= 1"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, r"use 'k2', 'k3', 'k1\+' or 'k3\+'"),
        ({"off_policy": "tis"}, "use one of none, truncate, mask, sequence_truncate, sequence_mask"),
        (
            {"off_policy_cap": 3.0},
            "it goes with an off_policy of truncate, mask, sequence_truncate, sequence_mask, geo.*_mask$",
        ),
        ({"max_tokens": 3}, "max_tokens=3 has no effect: it goes with aggregation 'constant'$"),
        ({"kl_estimator": "k2"}, "kl_estimator='k2' has no effect: it goes with a kl_coef above 0$"),
        ({"policy_loss": "cispo", "dual_clip": 2.0}, "policy_loss 'cispo' takes clip_low, clip_high$"),
        ({"aggregation": "mean"}, "unknown aggregation 'mean': use one of token, sequence, constant$"),
        ({"kl_coef": 1.0, "kl_estimator": "k4"}, r"unknown kl_estimator 'k4': use one of k1, k2, k3, k1\+, k3\+$"),
    ]
    for options, text in wrong:
        with pytest.raises(ValueError, match=text):
            GRPO(**options)
    register_policy_loss("test-bare")(policy_gradient)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"policy_loss 'test-bare' takes none of these options$"):
        GRPO(policy_loss="test-bare", clip_low=0.1)
    del POLICY_LOSSES._entries["test-bare"]


def test_required_keys_follow_the_options() -> None:
    assert GRPO().required_keys == GRPO(off_policy="none").required_keys == ("advantages",)
    assert GRPO(kl_coef=1.0, off_policy="mask").required_keys == ("advantages", "ref_log_probs", "rollout_log_probs")
    assert GRPO().needs_entropy is False
    assert GRPO(entropy_coef=0.1).needs_entropy is True
