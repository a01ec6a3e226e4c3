"""Samplers on a Ray cluster, a real one of two nodes on this machine: places, calls, weights, deaths, a lost node."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Never

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group
from transformers import PreTrainedModel

from rollout.engine import Sampling
from rollout.native.engine import NativeEngine
from rollout.node_place import node_place
from rollout.sync.manifest import Manifest
from rollout.sync.pieces import Bucket, buckets
from rollout.sync.transfer import transfer_weights
from rollout.testing.listen_addresses import listen_addresses
from rollout.testing.model import tiny_model
from rollout.testing.pieces import pieces_of
from rollout.workers import ray_pool
from rollout.workers.heartbeat import HEARTBEAT
from rollout.workers.placement import Demand, NoCapacity
from rollout.workers.process import WorkerDied
from rollout.workers.ray_local import LOOPBACK, SMALL_STORE, connect, on_loopback
from rollout.workers.ray_pool import NodeLost, RayPool
from rollout.workers.serve import Handler, weight_handlers

PROMPT = [3, 5, 7]
GREEDY = Sampling(greedy=True, max_new_tokens=8)


def small(seed: int) -> PreTrainedModel:
    return tiny_model(24, layers=2, seed=seed)


def sampling(seed: int) -> dict[str, Handler]:
    """In the actor: an engine that says what it samples, and where."""
    engine = NativeEngine(small(seed))

    async def say(call: dict[str, Any]) -> dict[str, Any]:
        done = await engine.generate(call["prompt"], GREEDY)
        return {"ids": list(done.ids), "versions": list(done.policy_versions), "pid": os.getpid()}

    async def echo(call: dict[str, Any]) -> bytes:
        """Once there is a file at `after`: a test says so, and waits for no clock."""
        while not Path(call["after"]).exists():
            await asyncio.sleep(0.01)
        text: str = call["text"]
        return text.encode()

    async def place(call: dict[str, Any]) -> dict[str, Any]:
        where = node_place()
        assert where is not None
        return asdict(where)

    async def fail(call: dict[str, Any]) -> Never:
        raise ValueError(call["text"])

    async def end(call: dict[str, Any]) -> None:
        os._exit(3)

    return {**weight_handlers(engine), "say": say, "echo": echo, "place": place, "fail": fail, "end": end}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head with two processors, and a node that bears a mark."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    size = {"node_ip_address": LOOPBACK, "object_store_memory": SMALL_STORE}
    with on_loopback():
        found = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **size})
        found.far = found.add_node(num_cpus=1, resources={"far": 1}, **size)
    connect(found.address)
    yield found
    ray.shutdown()
    found.shutdown()


def pool_of(demand: Demand, **options: Any) -> RayPool:
    paths = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "OMP_NUM_THREADS": "1"}
    return RayPool(sampling, (0,), demand, environment=paths, **options)


def until(come: Callable[[], bool], seconds: float = 60) -> None:
    """Return when it has come."""
    limit = time.monotonic() + seconds
    while not come():
        assert time.monotonic() < limit, "it did not come"
        time.sleep(0.01)


def test_what_the_cluster_cannot_hold_is_refused_at_once_with_the_numbers(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match=r"4 samplers of 1 CPU each find 3 places on 2 nodes"):
        pool_of(Demand(4))
    with pytest.raises(ValueError, match=r"1 samplers of 3 CPU each find 0 places"):
        pool_of(Demand(1, cpus=3))
    with pytest.raises(ValueError, match=r"1 samplers of 1 CPU and 1 GPU each find 0 places"):
        pool_of(Demand(gpus=1))


def test_a_pool_apart_from_training_is_on_other_nodes_alone(cluster: Cluster) -> None:
    """This process is on the head, which has the most room: nobody of the pool is."""
    own = ray.get_runtime_context().get_node_id()
    pool = pool_of(Demand(2, cpus=0.5), apart=1)
    try:
        pool.ready.result(120)
        assert own not in pool.nodes
        assert len(set(pool.nodes)) == 1
    finally:
        pool.close()
    with pytest.raises(ValueError, match="apart from training's node, 2 samplers of 1 CPU each find 1 places"):
        pool_of(Demand(2), apart=1)
    with pytest.raises(ValueError, match="a pool of 2 nodes apart from training's: the cluster has 1 besides"):
        pool_of(Demand(2, cpus=0.5), apart=2)


def test_a_sampler_over_two_nodes_is_called_on_the_first_and_takes_weights_on_both(cluster: Cluster) -> None:
    pool = pool_of(Demand(1, nodes=2), strategy="STRICT_SPREAD")
    try:
        pool.ready.result(120)
        assert len({*pool.nodes}) == 2
        (called,) = [future.result(60)[0]["answer"] for future in pool.call_all("place")]
        first, further = asyncio.run(pool.ask_all("place"))
        assert called == first == further | {"node_rank": 0}
        assert (further["node_rank"], further["nnodes"], further["address"]) == (1, 2, LOOPBACK)
        asyncio.run(transfer_weights([pool], Manifest(1), buckets(pieces_of(small(5).named_parameters()), 1 << 14)))
        told = asyncio.run(pool.ask_all("say", prompt=PROMPT))
        assert [set(answer["versions"]) for answer in told] == [{1}, {1}]
    finally:
        pool.close()


def test_two_samplers_share_calls_and_take_weights_together(cluster: Cluster, tmp_path: Path) -> None:
    first, second, third, never = (str(tmp_path / name) for name in ("first", "second", "third", "never"))
    pool = pool_of(Demand(2, cpus=0.5), strategy="STRICT_SPREAD")
    try:
        pool.ready.result(120)
        assert len({*pool.nodes}) == 2
        with pytest.raises(ValueError, match=r"found no place in 0.5 s under STRICT_SPREAD"):
            pool_of(Demand(2, cpus=1), strategy="STRICT_SPREAD", patience=0.5)  # the far node has half of one left
        slow = pool.call("echo", after=first, text="late")
        said = [pool.call("say", prompt=PROMPT).result(60)[0]["answer"] for _ in range(3)]
        assert len({answer["pid"] for answer in said}) == 1  # the other one is busy
        Path(first).touch()
        assert slow.result(60) == ({}, b"late")
        with pytest.raises(ValueError, match="no such thing"):
            pool.call("fail", text="no such thing").result(60)

        new = small(5)
        stream = buckets(pieces_of(new.named_parameters()), 1 << 14)
        asyncio.run(transfer_weights([pool], Manifest(1), stream))
        expected = asyncio.run(NativeEngine(new).generate(PROMPT, GREEDY))
        asyncio.run(pool.pause())  # so that nobody answers before all are asked
        together = [pool.call("say", prompt=PROMPT) for _ in range(4)]
        assert pool._busy == [2, 2]
        asyncio.run(pool.resume())
        told = [future.result(60)[0]["answer"] for future in together]
        assert len({answer["pid"] for answer in told}) == 2
        for answer in told:
            assert (answer["ids"], set(answer["versions"])) == (list(expected.ids), {1})

        half = list(buckets(pieces_of(list(small(7).named_parameters())[:3]), 1 << 14))
        with pytest.raises(ValueError, match=r"."):
            asyncio.run(transfer_weights([pool], Manifest(2), iter(half)))
        assert pool.call("say", prompt=PROMPT).result(60)[0]["answer"]["ids"] == list(expected.ids)

        late = pool.call("echo", after=second, text="late")
        late.cancel()
        further = pool.call("echo", after=third, text="next")
        Path(second).touch()
        until(lambda: sum(pool._busy) == 1)
        Path(third).touch()
        assert further.result(60) == ({}, b"next")  # the late answer broke nothing
        assert pool._busy == [0, 0]
        pool.call("echo", after=never, text="nobody's").cancel()
        waits = pool.call("echo", after=never, text="never")
        with pytest.raises(WorkerDied, match="ended before it answered"):
            pool.call("end").result(60)
        with pytest.raises(WorkerDied):
            waits.result(60)
        assert not pool.alive
        with pytest.raises(WorkerDied):
            pool.call("echo", after=first, text="").result(1)
    finally:
        pool.close()


def test_two_samplers_on_two_nodes_take_weights_that_are_broadcast_to_them(cluster: Cluster) -> None:
    """Through gloo, in a group that the pool makes; all of it on loopback, where this cluster is."""
    pool = pool_of(Demand(2, cpus=0.5), strategy="STRICT_SPREAD", transport="gloo")
    try:
        pool.ready.result(120)
        for version in (1, 2):
            new = small(5 + version)
            stream = buckets(pieces_of(new.named_parameters()), 1 << 14)
            asyncio.run(transfer_weights([pool], Manifest(version), stream))
            expected = asyncio.run(NativeEngine(new).generate(PROMPT, GREEDY))
            for future in pool.call_all("say", prompt=PROMPT):
                answer = future.result(60)[0]["answer"]
                assert (answer["ids"], set(answer["versions"])) == (list(expected.ids), {version})
        assert set[str]().union(*listen_addresses(psutil.Process()).values()) == {LOOPBACK}
    finally:
        pool.close()


def test_a_closed_pool_speaks_to_ray_no_more(cluster: Cluster) -> None:
    """Also where a sampler does not answer: its process may be ended for speaking to it after Ray's shutdown."""
    for stopped in (False, True):
        pool = pool_of(Demand(1, cpus=0.5), stall_seconds=600.0)
        pool.ready.result(120)
        if stopped:
            os.kill(ray.get(pool._actors[0].process.remote()), signal.SIGSTOP)
        time.sleep(2 * HEARTBEAT)  # it asks again
        pool.close()
        assert not pool._watcher.is_alive()


