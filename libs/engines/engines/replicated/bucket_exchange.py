"""Gradients from every rank to the rank that updates, and weights back, a bucket of parameters at a time.

1. When the gradients of a bucket (a decoder layer) are there, each rank sends every other one its rows of them, in the
   dtype they were computed in, while the backward pass goes on.
2. What arrives is added up in float32, over ranks and micro-batches: no rounding but that of each gradient itself.
3. After the update the rows of all ranks are gathered into the weights, while the next bucket is updated and while the
   next forward pass begins: who reads the weights of a bucket calls its `settle` first.

Large matrices travel as they lie in memory, small parameters of a bucket together. Buckets start in one fixed order on
all ranks. One rank alone sends nothing: its gradients are used where autograd left them, and added up in float32 where
a step has several micro-batches.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.private_api import foreach_add, foreach_copy
from engines.replicated.fp32_masters import Master
from engines.weights.row_shards import rows_of

LARGE = 1 << 22
"""Number of entries from which a parameter whose rows split evenly over ranks travels by itself, uncopied."""


class Bucket:
    """Parameters whose gradients travel together, and how many of them have arrived.

    `masters`: the large ones first. Where a collective is waited for, the device waits and not the host.
    """

    def __init__(self, masters: list[Master], group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        alone = [one.parameter.shape[0] % self.ranks == 0 and one.parameter.numel() >= LARGE for one in masters]
        self.large = [one for one, by_itself in zip(masters, alone, strict=True) if by_itself]
        self.small = [one for one, by_itself in zip(masters, alone, strict=True) if not by_itself]
        self.masters = [*self.large, *self.small]
        self.arrived = 0
        self.sums: list[Tensor] | None = None
        """This rank's rows of the gradients, float32."""
        self._flights: list[tuple[Any, Tensor, Tensor]] = []
        self._gathering: tuple[list[Any], _Together | None] | None = None

    @property
    def full(self) -> bool:
        """Whether every parameter has its gradient of this micro-batch."""
        return self.arrived == len(self.masters)

    @property
    def settled(self) -> bool:
        """Whether none of its weights is being gathered."""
        return self._gathering is None

    def start(self) -> None:
        """Send the gradients of a micro-batch, and drop them here."""
        for one in self.large:
            sent = _grad(one.parameter).contiguous()
            self._send(sent, torch.empty_like(sent))
        if self.small:
            parts = [[_grad(one.parameter)[self._rows(one, rank)] for one in self.small] for rank in range(self.ranks)]
            sizes = [sum(part.numel() for part in own) for own in parts]
            sent = torch.cat([part.reshape(-1) for own in parts for part in own])
            self._send(sent, sent.new_empty(self.ranks * sizes[self.rank]), sizes)
        for one in self.masters:
            one.parameter.grad = None
        self.arrived = 0

    def _send(self, sent: Tensor, received: Tensor, sizes: list[int] | None = None) -> None:
        equal = None if sizes is None else [sizes[self.rank]] * self.ranks
        work = dist.all_to_all_single(received, sent, equal, sizes, group=self.group, async_op=True)
        self._flights.append((work, received, sent))

    def finish(self) -> None:
        """Wait for the gradients that arrive, and add them up."""
        if not self._flights:
            return
        totals = []
        for work, received, _ in self._flights:
            work.wait()
            totals.append(received.view(self.ranks, -1).sum(0, dtype=torch.float32))
        self._flights = []
        own = [total.view(one.weight.shape) for one, total in zip(self.large, totals, strict=False)]
        if self.small:
            shapes = [one.weight.shape for one in self.small]
            own += [part.view(shape) for part, shape in zip(_cut(totals[-1], shapes), shapes, strict=True)]
        if self.sums is None:
            self.sums = own
        else:
            foreach_add(self.sums, own)

    def gather(self) -> None:
        """Start to gather the rows that the ranks have updated; `settle` ends it."""
        works = [
            dist.all_gather_into_tensor(one.parameter.detach(), one.weight, group=self.group, async_op=True)
            for one in self.large
        ]
        self._gathering = works, _Together(self) if self.small else None

    @torch.no_grad()
    def settle(self) -> None:
        """Wait for the gather, so that the weights are those of the last update."""
        if self._gathering is None:
            return
        (works, together), self._gathering = self._gathering, None
        for work in works:
            work.wait()
        if together is not None:
            together.finish()

    def _rows(self, one: Master, rank: int) -> slice:
        return rows_of(one.parameter.shape[0], self.ranks, rank)


