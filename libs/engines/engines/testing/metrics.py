"""Metrics of a step that two equal runs share."""

from collections.abc import Mapping

_APART = ("second", "time", "proof/")


def shared_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics without times, and without checks (`proof/`), which a new engine makes in its first step."""
    return {name: value for name, value in metrics.items() if not any(part in name for part in _APART)}
