"""Sums of metrics over micro-batches and ranks. A key's shape and name alone say how it is reduced; see protocol."""

import hashlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from engines.execution.early_host_read import EarlyRead
from engines.execution.reductions import reduce_float64


class MetricSum:
    """The metrics of an objective, summed; every micro-batch of every rank must give the same keys."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, metrics: dict[str, Tensor], share: float = 1.0) -> None:
        """Add one micro-batch's metrics, each times `share` (maxima are not scaled)."""
        if self._sums and metrics.keys() != self._sums.keys():
            odd = sorted(metrics.keys() ^ self._sums.keys())
            raise ValueError(
                f"an objective must return the same metrics for every micro-batch; {odd[0]!r} is not in all"
            )
        for key, value in metrics.items():
            value = value.detach().double()
            if value.shape not in ((), (2,)) or (key.endswith("/max") and value.shape != ()):
                raise ValueError(
                    f"metric {key!r} must be a scalar or a (sum, count) pair, its shape is {tuple(value.shape)}"
                )
            if key.endswith("/max"):
                self._sums[key] = torch.maximum(self._sums.get(key, value), value)
            else:
                self._sums[key] = self._sums.get(key, torch.zeros_like(value)) + value * share

    def sum_of(self, key: str, device: torch.device) -> Tensor:
        """Return this rank's sum of a metric, f64[] or f64[2]; a scalar 0 where there is none."""
        total = self._sums.get(key)
        return torch.zeros((), dtype=torch.float64, device=device) if total is None else total

    def reduce(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Return the values over all ranks. A pair becomes sum / count, 0 where nothing was counted. Collective."""
        return self.start(group)()

    def start(self, group: dist.ProcessGroup | None = None) -> Callable[[], dict[str, float]]:
        """Start a `reduce`, and return the function that ends it: later device work is not waited for. Collective."""
        sums, keys = self._sums, sorted(self._sums)
        added = [key for key in keys if not key.endswith("/max")]
        largest = [key for key in keys if key.endswith("/max")]
        totals = maxima = None
        if added:
            totals = EarlyRead(reduce_float64(torch.cat([sums[key].reshape(-1) for key in added]), group))
        if largest:
            maxima = EarlyRead(reduce_float64(torch.stack([sums[key] for key in largest]), group, largest=True))

        def values() -> dict[str, float]:
            out: dict[str, float] = {}
            numbers = iter([] if totals is None else totals.read().tolist())
            for key in added:
                first = next(numbers)
                out[key] = first if sums[key].ndim == 0 else first / (next(numbers) or 1.0)
            if maxima is not None:
                out |= dict(zip(largest, maxima.read().tolist(), strict=True))
            return out

        return values


def check_agreement(number: int, what: str, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Raise RuntimeError on every rank unless all ranks hold the same number: an error instead of a hang.

    It is sent from host memory where the group can (`engines.launch` makes it so): else a rank waits for its device.
    """
    if dist.get_world_size(group) == 1:
        return
    if "cpu:" in dist.get_backend_config(group):
        device = torch.device("cpu")
    # Maximum and minimum in one exchange; 52 bits are exact in float64.
    pair = torch.tensor([float(number), -float(number)], dtype=torch.float64, device=device)
    high, low = reduce_float64(pair, group, largest=True).tolist()
    if high != -low:
        raise RuntimeError(
            f"ranks disagree on {what}: every rank must be given the same global batch in the same order"
        )


def agreed_number(data: object) -> int:
    """Return a 52-bit hash of plain facts (numbers, text, tuples, frozen dataclasses of them)."""
    return int(hashlib.sha256(repr(data).encode()).hexdigest()[:13], 16)
