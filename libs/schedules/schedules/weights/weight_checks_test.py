"""What a sampler tells of its weight sync and its drafts, as a step's metrics."""

from types import SimpleNamespace
from typing import Any

from schedules.weights.weight_checks import transfer_metrics

SYNCED = SimpleNamespace(paused_s=0.5, staged_s=0.25, link_share=0.75)


class Drafting:
    """A sampler that drafts, and may have had a weight sync."""

    def __init__(self, accepted: float | None, transfer: Any = None) -> None:
        self.accepted, self.transfer = accepted, transfer

    def take_accepted(self) -> float | None:
        return self.accepted


def test_accepted_tokens_are_a_metric_where_something_drafts() -> None:
    first: Any = Drafting(0.75)
    assert transfer_metrics(first) == {"rollout/accepted_tokens": 0.75}
    synced: Any = Drafting(1.5, SYNCED)
    assert transfer_metrics(synced)["rollout/accepted_tokens"] == 1.5
    assert transfer_metrics(synced)["weights/pause_ms"] == 500.0
    plain: Any = Drafting(None, SYNCED)
    assert "rollout/accepted_tokens" not in transfer_metrics(plain)