def test_a_sampler_that_is_stopped_is_told_while_it_samples(cluster: Cluster) -> None:
    pool = pool_of(Demand(2, cpus=0.5), stall_seconds=20.0)
    try:
        pool.ready.result(120)
        os.kill(ray.get(pool._actors[1].process.remote()), signal.SIGSTOP)
        with pytest.raises(WorkerDied, match="sampler 1 said nothing for 20 s"):
            pool.call_all("echo", text="x")[1].result(120)
        assert not pool.alive
    finally:
        pool.close()


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "hanging"])
def test_a_sampler_that_breaks_the_group_ends_the_pool(cluster: Cluster, killed: bool) -> None:
    """Stopped before a bucket comes: who waits for it is told in bounded time, and the next pool takes the weights."""
    pool = pool_of(Demand(2, cpus=0.5), transport="gloo", seconds=3.0)
    new = small(9)
    try:
        pool.ready.result(120)
        asyncio.run(transfer_weights([pool], Manifest(1), buckets(pieces_of(new.named_parameters()), 1 << 14)))
        pid = ray.get(pool._actors[1].process.remote())

        def late() -> Iterator[Bucket]:
            for at, bucket in enumerate(buckets(pieces_of(new.named_parameters()), 1 << 14)):
                if at == 1:
                    os.kill(pid, signal.SIGKILL if killed else signal.SIGSTOP)
                yield bucket

        begun = time.monotonic()
        with pytest.raises(RuntimeError, match="weights 2 are not taken"):
            asyncio.run(transfer_weights([pool], Manifest(2), late()))
        assert time.monotonic() - begun < 20
        assert not pool.alive
        with pytest.raises(WorkerDied):
            pool.call("say", prompt=PROMPT).result(1)
    finally:
        pool.close()
    again = pool_of(Demand(2, cpus=0.5), transport="gloo")
    try:
        again.ready.result(120)
        asyncio.run(transfer_weights([again], Manifest(2), buckets(pieces_of(new.named_parameters()), 1 << 14)))
        assert again.alive
    finally:
        again.close()


