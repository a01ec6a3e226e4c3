"""Samplers in Ray actors, on any machine of a cluster, with the interface of one `WorkerProcess`.

1. A placement group holds a bundle a sampler. What the cluster could never hold is refused before Ray is called, which
   would silently wait for ever; what it could hold and others have is refused after `patience` seconds.
2. A call goes to the sampler with the fewest open calls; weights go to all of them, in two phases, so that all have the
   new ones or all keep the old (`rollout.sync.transfer_weights`). A bucket is put into Ray's object store once, or is
   broadcast once in a process group of the pool's own (`transport`, `rollout.workers.collective`), or comes from the
   ranks that have its shards (`shards`, `rollout.workers.pool_shards`).
3. When one sampler dies the pool counts as dead: waiting calls raise `WorkerDied`, or `NodeLost` where its machine is
   gone. The owner of the pool closes it and starts another; what was being sampled begins again. So it does where a
   broadcast does not reach all of them in time.

Actors return JSON and bytes. Ray itself pickles between its processes: all of a cluster must be trusted.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, TypeVar, get_args

from rollout.extras import missing_extra_message
from rollout.node_place import NodePlace, free_port

try:
    import ray
    from ray.exceptions import ActorUnavailableError, RayActorError, RayError
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ImportError(missing_extra_message("samplers on a Ray cluster need ray", "ray")) from error

from rollout.sync.manifest import Manifest
from rollout.sync.pieces import Bucket
from rollout.workers.bucket_messages import bucket_message, manifest_message, plain_bytes
from rollout.workers.channel import Message
from rollout.workers.collective import SECONDS, Backend
from rollout.workers.collective_pool import PoolBroadcast
from rollout.workers.heartbeat import HEARTBEAT
from rollout.workers.placement import Demand, NoCapacity, nodes_apart, refusal
from rollout.workers.pool_shards import PoolShards, SentShards
from rollout.workers.process import WorkerDied
from rollout.workers.serve import Handler, answer_call, settle_answer, settle_error

T = TypeVar("T")
NODE_SECONDS = 60.0
"""Seconds until a sampler that does not answer, on a node that seems to be alive, counts as dead."""
LOOK_SECONDS = 0.5
"""Seconds between two checks whether the nodes that were chosen for a pool are still there."""
Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
Transport = Literal["objects", "gloo", "nccl"]


class NodeLost(WorkerDied):
    """The machine of a sampler left the cluster before it answered."""


class _Sampler:
    """The actor: it has handlers, as a sampling process has them, and runs calls side by side."""

    def __init__(self, target: Callable[..., Mapping[str, Handler]], args: tuple[Any, ...]) -> None:
        self._handlers = target(*args)

    async def node(self) -> str:
        """Return the id of its node; the first result shows that it is there."""
        return str(ray.get_runtime_context().get_node_id())

    async def process(self) -> int:
        """Return its process number on its node."""
        return os.getpid()

    async def devices(self) -> str:
        """Return the CUDA devices that it sees, by the names that Ray gave it."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    async def call(self, call: dict[str, Any], data: Any = None) -> Message:
        """Run a call as `rollout.workers.serve` does; `data` are the bytes of a bucket."""
        return await answer_call(self._handlers, call if data is None else {**call, "data": data})


