"""One decision over many receivers: the new weights are whole on every one of them, or the old ones stay.

1. `prepare(manifest)` on all; a refusal ends it here.
2. Every bucket to all of them, while they go on sampling. A receiver has checked everything when nothing is missing.
3. The vote: all have everything (over processes too, where each runs its own receiver: `all_reduce_ok`).
4. `pause`, then `commit` on all, and a second vote. The old weights are kept until then.
5. All committed: `resume` lets the old weights go. Anything else: `abort` brings them back, and `resume` follows.

A receiver that dies or hangs counts as one that failed: the others keep the old weights and go on sampling.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rollout.errors import NotFiniteError
from rollout.sync.manifest import Manifest
from rollout.sync.pieces import Bucket
from seqpack.renamed import renamed_arguments


class Receiver(Protocol):
    """The methods of a rollout engine that are used here (`rollout.engine.RolloutEngine`)."""

    async def prepare(self, manifest: Manifest) -> None:
        """Begin a weight sync, or raise ValueError."""
        ...

    async def receive(self, bucket: Bucket) -> int:
        """Stage a bucket and return the number of missing elements."""
        ...

    async def commit(self, version: int) -> None:
        """Use the staged weights; the old ones are kept for `abort`, until `resume`."""
        ...

    async def abort(self) -> None:
        """Drop what is staged, or restore the old weights."""
        ...

    async def pause(self, mode: Literal["finish", "abort"] = "finish") -> None:
        """Pause sampling."""
        ...

    async def resume(self) -> None:
        """Resume sampling and drop the old weights."""
        ...


class SharingSampler(Protocol):
    """The methods of a sampler that computes with the trainer's own tensors (`rollout.native.sharing`)."""

    async def propose(self, version: int, weights: Any) -> None:
        """Check new weights and change nothing, or raise ValueError."""
        ...

    async def commit(self, version: int) -> None:
        """Make the proposed weights this version."""
        ...

    async def abort(self) -> None:
        """Drop the proposal; after a commit refuse sampling until the next one."""
        ...

    async def resume(self) -> None:
        """Resume sampling."""
        ...


AllReduceOk = Callable[[bool], bool]


@dataclass(frozen=True)
class TransferTimes:
    """Seconds of a weight sync at its receivers, without the time in which the sender makes the weights."""

    staged_s: float
    """Seconds of receiving, while sampling went on."""
    paused_s: float
    """Seconds from the pause of sampling to its resumption; without a pause, from the begin of the swap."""


class WeightVoteFailed(ValueError):  # noqa: N818  what happened, in the words of a log
    """This process could take the weights, and another one could not."""


@renamed_arguments(agree="all_reduce_ok")
async def transfer_weights(
    receivers: Sequence[Receiver],
    manifest: Manifest,
    buckets: Iterable[Bucket],
    *,
    pause: Literal["finish", "abort"] | None = "finish",
    timeout: float = 600.0,
    all_reduce_ok: AllReduceOk | None = None,
) -> TransferTimes:
    """Transfer the weights of `manifest` to all receivers, or to none; return the seconds that it took.

    `pause` is how sampling is paused while the receivers swap; None swaps while it goes on, one receiver after the
    other. `timeout` bounds each call to a receiver, in seconds. `all_reduce_ok(ok)` is collective and says whether all
    processes are ok, where each process runs its own receivers (`all_reduce` with MIN). `buckets` are read to their end
    whatever happens: they may be a collective export.

    Raises:
        ValueError: a receiver refused the weights, here or on another process.
        RuntimeError: a receiver failed or did not respond. It gets no further calls and has to be ended: its
            weights are unknown. In both cases every other receiver has its old weights and is sampling.
    """
    group = _Group(receivers, manifest.version, timeout)
    committed = False
    try:
        await _together(_stage(group, manifest, buckets), all_reduce_ok)
        await _together(_commit(group, pause), all_reduce_ok)
        committed = True
    finally:
        if not committed:
            await group.tell_living(lambda receiver: receiver.abort())
        await group.tell_living(lambda receiver: receiver.resume())
    return TransferTimes(group.staged_s, time.perf_counter() - group.held_since)


