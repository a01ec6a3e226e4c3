"""Metrics of how evenly the tokens of a step went to the experts."""

from collections.abc import Mapping

from torch import Tensor


def load_metrics(load: Tensor) -> Mapping[str, float]:
    """Return the metrics of `load` f64[layers, E], the tokens of a whole step that each expert got.

    `expert_max_over_mean`: the fullest expert over the mean of its layer, averaged over layers; 1 is even, E / k is
    all tokens to the same k. `expert_max_over_mean_worst`: of the most uneven layer. `experts_unused`: the share of
    (layer, expert) pairs that no token went to.
    """
    mean = load.mean(1)
    uneven = load.amax(1) / mean.clamp(min=1e-30)
    return {
        "expert_max_over_mean": float(uneven.mean()),
        "expert_max_over_mean_worst": float(uneven.max()),
        "experts_unused": float((load == 0).double().mean()),
    }
