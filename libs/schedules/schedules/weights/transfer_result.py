"""Bytes and seconds of a weight sync, as a step's metrics."""

from dataclasses import dataclass

import torch

from rollout.sync.rate import copy_rate
from rollout.sync.transfer import TransferTimes

NONE = TransferTimes(0.0, 0.0)


@dataclass(frozen=True)
class TransferResult:
    """Bytes that one process gave its sampler, and the seconds of it; `device`: whose memory they passed through."""

    nbytes: int
    times: TransferTimes = NONE
    device: str = "cpu"

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics by the names that vLLM's own figures have too, which replace these where there are some.

        `weights/link_share` is bytes over the seconds of staging and pause, against copying within that memory: what
        passes between two devices' memories, or over a network, can have no more.
        """
        metrics = {"weights/bytes": float(self.nbytes), "weights/pause_ms": 1000 * self.times.paused_s}
        seconds = self.times.staged_s + self.times.paused_s
        if not self.nbytes or not seconds or torch.device(self.device).type not in ("cpu", "cuda"):
            return metrics
        share = self.nbytes / seconds / copy_rate(self.nbytes, torch.device(self.device))
        return metrics | {"weights/staging_ms": 1000 * self.times.staged_s, "weights/link_share": share}
