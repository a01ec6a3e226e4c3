"""A weight sync shard to shard between real processes: the bits of a gathered one, and no rank ever has the model."""

import asyncio
import multiprocessing
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engines import EngineConfig, build_engine
from engines.proofs.forked_ranks import launch_forked
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT
from rollout.native.engine import NativeEngine
from rollout.sync.manifest import Manifest
from rollout.sync.transfer import transfer_weights
from rollout.workers.authentication import SECRET, AuthenticationError, make_secret, run_secret
from rollout.workers.collective import BrokenGroup, Rendezvous, RendezvousStore, join
from rollout.workers.shard_exchange import TRAILER_BYTES, ShardExchange, ShardGroup, describe, plan_of
from schedules.protocols import WeightExport
from schedules.runtime.interrupts import Runner
from schedules.sampling.remote_sampler import RemoteSampler
from schedules.weights import weight_sync

BUCKET = 4096
OPTIONS: dict[str, dict[str, Any]] = {
    "fsdp2": {"weights": "sharded"},
    "replicated": {"weights": "replicated", "dtype": "bfloat16"},
    "hybrid": {"weights": "sharded", "shard_ranks": 2},
    "megatron": {"backend": "megatron", "tensor_parallel": 2},
    "megatron stages": {"backend": "megatron", "tensor_parallel": 2, "pipeline_parallel": 2},
}


class PeakBytes(TorchDispatchMode):
    """Largest number of bytes of new memory that is alive at once, as torch's operations make it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and one.untyped_storage()._cdata not in given:
                storage = one.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._made = {key: pair for key, pair in self._made.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._made.values()))
        return result


class Exporting:
    """A trainer of which a weight sync needs its export alone."""

    def __init__(self, engine: Any, shards: bool) -> None:
        self.engine, self.shards = engine, shards

    def export_weights(self, module_names: bool) -> WeightExport:
        pieces = self.engine.export_weights(live=module_names)
        return WeightExport(pieces, shards=self.engine.export_shards(live=module_names) if self.shards else None)


def small(kind: str) -> Any:
    return tiny_model(kind, scale=2.0, num_hidden_layers=2)


def trained(kind: str, options: dict[str, Any]) -> Any:
    engine = build_engine(EngineConfig(device="cpu", lr=0.1, max_tokens_per_rank=20, **options), small(kind))
    engine.train_batch(tiny_batch([7, 12, 5, 3]), SFT())
    return engine


def beside_each_rank(kind: str, options: dict[str, Any], every: int) -> list[Any]:
    """What samplers of every so manieth rank have after either sync, and the others' most memory by shards."""
    weight_sync.BUCKET_BYTES = weight_sync.SHARD_BYTES = BUCKET
    engine = trained(kind, options)
    found: list[Any] = []
    for shards in (False, True):
        own = dist.get_rank() % every == 0
        model = small(kind)
        sampler: Any = NativeEngine(model) if own else RemoteSampler(0)
        meter = PeakBytes()
        with Runner() as runner, meter:
            result = weight_sync.sync_weights(Exporting(engine, shards), sampler, 1, runner, module_names=True)  # type: ignore[arg-type]
        assert sampler.version == 1
        found.append((model.state_dict() if own else None, result.nbytes, meter.peak))
    whole = sum(t.numel() * t.element_size() for t in small(kind).state_dict().values())
    told = (dist.get_world_size() + 2) * len(describe(engine.export_shards(live=True), wants=False))
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (found, 6 * BUCKET + told, whole))
    return answers


CASES = [("fsdp2", "dense", 2, 1), ("replicated", "dense", 2, 2), ("megatron", "moe", 2, 1)]
CASES += [("hybrid", "moe", 4, 2), ("megatron stages", "dense", 4, 4)]


@pytest.mark.parametrize(("options", "kind", "ranks", "every"), CASES)
def test_samplers_have_the_bits_of_a_gathered_sync(
    options: str, kind: str, ranks: int, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, secrets.token_hex(32))
    answers = launch_forked(beside_each_rank, (kind, OPTIONS[options], every), world_size=ranks, device="cpu")
    for rank, (((whole, _, _), (shards, nbytes, peak)), most, size) in enumerate(answers):
        if rank % every:
            assert shards is None
            assert nbytes == 0
            assert 0 < peak < most < size, "a rank needs some buckets, and what ranks tell of themselves"
            continue
        assert whole.keys() == shards.keys()
        untrained = small(kind).state_dict()
        assert any(not torch.equal(shards[name], untrained[name]) for name in shards)
        for name, value in whole.items():
            assert torch.equal(value, shards[name]), name


