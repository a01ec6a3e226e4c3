"""One decision over many receivers: the new weights are whole on every one of them, or the old ones stay.

1. `prepare(manifest)` on all; a refusal ends it here.
2. Every bucket to all of them, while they go on sampling. A receiver has verified the whole when nothing lacks.
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


class Receiver(Protocol):
    """What is used of a rollout engine (`rollout.engine.RolloutEngine`)."""

    async def prepare(self, manifest: Manifest) -> None:
        """Begin a transfer, or raise ValueError."""
        ...

    async def receive(self, bucket: Bucket) -> int:
        """Stage a bucket; the number of elements that still lack."""
        ...

    async def commit(self, version: int) -> None:
        """Use the staged weights; the old ones are kept for `abort`, until `resume`."""
        ...

    async def abort(self) -> None:
        """Drop what is staged, or bring the old weights back."""
        ...

    async def pause(self, mode: Literal["finish", "abort"] = "finish") -> None:
        """Hold sampling."""
        ...

    async def resume(self) -> None:
        """Go on sampling; old weights that were kept are let go."""
        ...


class Borrower(Protocol):
    """What is used of a sampler that computes with the trainer's own tensors (`rollout.native.sharing`)."""

    async def offer(self, version: int, lent: Any) -> None:
        """Look through new weights, or raise ValueError; nothing changes."""
        ...

    async def commit(self, version: int) -> None:
        """Let what was offered be this version."""
        ...

    async def abort(self) -> None:
        """Drop the offer; after a commit nothing is sampled before the next one."""
        ...

    async def resume(self) -> None:
        """Go on sampling."""
        ...


AllReduceOk = Callable[[bool], bool]


@dataclass(frozen=True)
class TransferTimes:
    """Seconds that a transfer took its receivers; what its sender made the weights in is in neither."""

    staged_s: float
    """Receiving, while they went on sampling."""
    paused_s: float
    """From when they held sampling until they went on; of a swap under way, from its begin."""


class WeightVoteFailed(ValueError):  # noqa: N818  what happened, in the words of a log
    """This process could take the weights, and another one could not."""


async def transfer_weights(
    receivers: Sequence[Receiver],
    manifest: Manifest,
    buckets: Iterable[Bucket],
    *,
    pause: Literal["finish", "abort"] | None = "finish",
    timeout: float = 600.0,
    all_reduce_ok: AllReduceOk | None = None,
) -> TransferTimes:
    """Give the weights of `manifest` to all receivers, or to none; how long it took them.

    `pause` is how sampling is held while the receivers swap; None swaps under way, one receiver after the other.
    `timeout` bounds each call to a receiver, in seconds. `all_reduce_ok(ok)` is collective and says whether all
    processes are ok, where each process runs its own receivers (`all_reduce` with MIN). `buckets` are read to their end
    whatever happens: they may be a collective export.

    Raises:
        ValueError: a receiver refused the weights, here or on another process.
        RuntimeError: a receiver failed or did not answer. It is told nothing more and is to be ended: nobody knows
            which weights it has. In both cases every other receiver has its old weights and is sampling.
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


async def share_weights(
    borrower: Borrower, version: int, lent: Any, *, all_reduce_ok: AllReduceOk | None = None
) -> TransferTimes:
    """Let a sampler that computes with the trainer's tensors go on with their present values, as `version`; how long
    it was held for that.

    Nothing is copied. `lent` is what the trainer lends now (`rollout.native.sharing.Lent`); `all_reduce_ok` as in
    `transfer_weights`: each process has a sampler beside its own trainer, and all of them go on or none does.

    Raises:
        ValueError: the weights can't be taken here or on another process. Values that the trainer has changed are of no
            version then, and the sampler refuses to sample until a hand-over succeeds.
    """
    committed, begun = False, time.perf_counter()
    try:
        await _together(borrower.offer(version, lent), all_reduce_ok, SHARED)
        await _together(borrower.commit(version), all_reduce_ok, SHARED)
        committed = True
    finally:
        if not committed:
            await borrower.abort()
        await borrower.resume()
    return TransferTimes(0.0, time.perf_counter() - begun)


class _Group:
    """The receivers, and those of them that no longer answer."""

    def __init__(self, receivers: Sequence[Receiver], version: int, timeout: float) -> None:
        self.receivers = receivers
        self.version = version
        self.staged_s = self.held_since = 0.0
        self._timeout = timeout
        self._lost: set[int] = set()

    async def ask(self, call: Callable[[Receiver], Awaitable[object]]) -> list[object]:
        """Return the answers of all, side by side; raises when any failed, after all have answered."""
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
        """Return `ask`, and count the seconds."""
        begun = time.perf_counter()
        answers = await self.ask(call)
        self.staged_s += time.perf_counter() - begun
        return answers

    async def tell_living(self, call: Callable[[Receiver], Awaitable[object]]) -> None:
        """Tell those that have not failed; one that fails now is lost, and the rest are told all the same."""
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
    """Do this process's part; raise if it failed, here or on another process."""
    mine, everyone = False, True
    try:
        await work
        mine = True
    finally:
        if all_reduce_ok is not None:
            everyone = all_reduce_ok(mine)
    if not everyone:
        raise WeightVoteFailed(otherwise)
