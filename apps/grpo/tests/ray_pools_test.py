"""A pool of samplers apart from training, on a real Ray cluster of three nodes on this machine.

By hand: `bazel test //apps/grpo:tests/ray_pools_test`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from apps.common.cluster import RolloutLayout
from apps.grpo.main import run
from apps.grpo.testing.ray import SCHEDULES, apart, in_ray
from apps.grpo.testing.recipe import RECIPE
from apps.grpo.testing.schedules import ASYNC, SYNC, rows, same_weights, small
from rollout.workers.ray_local import connect, local_nodes
from rollout.workers.ray_pool import RayPool
from schedules.config import ScheduleConfig

SHORT: dict[str, Any] = {"steps": 2, "save_every": 2, "eval_every": 2}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """The head, where runs train, has room for all; two more nodes have room for one sampler each."""
    with local_nodes([4, 1, 1]) as address:
        connect(address)
        yield
        ray.shutdown()


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The nodes of each pool that a run opens, once it is closed."""
    found, plain = [], RayPool.close

    def close(self: RayPool) -> None:
        found.append(self.nodes)
        plain(self)

    monkeypatch.setattr(RayPool, "close", close)
    return found


@SCHEDULES
def test_samplers_are_on_nodes_of_their_own_in_every_schedule(
    tmp_path: Path, places: list[Any], schedule: ScheduleConfig
) -> None:
    """One on each; in turn the weights are those of a run without Ray."""
    run(apart(tmp_path / "ray", schedule, 2, 2, **SHORT), RECIPE)
    own = ray.get_runtime_context().get_node_id()
    assert len(places) == 1
    assert own not in places[0]
    assert len(set(places[0])) == 2
    assert [row["weights/version"] for row in rows(tmp_path / "ray")[1:]] == [1, 2]
    if schedule is SYNC:
        run(small(tmp_path / "plain", schedule, **SHORT), RECIPE)
        assert same_weights(tmp_path / "plain", tmp_path / "ray")


def test_what_shares_trainings_node_may_be_on_it(tmp_path: Path, places: list[Any]) -> None:
    run(in_ray(tmp_path, SYNC, RolloutLayout(ray_workers=2, ray_cpus=2.0), **SHORT), RECIPE)
    assert set(places[0]) == {ray.get_runtime_context().get_node_id()}  # nobody else has two processors


@pytest.mark.parametrize(
    ("nodes", "workers", "problem"),
    [
        (1, 2, "apart from training's node, 2 samplers of 1 CPU each find 1 places on 1 nodes"),
        (3, 3, "a pool of 3 nodes apart from training's: the cluster has 2 besides this one"),
        (2, 1, "1 samplers can't fill 2 nodes"),
    ],
)
@pytest.mark.parametrize("schedule", [SYNC, ASYNC], ids=lambda schedule: schedule.mode)
def test_a_demand_beyond_the_other_nodes_is_refused_at_once(
    tmp_path: Path, schedule: ScheduleConfig, nodes: int, workers: int, problem: str
) -> None:
    """With its numbers, although this node had the room."""
    with pytest.raises(ValueError, match=problem):
        run(apart(tmp_path, schedule, nodes, workers), RECIPE)
    written = tmp_path / "metrics.jsonl"
    assert not written.exists() or not written.read_text()