def test_nccl_without_a_device_is_refused(cluster: Cluster) -> None:
    pool = pool_of(Demand(1, cpus=0.5), transport="nccl")
    try:
        pool.ready.result(120)
        stream = buckets(pieces_of(small(5).named_parameters()), 1 << 14)
        with pytest.raises(ValueError, match="this process sees none"):
            asyncio.run(transfer_weights([pool], Manifest(1), stream))
    finally:
        pool.close()
    with pytest.raises(ValueError, match="transport must be one of objects, gloo, nccl, got 'hccl'"):
        pool_of(Demand(1, cpus=0.5), transport="hccl")


@pytest.mark.parametrize("when", ["before its sampler is asked for", "while its sampler begins"])
def test_a_node_that_is_lost_while_the_pool_begins_is_named(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Within a bound: Ray would look for another place, which there is none, without a word."""
    node = cluster.add_node(
        num_cpus=1, resources={"near": 1}, node_ip_address=LOOPBACK, object_store_memory=SMALL_STORE
    )
    placed = ray_pool._placed

    def lose(*arguments: Any) -> Any:
        group = placed(*arguments)
        cluster.remove_node(node, allow_graceful=False)
        return group

    if when.startswith("before"):
        monkeypatch.setattr(ray_pool, "_placed", lose)
    pool = pool_of(Demand(1, cpus=0.5, resources={"near": 1}))
    try:
        if when.startswith("while"):
            cluster.remove_node(node, allow_graceful=False)
        with pytest.raises(NodeLost, match=f"was on node {node.node_id[:12]}, which left the Ray cluster"):
            pool.ready.result(90)
        assert not pool.alive
        assert isinstance(pool.why, NodeLost)
    finally:
        pool.close()
        pool.close()  # nothing is left to close


def test_a_node_that_is_lost_before_its_places_are_taken_is_not_waited_for(cluster: Cluster) -> None:
    """Those that are chosen anew are of the nodes that are left; there are none, which is said with the numbers."""
    ask = {"num_cpus": 1, "node_ip_address": LOOPBACK, "object_store_memory": SMALL_STORE}
    node = cluster.add_node(resources={"near": 1}, **ask)
    holder = placement_group([{"near": 1.0}])
    assert holder.wait(30)
    later = threading.Timer(2, lambda: cluster.remove_node(node, allow_graceful=False))
    later.start()
    with pytest.raises(NoCapacity, match=r"1 samplers of 0.5 CPU and 1 near each find 0 places"):
        pool_of(Demand(1, cpus=0.5, resources={"near": 1}), patience=120)
    later.join()
    remove_placement_group(holder)


def test_a_lost_node_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """Its machine is gone with all its processes; another pool finds its place elsewhere or is refused."""
    pool = pool_of(Demand(1, cpus=0.5, resources={"far": 1}))
    try:
        pool.ready.result(120)
        assert pool.call("say", prompt=PROMPT).result(60)[0]["answer"]["versions"] == [0] * 8
        waits = pool.call("echo", after=str(tmp_path / "never"), text="never")
        cluster.remove_node(cluster.far, allow_graceful=False)
        node = pool.nodes[0]
        assert node is not None
        with pytest.raises(NodeLost, match=f"was on node {node[:12]}, which left the Ray cluster"):
            waits.result(90)
        assert not pool.alive
    finally:
        pool.close()
    with pytest.raises(ValueError, match=r"1 samplers of 0.5 CPU and 1 far each find 0 places on 1 nodes"):
        pool_of(Demand(1, cpus=0.5, resources={"far": 1}))