class RayPool:
    """Samplers in actors of the Ray cluster that this process is connected to (`ray.init`).

    Args:
        target: makes a sampler's handlers from `args`, in its actor.
        args: what every one of them is given.
        demand: how many, and what each needs.
        strategy: how Ray lays them out over nodes.
        patience: seconds until a place that others have counts as refused.
        apart: on so many nodes that are neither this process's nor in `training`; None: on any, this one's too.
        training: ids of further nodes that train.
        environment: environment variables of the actors.
        transport: what buckets of weights pass through: Ray's object store, or a process group of this process and the
            samplers, with gloo through host memory or with NCCL between CUDA devices that each has to itself.
        shards: what passes the shards of a trainer's ranks straight to the samplers, in a process group of them all
            (`transport` has no effect then); None where weights come from this process alone.
        seconds: that one bucket may take through a process group, or the making of the group.
        stall_seconds: the longest that a sampler may not answer when it is asked, once a second, whether it is there.

    Raises:
        ValueError: this process is in no cluster, or there is no place; the text has the numbers.
    """

    def __init__(
        self,
        target: Callable[..., Mapping[str, Handler]],
        args: tuple[Any, ...],
        demand: Demand = Demand(),  # noqa: B008  frozen
        *,
        strategy: Strategy = "PACK",
        patience: float = 30.0,
        apart: int | None = None,
        training: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        transport: Transport = "objects",
        shards: Backend | None = None,
        seconds: float = SECONDS,
        stall_seconds: float = 120.0,
    ) -> None:
        if transport not in get_args(Transport):
            raise ValueError(f"transport must be one of {', '.join(get_args(Transport))}, got {transport!r}")
        collective = None if shards or transport == "objects" else transport
        self._broadcast = collective and PoolBroadcast(collective, self._ask, demand.parts, seconds)
        self.shards = None
        if shards is not None:
            self.shards = PoolShards(shards, self._ask, self._addresses, lambda: self.alive, self._mark_dead, seconds)
        self.through_host = (shards or transport) != "nccl"
        self._group = _placed(demand, strategy, patience, apart, training)
        self._places: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        self._lock = threading.Lock()
        self._dead = False
        self.why: BaseException | None = None
        self._waiting: set[Future[Message]] = set()
        kind = ray.remote(_Sampler)
        self._heads, given = range(0, demand.parts, demand.nodes), dict(environment or {})
        self._actors = [
            kind.options(
                num_cpus=demand.bundle.get("CPU", 0),
                num_gpus=demand.bundle.get("GPU", 0),
                resources={name: amount / demand.nodes for name, amount in demand.resources.items()} or None,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
                runtime_env={"env_vars": given | own} if given or own else None,
            ).remote(target, args)
            for index, own in enumerate(_node_variables(demand, self._group, self._places, given))
        ]
        self._busy = [0] * demand.parts
        self._nodes: list[str | None] = [None] * demand.parts
        self.ready: Future[Message] = Future()
        self._lacking = demand.parts
        for index, actor in enumerate(self._actors):
            actor.node.remote().future().add_done_callback(lambda node, index=index: self._on_started(index, node))
        self._watcher = threading.Thread(target=self._watch, args=(stall_seconds,), daemon=True)
        self._watcher.start()

    @property
    def alive(self) -> bool:
        """Whether all samplers can still be called."""
        return not self._dead

    @property
    def nodes(self) -> list[str | None]:
        """Ids of the samplers' nodes; None where one is not known yet."""
        return list(self._nodes)

    def call(self, name: str, **arguments: Any) -> "Future[Message]":
        """Call the sampler with the fewest open calls; see `WorkerProcess.call`."""
        with self._lock:
            index = min(self._heads, key=self._busy.__getitem__)
        return self._ask(index, name, arguments)

    def call_all(self, name: str, **arguments: Any) -> "list[Future[Message]]":
        """Call every sampler, in order."""
        return [self._ask(index, name, arguments) for index in self._heads]

    async def _ask_heads_last(self, name: str, **arguments: Any) -> None:
        """Call the samplers once their parts on further nodes have done it: they use what those then have."""
        if further := [index for index in range(len(self._actors)) if index not in self._heads]:
            await self.ask_all(name, workers=further, **arguments)
        await self.ask_all(name, workers=self._heads, **arguments)

    async def ask_all(
        self, name: str, data: Any = None, workers: Sequence[int] | None = None, **arguments: Any
    ) -> list[Any]:
        """Call every sampler and its parts, or those `workers`; what one raises is raised once all have ended."""
        workers = range(len(self._actors)) if workers is None else workers
        calls = [asyncio.wrap_future(self._ask(i, name, arguments, data)) for i in workers]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for one in results:
            if isinstance(one, BaseException):
                raise one
        return [head.get("answer") for head, _ in results]  # type: ignore[misc]

    async def prepare(self, manifest: Manifest) -> None:
        """Begin a weight sync; the pool's process group, where it has one, is made with the first one."""
        if self._broadcast is not None and not self._broadcast.met:
            await self._in_group(self._broadcast.meet(*self._addresses()))
        await self.ask_all("prepare", **manifest_message(manifest))

    async def receive(self, bucket: Bucket) -> int:
        """Stage a bucket on all samplers; return the largest number of missing elements."""
        if isinstance(bucket, SentShards):
            return await bucket.missing()
        if self._broadcast is not None:
            return await self._in_group(self._broadcast.send(bucket))
        data = plain_bytes(bucket)
        answers = await self.ask_all("receive", ray.put(data.numpy()), **bucket_message(bucket, data))
        return max(int(answer["missing"]) for answer in answers)

    async def commit(self, version: int) -> None:
        """Swap the staged weights in."""
        await self._ask_heads_last("commit", version=version)

    async def abort(self) -> None:
        """Drop what is staged, or restore the old weights."""
        await self._ask_heads_last("abort")

    async def pause(self, mode: Literal["finish", "abort"] = "finish") -> None:
        """Pause sampling."""
        await self.ask_all("pause", mode=mode)

    async def resume(self) -> None:
        """Resume sampling."""
        await self.ask_all("resume")

    def close(self) -> None:
        """End the actors and free their resources; what they still sample is lost."""
        self._mark_dead(WorkerDied("the pool of samplers was closed"))
        for part in (self._broadcast, self.shards):
            if part is not None:
                part.close()
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        remove_placement_group(self._group)
        self._watcher.join(NODE_SECONDS)  # Ray ends a process that speaks to it after its shutdown

    async def _in_group(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work of the pool's process group; where that breaks, mark the pool as dead."""
        assert self._broadcast is not None
        try:
            return await work
        finally:
            if self._broadcast.broken:
                self._mark_dead(WorkerDied("the pool of samplers lost its process group"))

    def _addresses(self) -> tuple[str, list[str]]:
        """Return the addresses of this process's node and of each sampler's, by which Ray's processes reach them."""
        places = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
        gone = [index for index, node in enumerate(self._nodes) if node not in places]
        if gone:
            raise NodeLost(f"sampler {gone[0]} is on no node of the Ray cluster any more, or has not begun")
        return places[ray.get_runtime_context().get_node_id()], [places[str(node)] for node in self._nodes]

    def _ask(self, index: int, name: str, arguments: Mapping[str, Any], data: Any = None) -> "Future[Message]":
        future: Future[Message] = Future()
        with self._lock:
            if self._dead:
                future.set_exception(WorkerDied(f"a sampler of the pool ended before {name}"))
                return future
            self._busy[index] += 1
            self._waiting.add(future)
        reference = self._actors[index].call.remote({**arguments, "call": name}, data)
        reference.future().add_done_callback(lambda answer: self._answered(index, future, answer))
        return future

    def _answered(self, index: int, future: "Future[Message]", answer: "Future[Message]") -> None:
        with self._lock:
            self._busy[index] -= 1
            waited = future in self._waiting
            self._waiting.discard(future)
        if not waited:
            return
        error = answer.exception()
        if error is None:
            settle_answer(future, *answer.result())
        elif isinstance(error, RayError):
            threading.Thread(target=self._fail_call, args=(index, future, error), daemon=True).start()
        else:
            settle_error(future, error)

    def _watch(self, stall_seconds: float) -> None:
        """Check the nodes until all samplers have begun: Ray waits silently for a node that goes before. Then check the
        samplers: one that is stopped ends no call, and Ray says nothing of it."""
        while not self.ready.done() and not self._dead and ray.is_initialized():
            living = _living_nodes()
            for index, node in self._places.items():
                if node not in living:
                    self._mark_dead(_lost(index, node))
                    settle_error(self.ready, _lost(index, node))
            time.sleep(LOOK_SECONDS)
        while not self._dead and ray.is_initialized():
            asked = silent = [actor.process.remote() for actor in self._actors]
            end = time.monotonic() + stall_seconds
            while silent and not self._dead and time.monotonic() < end:
                _, silent = ray.wait(asked, num_returns=len(asked), timeout=HEARTBEAT)
            if silent and not self._dead:
                self._mark_dead(WorkerDied(f"sampler {asked.index(silent[0])} said nothing for {stall_seconds:g} s"))
            time.sleep(HEARTBEAT)

    def _on_started(self, index: int, node: "Future[str]") -> None:
        """Record that a sampler is there, or could not begin."""
        error = node.exception()
        with self._lock:
            self._lacking -= 1
            whole = not self._lacking
            if error is None:
                self._nodes[index] = node.result()
        if self.ready.done():
            return
        if error is not None:
            death = self._death(index, error)
            self._mark_dead(death)
            settle_error(self.ready, death)
        elif whole:
            for index in set(range(len(self._actors))) - set(self._heads):
                self._ask(index, "stay", {})  # answered by its end: nothing else waits for it
            settle_answer(self.ready, {}, b"")

    def _fail_call(self, index: int, future: "Future[Message]", error: RayError) -> None:
        """Fail a call with a sampler's cause of death. Ray reports a closed socket first, and a lost node later."""
        limit = time.monotonic() + NODE_SECONDS
        node = self._nodes[index]
        while isinstance(error, ActorUnavailableError) and node in _living_nodes() and time.monotonic() < limit:
            time.sleep(0.2)
        death = self._death(index, error)
        self._mark_dead(death)  # first, so that the caller finds the pool dead
        settle_error(future, death)

    def _death(self, index: int, error: BaseException) -> WorkerDied:
        """Return a sampler's cause of death: its own end, or that of its machine."""
        node = self._nodes[index] or self._places[index]
        if isinstance(error, RayActorError | ActorUnavailableError) and node not in _living_nodes():
            return _lost(index, node)
        first, *others = str(error).strip().splitlines()
        cause = f" ... {others[-1].strip()}" if others else ""  # of a creation that failed, the last line says why
        return WorkerDied(f"sampler {index} ended before it answered: {first}{cause}")

    def _mark_dead(self, why: WorkerDied) -> None:
        """Fail all waiting calls: a sampler is gone."""
        with self._lock:
            self._dead, self.why = True, self.why or why
            waiting, self._waiting = self._waiting, set()
        for future in waiting:
            settle_error(future, why)


def _node_variables(
    demand: Demand, group: Any, places: Mapping[int, str], environment: dict[str, str]
) -> list[dict[str, str]]:
    """Return the variables by which each actor knows its place among the nodes of its sampler; none on one node."""
    if demand.nodes == 1:
        return [{}] * demand.workers
    addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
    hosts = [addresses[places[index]] for index in range(demand.parts)]
    asked, variables = ray.remote(free_port), []
    for head in range(0, demand.parts, demand.nodes):
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=head)
        set_up = {"num_cpus": 0, "scheduling_strategy": where, "runtime_env": {"env_vars": environment}}
        port = ray.get(asked.options(**set_up).remote())
        own = hosts[head : head + demand.nodes]
        variables += [NodePlace(rank, demand.nodes, host, own[0], port).variables for rank, host in enumerate(own)]
    return variables


