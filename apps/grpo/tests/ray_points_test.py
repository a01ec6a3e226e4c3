"""A run whose samplers are actors of a real Ray cluster loses one at each named point of theirs, in every schedule: the
pool is replaced, and nothing is skipped and nothing trained twice.

By hand: `bazel test //apps/grpo:tests/ray_points_test`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from apps.common.run.config_file import CONFIG_NAME
from apps.grpo.main import run
from apps.grpo.testing.kill_points import ACTOR, ended_at, kill_at_points
from apps.grpo.testing.ray import SCHEDULES, go_in_ray, in_ray
from apps.grpo.testing.recipe import RECIPE
from apps.grpo.testing.schedules import SYNC, assert_nothing_lost, rows, same_weights, small
from rollout.workers.process import WorkerDied
from rollout.workers.ray_local import SMALL_STORE, local_ray
from schedules.config import ScheduleConfig

BEGINS = "while it begins"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One node with room for two samplers, on loopback; runs find this process connected."""
    with local_ray(cpus=2, store_bytes=SMALL_STORE):
        yield


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in turn, without Ray, that nobody killed."""
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    run(small(run_dir, SYNC), RECIPE)
    return run_dir


@SCHEDULES
@pytest.mark.parametrize("point", [name for name in ACTOR if name != BEGINS])
def test_a_killed_actor_is_replaced_and_nothing_is_lost(
    tmp_path: Path, plain: Path, schedule: ScheduleConfig, point: str
) -> None:
    """In turn the weights are those of a run that nobody killed."""
    run_dir = tmp_path / "run"
    go_in_ray(in_ray(run_dir, schedule), kill_at_points(run_dir, ACTOR, point))
    assert ended_at(run_dir, point) == [point]
    assert_nothing_lost(run_dir, small(run_dir, schedule))
    assert [row["weights/version"] for row in rows(run_dir)[1:]] == [1, 2, 3, 4]
    if schedule is SYNC:
        assert same_weights(plain, run_dir)


@SCHEDULES
def test_one_that_dies_while_the_first_pool_begins_ends_the_run_which_goes_on(
    tmp_path: Path, schedule: ScheduleConfig
) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(WorkerDied):
        go_in_ray(in_ray(run_dir, schedule), kill_at_points(run_dir, ACTOR, BEGINS))
    assert ended_at(run_dir, BEGINS) == [BEGINS]
    assert (run_dir / CONFIG_NAME).is_file()  # from which it goes on
    go_in_ray(in_ray(run_dir, schedule))
    assert_nothing_lost(run_dir, small(run_dir, schedule))


@SCHEDULES
def test_one_that_dies_while_the_next_pool_begins_is_replaced_too(tmp_path: Path, schedule: ScheduleConfig) -> None:
    """An actor is lost amid generation, and of those that take over one before it has begun."""
    run_dir = tmp_path / "run"
    points = ["amid generation", BEGINS]
    go_in_ray(in_ray(run_dir, schedule), kill_at_points(run_dir, ACTOR, *points))
    assert ended_at(run_dir, *points) == points
    assert_nothing_lost(run_dir, small(run_dir, schedule))
