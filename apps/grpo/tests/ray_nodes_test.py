"""A run whose samplers are on other nodes of a real Ray cluster loses one of those in mid-generation, with all of its
processes: a further node takes over, or the run stops by name and goes on when there is one.

By hand: `bazel test //apps/grpo:tests/ray_nodes_test`.
"""

import functools
import itertools
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from apps.common.run.checkpoints import last_checkpoint
from apps.grpo.main import run
from apps.grpo.testing.ray import SCHEDULES, apart, go_in_ray
from apps.grpo.testing.recipe import RECIPE
from apps.grpo.testing.schedules import ASYNC, SYNC, assert_nothing_lost, rows, same_weights, small
from rollout.native.scheduler.batch import ContinuousBatch
from rollout.workers.ray_local import LOOPBACK, SMALL_STORE, connect, on_loopback
from rollout.workers.ray_pool import RayPool
from schedules.config import ScheduleConfig

STEPS = 30
"""Decode steps of a sampler until it stands still, when the first checkpoint is there."""
STOPPED_SECONDS = 90
"""From the loss of a node to the end of the run, at most: Ray's own notice of it, and ours."""


class Nodes:
    """The head, where runs train, and the nodes that samplers are on, each with a place for one."""

    def __init__(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._size = {"node_ip_address": LOOPBACK, "object_store_memory": SMALL_STORE}
        with on_loopback():
            self.cluster = Cluster(
                initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False, **self._size}
            )
        self.lost: dict[str, float] = {}
        """When each node was lost that was."""

    def have(self, count: int) -> None:
        """Add nodes until there are so many besides the head."""
        with on_loopback():
            while len(self.cluster.worker_nodes) < count:
                self.cluster.add_node(num_cpus=1, **self._size)
            self.cluster.wait_for_nodes()

    def lose(self, name: str) -> None:
        """SIGKILL for all processes of a node, as where its machine goes."""
        node = next(node for node in self.cluster.worker_nodes if node.node_id == name)
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        self.lost[name] = time.monotonic()
        for process in [raylet, *raylet.children(recursive=True)]:
            process.kill()
        self.cluster.worker_nodes.remove(node)
        node.kill_all_processes(check_alive=False, allow_graceful=False)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    found = Nodes()
    try:
        connect(found.cluster.address)
        yield found
    finally:
        ray.shutdown()
        found.cluster.shutdown()


def stand_amid(told: Path, number: int) -> None:
    """In an actor: say so in the file, once, and stand still, amid the answers of decode step `number`."""
    real, calls = ContinuousBatch.step, itertools.count(1)

    def step(self: ContinuousBatch) -> None:
        if next(calls) == number and not told.exists():
            told.touch()
            threading.Event().wait()
        real(self)

    ContinuousBatch.step = step  # type: ignore[method-assign]


@contextmanager
def losing(nodes: Nodes, pools: list[RayPool], told: Path) -> Iterator[None]:
    """Lose the node of the last pool when its actor stands still."""

    def lose() -> None:
        while not told.exists():
            time.sleep(0.02)
        nodes.lose(first_node(pools[-1]))

    thread = threading.Thread(target=lose, daemon=True)
    thread.start()
    yield
    thread.join(10)
    assert not thread.is_alive(), "no node was lost"


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[RayPool]:
    """Those that a run opens."""
    found, plain = [], RayPool.__init__

    def init(self: RayPool, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        found.append(self)

    monkeypatch.setattr(RayPool, "__init__", init)
    return found


def first_node(pool: RayPool) -> str:
    node = pool.nodes[0]
    assert node is not None
    return node


@SCHEDULES
def test_a_further_node_takes_over(
    tmp_path: Path, nodes: Nodes, pools: list[RayPool], schedule: ScheduleConfig
) -> None:
    """What was asked for is asked for again; in turn the weights are those of a run without Ray."""
    nodes.have(2)
    run_dir, told = tmp_path / "run", tmp_path / "told"
    with losing(nodes, pools, told):
        go_in_ray(apart(run_dir, schedule, 1, 1), functools.partial(stand_amid, told, STEPS))
    assert len(pools) == 2
    assert first_node(pools[0]) in nodes.lost
    assert first_node(pools[1]) not in {*nodes.lost, ray.get_runtime_context().get_node_id()}
    assert_nothing_lost(run_dir, small(run_dir, schedule))
    assert [row["weights/version"] for row in rows(run_dir)[1:]] == [1, 2, 3, 4]
    if schedule is SYNC:
        run(small(tmp_path / "plain", schedule), RECIPE)
        assert same_weights(tmp_path / "plain", run_dir)


@pytest.mark.parametrize("call", ["prepare", "receive", "commit"])
@pytest.mark.parametrize("schedule", [SYNC, ASYNC], ids=lambda schedule: schedule.mode)
def test_a_node_that_is_lost_amid_a_hand_over_of_weights(
    tmp_path: Path,
    nodes: Nodes,
    pools: list[RayPool],
    monkeypatch: pytest.MonkeyPatch,
    schedule: ScheduleConfig,
    call: str,
) -> None:
    """One of two: the other one's weights are nobody's either, and both places are filled anew."""
    nodes.have(3)
    run_dir, calls, plain = tmp_path / "run", itertools.count(1), RayPool._ask

    def ask(self: RayPool, index: int, name: str, arguments: Mapping[str, Any], data: Any = None) -> Any:
        found = plain(self, index, name, arguments, data)
        if name == call and next(calls) == 3:
            nodes.lose(first_node(self))
        return found

    monkeypatch.setattr(RayPool, "_ask", ask)
    go_in_ray(apart(run_dir, schedule, 2, 2))
    assert len(pools) == 2
    assert len({*pools[1].nodes} - {*nodes.lost}) == 2
    assert_nothing_lost(run_dir, small(run_dir, schedule))


@SCHEDULES
def test_where_no_node_is_left_the_run_stops_by_name_and_goes_on_later(
    tmp_path: Path, nodes: Nodes, pools: list[RayPool], schedule: ScheduleConfig
) -> None:
    """Within a bound, with the node and what to do; then there is one, and the run goes on from its checkpoint."""
    nodes.have(1)
    for node in list(nodes.cluster.worker_nodes)[1:]:
        nodes.lose(node.node_id)
    run_dir, told = tmp_path / "run", tmp_path / "told"
    config = apart(run_dir, schedule, 1, 1, save_every=1)
    with losing(nodes, pools, told), pytest.raises(ValueError, match="sampler 0 was on node") as stopped:
        go_in_ray(config, functools.partial(stand_amid, told, STEPS))
    lost = first_node(pools[0])
    assert time.monotonic() - nodes.lost[lost] < STOPPED_SECONDS
    said = str(stopped.value)
    assert re.search(rf"was on node {lost[:12]}, .* add nodes to the Ray cluster, .* with --resume", said), said
    assert last_checkpoint(run_dir) is not None
    nodes.have(1)
    go_in_ray(config)
    assert_nothing_lost(run_dir, config)