class _Together:
    """The small weights of a bucket, gathered from all ranks in one tensor."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        small = bucket.small
        sizes = [sum(one.parameter[bucket._rows(one, rank)].numel() for one in small) for rank in range(bucket.ranks)]
        own = [one.weight.reshape(-1) for one in small]
        self.sent = own[0].new_empty(max(sizes))  # every rank sends as much as the first; what is over is not read
        torch.cat(own, out=self.sent[: sizes[bucket.rank]])
        self.received = self.sent.new_empty(bucket.ranks, max(sizes))
        self.work = dist.all_gather_into_tensor(self.received.view(-1), self.sent, group=bucket.group, async_op=True)

    def finish(self) -> None:
        """Write what arrived into the weights."""
        self.work.wait()
        weights, rows = [], []
        for rank in range(self.bucket.ranks):
            if rank == self.bucket.rank:
                continue
            into = [one.parameter.detach()[self.bucket._rows(one, rank)] for one in self.bucket.small]
            shapes = [place.shape for place in into]
            weights += into
            rows += [part.view(shape) for part, shape in zip(_cut(self.received[rank], shapes), shapes, strict=True)]
        if weights:
            foreach_copy(weights, rows)


class Exchange:
    """The gradients of a step; `buckets` in the order in which a backward pass fills them."""

    def __init__(self, buckets: Iterable[list[Master]], group: dist.ProcessGroup) -> None:
        self.group = group
        self.alone = dist.get_world_size(group) == 1
        self.buckets = [Bucket(masters, group) for masters in buckets if masters]
        self._next = 0
        self._passes = 0
        if not self.alone:
            for bucket in self.buckets:
                for one in (one for one in bucket.masters if one.parameter.requires_grad):
                    one.parameter.register_post_accumulate_grad_hook(self._hook(bucket))

    def begin(self, micro_batches: int, add: bool = False) -> None:
        """Drop all gradients, for a step of `micro_batches` micro-batches; or `add` to them."""
        if add:
            if self.alone and self._passes == 1:  # they lie where autograd left them
                self._add_own()
            self._passes = 2
            return
        self._passes = micro_batches
        for bucket in self.buckets:
            bucket.finish()
            bucket.sums, bucket.arrived = None, 0
            for one in bucket.masters:
                one.parameter.grad = None

    def end_micro_batch(self) -> None:
        """Send the gradients that have not been sent; one rank alone adds them up. Call it after each backward pass."""
        if self.alone:
            if self._passes > 1:
                self._add_own()
            return
        while self._next < len(self.buckets):
            self._start_next()
        for bucket in self.buckets:
            bucket.finish()
        self._next = 0

    def gradients(self) -> list[list[Tensor]]:
        """Return this rank's rows of the gradients of the step, by bucket."""
        return [
            [_grad(one.parameter) for one in bucket.masters] if bucket.sums is None else bucket.sums
            for bucket in self.buckets
        ]

    def forget(self) -> None:
        """Free the gradients."""
        self.begin(0)

    @property
    def settled(self) -> bool:
        """Whether no weight of any bucket is being gathered."""
        return all(bucket.settled for bucket in self.buckets)

    def settle(self) -> None:
        """Wait for every weight that is being gathered."""
        for bucket in self.buckets:
            bucket.settle()

    def _add_own(self) -> None:
        for bucket in self.buckets:
            grads = [_grad(one.parameter) for one in bucket.masters]
            if bucket.sums is None:
                bucket.sums = [grad.float() for grad in grads]
            else:
                foreach_add(bucket.sums, grads)
            for one in bucket.masters:
                one.parameter.grad = None

    def _hook(self, bucket: Bucket) -> Any:
        def arrived(parameter: nn.Parameter) -> None:
            del parameter
            bucket.arrived += 1
            while self._next < len(self.buckets) and self.buckets[self._next].full:
                self._start_next()

        return arrived

    def _start_next(self) -> None:
        self.buckets[self._next].start()
        if self._next >= 2:  # two in flight at most, so that what was sent is freed soon
            self.buckets[self._next - 2].finish()
        self._next += 1


def _grad(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a micro-batch; zeros where the loss does not depend on the parameter."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _cut(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """Return the first entries of a flat tensor as parts of these shapes."""
    sizes = [shape.numel() for shape in shapes]
    return list(flat[: sum(sizes)].split(sizes))
