"""Gradients from every rank to the rank that updates, and weights back, a bucket of parameters at a time.

1. When the gradients of a bucket (a decoder layer) are there, each rank sends every other one its rows of them, in the
   dtype they were computed in, while the backward pass goes on.
2. What arrives is added up in float32, over ranks and micro-batches: no rounding but that of each gradient itself.
3. After the update the rows of all ranks are gathered into the weights, bucket by bucket, while the next is updated.

Buckets start in one fixed order on all ranks. One rank alone sends nothing: its gradients are used where autograd left
them, and added up in float32 where a step has several micro-batches.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.fast.masters import Master
from engines.weights.rows import rows_of


class Bucket:
    """Parameters whose gradients travel together, and how many of them are there."""

    def __init__(self, masters: list[Master], group: dist.ProcessGroup) -> None:
        self.masters = masters
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.arrived = 0
        self.sums: list[Tensor] | None = None
        """This rank's rows of the gradients, float32."""
        self._flight: tuple[Any, Tensor, Tensor] | None = None

    @property
    def full(self) -> bool:
        """Whether every parameter has its gradient of this micro-batch."""
        return self.arrived == len(self.masters)

    def start(self) -> None:
        """Send the gradients of a micro-batch and forget them here."""
        parts = [
            [_grad(one.parameter)[rows_of(one.parameter.shape[0], self.ranks, rank)] for one in self.masters]
            for rank in range(self.ranks)
        ]
        sizes = [sum(part.numel() for part in own) for own in parts]
        sent = torch.cat([part.reshape(-1) for own in parts for part in own])
        received = sent.new_empty(self.ranks * sizes[self.rank])
        equal = [sizes[self.rank]] * self.ranks
        work = dist.all_to_all_single(received, sent, equal, sizes, group=self.group, async_op=True)
        for one in self.masters:
            one.parameter.grad = None
        self._flight, self.arrived = (work, received, sent), 0

    def finish(self) -> None:
        """Wait (the device does, not the host) for what was sent, and add it up."""
        if self._flight is None:
            return
        (work, received, _), self._flight = self._flight, None
        work.wait()
        total = received.view(self.ranks, -1).sum(0, dtype=torch.float32)
        shapes = [one.weight.shape for one in self.masters]
        own = [part.view(shape) for part, shape in zip(_cut(total, shapes), shapes, strict=True)]
        if self.sums is None:
            self.sums = own
        else:
            torch._foreach_add_(self.sums, own)

    def gather(self) -> "Gathering":
        """Start to gather the rows that the ranks have updated."""
        return Gathering(self)


class Gathering:
    """Weights of a bucket on their way from all ranks to all ranks."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        sizes = [
            sum(one.parameter[rows_of(one.parameter.shape[0], bucket.ranks, rank)].numel() for one in bucket.masters)
            for rank in range(bucket.ranks)
        ]
        own = [one.weight.reshape(-1) for one in bucket.masters]
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
            places = [rows_of(one.parameter.shape[0], self.bucket.ranks, rank) for one in self.bucket.masters]
            into = [one.parameter.detach()[place] for one, place in zip(self.bucket.masters, places, strict=True)]
            shapes = [place.shape for place in into]
            weights += into
            rows += [part.view(shape) for part, shape in zip(_cut(self.received[rank], shapes), shapes, strict=True)]
        if weights:
            torch._foreach_copy_(weights, rows)


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

    def begin(self, micro_batches: int) -> None:
        """Forget what there is; so many micro-batches follow."""
        self._passes = micro_batches
        for bucket in self.buckets:
            bucket.finish()
            bucket.sums, bucket.arrived = None, 0
            for one in bucket.masters:
                one.parameter.grad = None

    def end_micro_batch(self) -> None:
        """Call after each backward pass: what has not been sent is, or is added up where there is one rank."""
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
        """This rank's rows of the gradients of the step, by bucket."""
        return [
            [_grad(one.parameter) for one in bucket.masters] if bucket.sums is None else bucket.sums
            for bucket in self.buckets
        ]

    def forget(self) -> None:
        """Free the gradients."""
        self.begin(0)

    def _add_own(self) -> None:
        for bucket in self.buckets:
            grads = [_grad(one.parameter) for one in bucket.masters]
            if bucket.sums is None:
                bucket.sums = [grad.float() for grad in grads]
            else:
                torch._foreach_add_(bucket.sums, grads)
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
    """The gradient of a micro-batch; zeros where the loss did not reach the parameter."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _cut(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """The first of a flat tensor's entries as parts of these shapes."""
    sizes = [shape.numel() for shape in shapes]
    return list(flat[: sum(sizes)].split(sizes))