@renamed_arguments(agree="all_reduce_ok", borrower="sampler", lent="weights")
async def share_weights(
    sampler: SharingSampler, version: int, weights: Any, *, all_reduce_ok: AllReduceOk | None = None
) -> TransferTimes:
    """Make the present values of the trainer's tensors `version` in a sampler that shares them; return its pause.

    Nothing is copied. `weights` are the trainer's (`rollout.native.sharing.TrainerWeights`); `all_reduce_ok` as in
    `transfer_weights`: each process has a sampler beside its own trainer, and all of them go on or none does.

    Raises:
        ValueError: the weights can't be taken here or on another process. Values that the trainer has changed have no
            version then, and the sampler refuses to sample until a weight sync succeeds.
    """
    committed, start = False, time.perf_counter()
    try:
        await _together(sampler.propose(version, weights), all_reduce_ok, SHARED)
        await _together(sampler.commit(version), all_reduce_ok, SHARED)
        committed = True
    finally:
        if not committed:
            await sampler.abort()
        await sampler.resume()
    return TransferTimes(0.0, time.perf_counter() - start)


class _Group:
    """The receivers, and those of them that failed."""

    def __init__(self, receivers: Sequence[Receiver], version: int, timeout: float) -> None:
        self.receivers = receivers
        self.version = version
        self.staged_s = self.held_since = 0.0
        self._timeout = timeout
        self._lost: set[int] = set()

    async def ask(self, call: Callable[[Receiver], Awaitable[object]]) -> list[object]:
        """Call all receivers side by side and return their results; raise when any failed, after all have ended."""
        answers = await self._answers(call)
        failures = {i: a for i, a in enumerate(answers) if isinstance(a, BaseException)}
        self._lost |= {i for i, error in failures.items() if not isinstance(error, ValueError)}
        for i, error in failures.items():
            kinds = (NotFiniteError, ValueError, RuntimeError)
            kind = next((kind for kind in kinds if isinstance(error, kind)), RuntimeError)
            text = str(error) or type(error).__name__
            where = f"receiver {i} of {len(self.receivers)}: " if len(self.receivers) > 1 else ""
            raise kind(f"weights {self.version} are not taken, the old ones stay: {where}{text}") from error
        return answers

    async def stage(self, call: Callable[[Receiver], Awaitable[object]]) -> list[object]:
        """Call all receivers as `ask` does, and count the seconds."""
        start = time.perf_counter()
        answers = await self.ask(call)
        self.staged_s += time.perf_counter() - start
        return answers

    async def tell_living(self, call: Callable[[Receiver], Awaitable[object]]) -> None:
        """Call those that have not failed, all of them; those that fail now are lost."""
        answers = await self._answers(call)
        self._lost |= {i for i, answer in enumerate(answers) if isinstance(answer, BaseException)}

    async def _answers(self, call: Callable[[Receiver], Awaitable[object]]) -> list[object]:
        async def one(i: int, receiver: Receiver) -> object:
            return None if i in self._lost else await asyncio.wait_for(call(receiver), self._timeout)

        jobs = (one(i, receiver) for i, receiver in enumerate(self.receivers))
        return list(await asyncio.gather(*jobs, return_exceptions=True))


async def _stage(group: _Group, manifest: Manifest, buckets: Iterable[Bucket]) -> None:
    stream = iter(buckets)
    try:
        await group.stage(lambda receiver: receiver.prepare(manifest))
        missing: list[object] = []
        for bucket in stream:
            missing = await group.stage(lambda receiver, bucket=bucket: receiver.receive(bucket))  # type: ignore[misc]
        for i, count in enumerate(missing or [None]):
            if count != 0:
                raise ValueError(
                    f"weights {manifest.version} are not taken, the old ones stay: the stream ended while receiver {i} "
                    f"still lacked {'everything' if count is None else f'{count} elements'}"
                )
    finally:
        deque(stream, maxlen=0)


async def _commit(group: _Group, pause: Literal["finish", "abort"] | None) -> None:
    if pause is not None:
        await group.ask(lambda receiver: receiver.pause(pause))
    group.held_since = time.perf_counter()
    await group.ask(lambda receiver: receiver.commit(group.version))


COPIED = "the new weights are not taken, the old ones stay: another process could not take them"
SHARED = "the new weights, in the trainer's memory, are of no version: another process could not take its own"


async def _together(work: Awaitable[None], all_reduce_ok: AllReduceOk | None, otherwise: str = COPIED) -> None:
    """Await this process's part; raise if it failed, here or on another process."""
    mine, everyone = False, True
    try:
        await work
        mine = True
    finally:
        if all_reduce_ok is not None:
            everyone = all_reduce_ok(mine)
    if not everyone:
        raise WeightVoteFailed(otherwise)