def _lost(index: int, node: str) -> NodeLost:
    return NodeLost(f"sampler {index} was on node {node[:12]}, which left the Ray cluster")


def _living_nodes() -> dict[str, dict[str, float]]:
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _placed(demand: Demand, strategy: Strategy, patience: float, apart: int | None, training: Sequence[str]) -> Any:
    """Return a placement group with its resources. Raise NoCapacity, with the numbers, where there are none."""
    if not ray.is_initialized():
        raise ValueError("this process is in no Ray cluster: call ray.init first")
    while True:
        until = time.monotonic() + patience
        nodes = _living_nodes()
        where, chosen, own = None, frozenset(nodes), ray.get_runtime_context().get_node_id()
        if apart is not None:
            chosen = frozenset(nodes_apart(demand, nodes, {own, *training}, apart))
            where = [{"ray.io/node-id": f"in({','.join(sorted(chosen))})"}] * demand.parts
        elif (why := refusal(demand, list(nodes.values()))) is not None:
            raise NoCapacity(why)
        group = placement_group([demand.bundle] * demand.parts, strategy=strategy, bundle_label_selector=where)
        while not (placed := group.wait(LOOK_SECONDS)) and time.monotonic() < until and chosen <= set(_living_nodes()):
            pass
        if placed:
            return group
        remove_placement_group(group)
        if chosen <= set(_living_nodes()):  # else a node has gone meanwhile, and others are chosen
            break
    free = ", ".join(f"{ray.available_resources().get(name, 0.0):g} {name}" for name in demand.bundle)
    raise NoCapacity(
        f"{demand.parts} samplers of {demand.bundle} found no place in {patience:g} s under {strategy}: the "
        f"cluster has {free} left; end what holds the rest, or ask for fewer"
    )
