"""What megatron-core calls of the package deep_ep, over gloo on a CPU: for tests, which have none of its devices.

A token goes once to each rank that has one of its experts; there its choices are numbers among that rank's experts,
-1 for those of others. What comes back is added up, token by token.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class EventHandle:
    """Nothing to wait for: a CPU has no streams."""


class EventOverlap:
    """Nothing to wait for."""

    def __init__(self, event: EventHandle | None = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        """Return at once."""


class Sizes:
    """Sizes of buffers, which gloo has none of."""

    def get_nvl_buffer_size_hint(self, *_: int) -> int:
        """Return 0."""
        return 0

    def get_rdma_buffer_size_hint(self, *_: int) -> int:
        """Return 0."""
        return 0


@dataclass(frozen=True)
class Handle:
    """Where tokens went: `rows` of each rank's in order, and how many were sent to and came from each rank."""

    tokens: int
    rows: Tensor
    sent: list[int]
    received: list[int]


class Buffer:
    """`deep_ep.Buffer` over a group."""

    sms = 0

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @classmethod
    def set_num_sms(cls, number: int) -> None:
        """Keep the number of multiprocessors."""
        cls.sms = number

    @staticmethod
    def get_dispatch_config(*_: int) -> Sizes:
        """Return sizes of buffers."""
        return Sizes()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        """Return tokens by rank, None, tokens by expert, whether a token goes to a rank [T, ranks], and an event."""
        ranks = self.group.size()
        experts = torch.zeros(len(topk_idx), num_experts, dtype=torch.bool)
        experts.scatter_(1, topk_idx, True)
        there = experts.view(len(topk_idx), ranks, -1).any(2)
        return there.sum(0), None, experts.sum(0), there, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: Handle | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        """Return what came of x [T, H], of choices and weights [T, K], tokens by expert, a handle, and an event; with a
        handle x alone, by the ways of an earlier call."""
        if handle is not None:
            return self._send(x[handle.rows], handle.sent, handle.received), None, None, None, None, EventOverlap()
        assert topk_idx is not None
        assert topk_weights is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_weights.dtype == torch.float32
        ranks, mine = self.group.size(), len(num_tokens_per_expert) // self.group.size()
        to, rows = is_token_in_rank.t().nonzero(as_tuple=True)
        sent = is_token_in_rank.sum(0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        handle = Handle(len(x), rows, sent.tolist(), received.tolist())
        local = topk_idx[rows] - mine * to[:, None]
        elsewhere = (local < 0) | (local >= mine)
        sizes = handle.sent, handle.received
        choices = self._send(local.masked_fill(elsewhere, -1), *sizes)
        weights = self._send(topk_weights[rows].masked_fill(elsewhere, 0.0), *sizes)
        counts = torch.bincount(choices[choices >= 0], minlength=mine).tolist()
        assert ranks * mine == len(num_tokens_per_expert)
        return self._send(x[rows], *sizes), choices, weights, counts, handle, EventOverlap()

    def combine(
        self, x: Tensor, handle: Handle, topk_weights: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Return the sums of what comes back of x [R, H], and of weights [R, K]: [T, H] and [T, K]."""
        back = [None if part is None else self._back(part, handle) for part in (x, topk_weights)]
        assert back[0] is not None
        return back[0], back[1], EventOverlap()

    def _back(self, part: Tensor, handle: Handle) -> Tensor:
        returned = self._send(part, handle.received, handle.sent)
        return part.new_zeros(handle.tokens, part.shape[1]).index_add_(0, handle.rows, returned)

    def _send(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self.group)
        return out


def write_package(folder: Path) -> None:
    """Write a package deep_ep into a folder, for processes that have it on their path."""
    (folder / "deep_ep").mkdir(parents=True)
    for file, names in (("__init__", "Buffer"), ("utils", "EventHandle, EventOverlap")):
        (folder / "deep_ep" / f"{file}.py").write_text(f"from {__name__} import {names}\n")