def trainer(rank: int, path: str, pipes: list[Any], secret: str) -> None:
    """One of two ranks that train; the first invites two samplers."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    engine = trained("dense", OPTIONS["fsdp2"])
    told: list[Any] = [None]
    if rank == 0:
        store = RendezvousStore("gloo", 3, seconds=60)
        told = [store.rendezvous.message()]
        for pipe in pipes[2:]:
            pipe.send(told[0])
    dist.broadcast_object_list(told, src=0)
    known = secret.encode()
    try:
        end = store.join(secret=known) if rank == 0 else join(Rendezvous.read(told[0]), 1, secret=known)
    except (AuthenticationError, BrokenGroup) as error:
        pipes[rank].send(str(error))
        return
    group = ShardGroup(end.process_group, torch.device("cpu"), 60)
    held = list(engine.export_shards(live=True))
    plan = plan_of(group, describe(held, wants=False), BUCKET)
    with PeakBytes() as meter:
        assert not list(ShardExchange(plan, group, held, end.key).buckets())
    whole = {part.name: part.flat.numpy().copy() for part in engine.export_weights(max_bytes=2**40, live=True)}
    pipes[rank].send((plan.bytes_of(rank), meter.peak, whole))
    end.abort()


def sampler(rank: int, pipe: Any, secret: str) -> None:
    """One of two samplers, as ranks 2 and 3 of the group."""
    message = pipe.recv()
    try:
        end = join(Rendezvous.read(message), rank, secret=secret.encode())
    except (AuthenticationError, BrokenGroup) as error:
        pipe.send(str(error))
        return
    group = ShardGroup(end.process_group, torch.device("cpu"), 60)
    plan = plan_of(group, describe((), wants=True), BUCKET)
    model = small("dense")
    stream = ShardExchange(plan, group, (), end.key).buckets()
    asyncio.run(transfer_weights([NativeEngine(model)], Manifest(1), stream))
    pipe.send({name: value.detach().numpy() for name, value in model.named_parameters()})
    end.abort()


def four(path: Path, secrets_of: Sequence[str]) -> list[Any]:
    """What two trainers and two samplers answer, each a process of its own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rollout.native.engine", "engines.tiny", "torch.distributed"])
    here, there = zip(*(context.Pipe() for _ in range(4)), strict=True)
    ends = [list(there[:2]) + list(here[2:]) if rank == 0 else list(there) for rank in range(2)]
    jobs = [context.Process(target=trainer, args=(r, str(path), ends[r], secrets_of[r]), daemon=True) for r in (0, 1)]
    jobs += [context.Process(target=sampler, args=(r, there[r], secrets_of[r]), daemon=True) for r in (2, 3)]
    for process in jobs:
        process.start()
    try:
        assert all(pipe.poll(240) for pipe in here)
        return [pipe.recv() for pipe in here]
    finally:
        for process in jobs:
            process.kill()
            process.join()


def test_two_trainers_send_to_two_samplers_what_an_export_gathers(tmp_path: Path) -> None:
    """Each trainer sends what it holds, once to each sampler, from a few buckets of memory."""
    *trainers, one, other = four(tmp_path / "store", [secrets.token_hex(32)] * 4)
    whole = trainers[0][2]
    for found in (one, other):
        assert found.keys() <= whole.keys()
        for name, value in found.items():
            assert (value.reshape(-1).view("int32") == whole[name].view("int32")).all(), name
    size = sum(value.nbytes for value in whole.values())
    assert sum(sent for (sent, _), _, _ in trainers) == pytest.approx(2 * size, rel=0.05)
    for (sent, taken), peak, _ in trainers:
        assert sent == pytest.approx(size, rel=0.15)
        assert taken == 0
        assert 0 < peak <= 4 * (BUCKET + TRAILER_BYTES) < size / 3, "of its own memory a trainer needs buckets"


@pytest.mark.parametrize("stranger", [1, 3])
def test_a_process_that_does_not_know_the_secret_gets_and_gives_nothing(stranger: int, tmp_path: Path) -> None:
    made = secrets.token_hex(32)
    answers = four(tmp_path / "store", [made if rank != stranger else secrets.token_hex(32) for rank in range(4)])
    assert all(isinstance(answer, str) for answer in answers), "weights passed"
    told = f"process {stranger} of 4 does not know the run's secret"
    assert sum(told in answer for answer in answers) >= 1


def test_a_run_without_a_secret_says_how_to_make_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    with pytest.raises(ValueError, match=f"set {SECRET} to the same random text"):
        run_secret()
    make_secret()
    assert run_secret()
    monkeypatch.delenv(SECRET)
