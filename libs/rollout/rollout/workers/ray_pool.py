"""Samplers in Ray actors, on any machine of a cluster, with the interface of one `WorkerProcess`.

1. A placement group holds a bundle a sampler. What the cluster could never hold is refused before Ray is called, which
   would silently wait for ever; what it could hold and others have is refused after `patience` seconds.
2. A call goes to the sampler with the fewest open calls; weights go to all of them, in two phases, so that all have the
   new ones or all keep the old (`rollout.sync.transfer_weights`). A bucket is put into Ray's object store once, or is
   broadcast once in a process group of the pool's own (`transport`, `rollout.workers.collective`).
3. When one sampler dies the pool counts as dead: waiting calls raise `WorkerDied`, or `NodeLost` where its machine is
   gone. The owner of the pool closes it and starts another; what was being sampled begins again. So it does where a
   broadcast does not reach all of them in time.

Actors return JSON and bytes. Ray itself pickles between its processes: all of a cluster must be trusted.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Literal, TypeVar, get_args

from rollout.extras import missing_extra_message

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
from rollout.workers.collective import SECONDS
from rollout.workers.collective_pool import PoolBroadcast
from rollout.workers.placement import Demand, NoCapacity, nodes_apart, refusal
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
        apart: on so many nodes that are not this process's; None: on any, this one's too.
        environment: environment variables of the actors.
        transport: what buckets of weights pass through: Ray's object store, or a process group of this process and the
            samplers, with gloo through host memory or with NCCL between CUDA devices that each has to itself.
        seconds: that one bucket may take through a process group, or the making of the group.

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
        environment: Mapping[str, str] | None = None,
        transport: Transport = "objects",
        seconds: float = SECONDS,
    ) -> None:
        if transport not in get_args(Transport):
            raise ValueError(f"transport must be one of {', '.join(get_args(Transport))}, got {transport!r}")
        self._broadcast = (
            None if transport == "objects" else PoolBroadcast(transport, self._ask, demand.workers, seconds)
        )
        self.through_host = transport != "nccl"
        self._group = _placed(demand, strategy, patience, apart)
        self._places: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        self._lock = threading.Lock()
        self._dead = False
        self.why: BaseException | None = None
        self._waiting: set[Future[Message]] = set()
        kind = ray.remote(_Sampler)
        self._actors = [
            kind.options(
                num_cpus=demand.cpus,
                num_gpus=demand.gpus,
                resources=dict(demand.resources) or None,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
                runtime_env={"env_vars": dict(environment)} if environment else None,
            ).remote(target, args)
            for index in range(demand.workers)
        ]
        self._busy = [0] * demand.workers
        self._nodes: list[str | None] = [None] * demand.workers
        self.ready: Future[Message] = Future()
        self._lacking = demand.workers
        for index, actor in enumerate(self._actors):
            actor.node.remote().future().add_done_callback(lambda node, index=index: self._on_started(index, node))
        threading.Thread(target=self._watch_nodes, daemon=True).start()

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
            index = min(range(len(self._busy)), key=self._busy.__getitem__)
        return self._ask(index, name, arguments)

    def call_all(self, name: str, **arguments: Any) -> "list[Future[Message]]":
        """Call every sampler, in order."""
        return [self._ask(index, name, arguments) for index in range(len(self._actors))]

    async def ask_all(self, name: str, data: Any = None, **arguments: Any) -> list[Any]:
        """Call every sampler and wait for all results; what one raises is raised once all have ended."""
        calls = [asyncio.wrap_future(self._ask(i, name, arguments, data)) for i in range(len(self._actors))]
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
        if self._broadcast is not None:
            return await self._in_group(self._broadcast.send(bucket))
        data = plain_bytes(bucket)
        answers = await self.ask_all("receive", ray.put(data.numpy()), **bucket_message(bucket, data))
        return max(int(answer["missing"]) for answer in answers)

    async def commit(self, version: int) -> None:
        """Swap the staged weights in."""
        await self.ask_all("commit", version=version)

    async def abort(self) -> None:
        """Drop what is staged, or restore the old weights."""
        await self.ask_all("abort")

    async def pause(self, mode: Literal["finish", "abort"] = "finish") -> None:
        """Pause sampling."""
        await self.ask_all("pause", mode=mode)

    async def resume(self) -> None:
        """Resume sampling."""
        await self.ask_all("resume")

    def close(self) -> None:
        """End the actors and free their resources; what they still sample is lost."""
        self._mark_dead(WorkerDied("the pool of samplers was closed"))
        if self._broadcast is not None:
            self._broadcast.close()
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        remove_placement_group(self._group)

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

    def _watch_nodes(self) -> None:
        """Check the nodes until all samplers have begun: Ray waits silently for a node that goes before."""
        while not self.ready.done() and not self._dead and ray.is_initialized():
            living = _living_nodes()
            for index, node in self._places.items():
                if node not in living:
                    self._mark_dead(_lost(index, node))
                    settle_error(self.ready, _lost(index, node))
            time.sleep(LOOK_SECONDS)

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
        return WorkerDied(f"sampler {index} ended before it answered: {str(error).strip().splitlines()[0]}")

    def _mark_dead(self, why: WorkerDied) -> None:
        """Fail all waiting calls: a sampler is gone."""
        with self._lock:
            self._dead, self.why = True, self.why or why
            waiting, self._waiting = self._waiting, set()
        for future in waiting:
            settle_error(future, why)


def _lost(index: int, node: str) -> NodeLost:
    return NodeLost(f"sampler {index} was on node {node[:12]}, which left the Ray cluster")


def _living_nodes() -> dict[str, dict[str, float]]:
    return {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}


def _placed(demand: Demand, strategy: Strategy, patience: float, apart: int | None) -> Any:
    """Return a placement group with its resources. Raise NoCapacity, with the numbers, where there are none."""
    if not ray.is_initialized():
        raise ValueError("this process is in no Ray cluster: call ray.init first")
    while True:
        until = time.monotonic() + patience
        nodes = _living_nodes()
        where, chosen = None, frozenset(nodes)
        if apart is not None:
            chosen = frozenset(nodes_apart(demand, nodes, ray.get_runtime_context().get_node_id(), apart))
            where = [{"ray.io/node-id": f"in({','.join(sorted(chosen))})"}] * demand.workers
        elif (why := refusal(demand, list(nodes.values()))) is not None:
            raise NoCapacity(why)
        group = placement_group([demand.bundle] * demand.workers, strategy=strategy, bundle_label_selector=where)
        while not (placed := group.wait(LOOK_SECONDS)) and time.monotonic() < until and chosen <= set(_living_nodes()):
            pass
        if placed:
            return group
        remove_placement_group(group)
        if chosen <= set(_living_nodes()):  # else a node has gone meanwhile, and others are chosen
            break
    free = ", ".join(f"{ray.available_resources().get(name, 0.0):g} {name}" for name in demand.bundle)
    raise NoCapacity(
        f"{demand.workers} samplers of {demand.bundle} found no place in {patience:g} s under {strategy}: the "
        f"cluster has {free} left; end what holds the rest, or ask for fewer"
    )
