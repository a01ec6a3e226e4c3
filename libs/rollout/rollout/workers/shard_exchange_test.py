"""Shards of two senders to two receivers, over gloo groups in threads: every bit, in bounds, nothing that is odd."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.sync.boxes import Box
from rollout.sync.manifest import Manifest
from rollout.sync.staging import WeightStaging
from rollout.workers.authentication import AuthenticationError
from rollout.workers.bucket_messages import bucket_from, bucket_message
from rollout.workers.collective import RendezvousStore, WeightGroup, join
from rollout.workers.shard_exchange import ShardExchange, ShardGroup, describe, plan_of

MOST = 256


@dataclass(frozen=True)
class Held:
    """Rows or columns of a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    box: Box
    values: Tensor

    def read(self, part: Box) -> Tensor:
        return self.values[part.within(self.box).index]


def tensors(seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(37, 5, generator=rng),
        "columns": torch.randn(6, 10, generator=rng).bfloat16(),
        "both": torch.randn(3, generator=rng),
        "scalar": torch.randn((), generator=rng),
    }


def held_by(rank: int, whole: dict[str, Tensor]) -> list[Held]:
    boxes = {
        "rows": [Box((0, 0), (20, 5)), Box((20, 0), (17, 5))],
        "columns": [Box((0, 0), (6, 7)), Box((0, 7), (6, 3))],
        "both": [Box((0,), (3,))] * 2,
        "scalar": [Box((), ())] * 2,
    }
    made = []
    for name, tensor in whole.items():
        box = boxes[name][rank]  # held in float32, sent in the tensor's own type
        made.append(Held(name, tuple(tensor.shape), tensor.dtype, box, tensor[box.index].float()))
    return made


def groups(count: int, secrets: list[bytes] | None = None) -> list[WeightGroup]:
    given = secrets or [b"secret"] * count
    store = RendezvousStore("gloo", count - 1, seconds=20)
    with ThreadPoolExecutor(count) as pool:
        ends = [pool.submit(store.join, None, given[0])]
        ends += [pool.submit(join, store.rendezvous, rank, secret=given[rank]) for rank in range(1, count)]
        return [end.result(60) for end in ends]


def run(ends: list[WeightGroup], change: Callable[[int, ShardGroup], None] = lambda rank, group: None) -> list[Any]:
    """What each of four has at the end: the receivers their weights, or the error."""

    def one(rank: int) -> Any:
        group = ShardGroup(ends[rank].process_group, torch.device("cpu"), 20)
        held = held_by(rank, tensors(1)) if rank < 2 else []
        plan = plan_of(group, describe(held, wants=rank >= 2), MOST)
        change(rank, group)
        targets = tensors(0)
        staging = WeightStaging(targets)
        staging.prepare(Manifest(1))
        problem: ValueError | None = None
        missing = -1
        try:
            for bucket in ShardExchange(plan, group, held, ends[rank].key).buckets():
                assert bucket.buffer.numel() <= MOST
                message = bucket_message(bucket, bucket.buffer)  # as a pool of samplers gets it
                missing = staging.receive(bucket_from(message, bucket.buffer.clone()).pieces())
        except ValueError as error:
            problem = error
        if rank >= 2 and problem is None:
            assert missing == 0
            staging.commit(1)
        return problem or targets

    with ThreadPoolExecutor(len(ends)) as pool:
        return list(pool.map(one, range(len(ends))))


def test_receivers_have_every_bit_of_two_senders_shards() -> None:
    ends = groups(4)
    for found in run(ends)[2:]:
        assert not isinstance(found, BaseException), found
        for name, value in tensors(1).items():
            assert torch.equal(found[name], value), name
            assert found[name].dtype == value.dtype


def flip(group: ShardGroup) -> None:
    """Let one bit of each bucket change on its way."""
    take = group.take

    def damaged(data: Tensor, source: int) -> Callable[[], None]:
        wait = take(data, source)

        def both() -> None:
            wait()
            data[0] ^= 1

        return both

    group.take = damaged  # type: ignore[method-assign]


def test_a_damaged_bucket_is_refused_by_its_receiver_alone_and_nobody_hangs() -> None:
    found = run(groups(4), lambda rank, group: flip(group) if rank == 3 else None)
    assert "came damaged: its digest differs" in str(found[3])
    assert all(isinstance(one, dict) for one in found[:3])
    assert torch.equal(found[2]["rows"], tensors(1)["rows"])


def test_buckets_of_another_meeting_are_refused() -> None:
    """Its key is another one: what was recorded there fits nothing here."""
    ends = groups(4)
    ends[1].key = groups(2)[0].key
    found = run(ends)
    for receiver in found[2:]:
        assert "the bucket of process 1 in round" in str(receiver)
        assert "not from a process that knows the run's secret" in str(receiver)


@pytest.mark.parametrize("stranger", [0, 2])
def test_a_process_with_a_wrong_secret_does_not_join(stranger: int) -> None:
    with pytest.raises(AuthenticationError, match="does not know the run's secret"):
        groups(3, [b"secret" if rank != stranger else b"another" for rank in range(3)])


def test_processes_that_contradict_each_other_are_told() -> None:
    ends = groups(2)

    def one(rank: int) -> str:
        group = ShardGroup(ends[rank].process_group, torch.device("cpu"), 20)
        shape = (4, 2 + rank)
        held = [Held("w", shape, torch.float32, Box.whole(shape), torch.zeros(shape))]
        with pytest.raises(ValueError, match="process 1 has TensorSpec") as error:
            plan_of(group, describe(held, wants=False), MOST)
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(one, range(2)))) == 1
