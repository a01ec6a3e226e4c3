"""Two ranks train beside samplers in actors of a real Ray cluster: what comes out is what comes without Ray.

By hand: `bazel test //apps/grpo:tests/ray_ranks_test`.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.common.cluster import RolloutLayout
from apps.grpo.config import GrpoConfig
from apps.grpo.main import run
from apps.grpo.testing.ray import SCHEDULES, in_ray
from apps.grpo.testing.recipe import RECIPE
from apps.grpo.testing.schedules import ASYNC, ONE, SYNC, proofs, rows, same_weights, small, weights
from rollout.workers.ray_local import SMALL_STORE, local_ray
from schedules.config import ScheduleConfig


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[str]:
    """One node with room for two samplers, on loopback; the first rank of a run connects to it."""
    with local_ray(cpus=2, store_bytes=SMALL_STORE) as address:
        yield address


def beside(address: str, run_dir: Path, schedule: ScheduleConfig, **changes: Any) -> GrpoConfig:
    """A run of two ranks beside the actors of the cluster at `address`."""
    return in_ray(run_dir, schedule, RolloutLayout(ray_workers=2, ray_address=address), nproc_per_node=2, **changes)


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    return sum((left[name] - right[name]).abs().sum().item() for name in left)


def rewards(run_dir: Path) -> list[tuple[float, int]]:
    return [(row["reward"], row["weights/version"]) for row in rows(run_dir)[1:]]


@pytest.mark.parametrize("schedule", [SYNC, ONE], ids=lambda schedule: schedule.mode)
def test_two_ranks_with_ray_end_with_the_weights_of_two_without(
    tmp_path: Path, cluster: str, schedule: ScheduleConfig
) -> None:
    """To the bit; and with those of one rank, whose sums are in another order, to rounding."""
    run(small(tmp_path / "plain", schedule, nproc_per_node=2), RECIPE)
    run(beside(cluster, tmp_path / "ray", schedule), RECIPE)
    assert rows(tmp_path / "ray")[0]["run/world_size"] == 2
    assert rewards(tmp_path / "ray") == rewards(tmp_path / "plain")
    assert same_weights(tmp_path / "plain", tmp_path / "ray")
    assert all(0 < row["weights/check/abs"] < 1e-4 for row in rows(tmp_path / "ray")[1:])
    run(small(tmp_path / "one", schedule), RECIPE)
    assert rewards(tmp_path / "ray")[0] == rewards(tmp_path / "one")[0]
    start, one, two = (weights(tmp_path / at) for at in ("one/model", "one/export", "ray/export"))
    assert distance(one, two) < 0.1 * distance(start, one)


def actors() -> list[int]:
    """The processes of samplers in actors."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_bytes().startswith(b"ray::_Sampler"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@SCHEDULES
def test_a_killed_sampler_is_replaced_on_all_ranks(tmp_path: Path, cluster: str, schedule: ScheduleConfig) -> None:
    """Every rank takes part in handing the present weights to the pool that replaces it; in turn nothing differs."""
    killed = []

    def kill() -> None:
        while not (tmp_path / "ray" / "metrics.jsonl").exists() or len(rows(tmp_path / "ray")) < 2:
            time.sleep(0.02)
        killed.append(actors()[-1])
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    run(beside(cluster, tmp_path / "ray", schedule), RECIPE)
    thread.join(10)
    assert killed
    assert [row["weights/version"] for row in rows(tmp_path / "ray")[1:]] == [1, 2, 3, 4]
    if schedule is SYNC:
        run(small(tmp_path / "plain", schedule, nproc_per_node=2), RECIPE)
        assert rewards(tmp_path / "ray") == rewards(tmp_path / "plain")
        assert same_weights(tmp_path / "plain", tmp_path / "ray")


def test_two_ranks_train_fully_asynchronously_beside_samplers_in_ray(tmp_path: Path, cluster: str) -> None:
    """Steps, hand-overs and proofs of both samplers; and the run goes on from its checkpoint."""
    run(beside(cluster, tmp_path / "ray", ASYNC, steps=2), RECIPE)
    run(beside(cluster, tmp_path / "ray", ASYNC, resume=True), RECIPE)
    logged = rows(tmp_path / "ray")
    assert logged[0]["run/world_size"] == 2
    assert [(row["step"], row.get("weights/version")) for row in logged[1:]] == [(1, 1), (2, 2), (3, 3), (4, 4)]
    assert all(row["schedule/staleness"] <= 1 for row in logged[1:])
    assert all(0 < distance < 1e-4 for distance in proofs([logged[0], logged[2], logged[4]]))


def test_a_run_that_goes_on_ends_with_the_weights_of_one_that_was_not_cut(tmp_path: Path, cluster: str) -> None:
    run(small(tmp_path / "plain", ONE, nproc_per_node=2), RECIPE)
    run(beside(cluster, tmp_path / "ray", ONE, steps=2), RECIPE)
    run(beside(cluster, tmp_path / "ray", ONE, resume=True), RECIPE)
    assert torch.equal(*(torch.tensor(rewards(tmp_path / name)[:2]) for name in ("plain", "ray")))
    assert [row["step"] for row in rows(tmp_path / "ray")] == [0, 1, 2, 3, 4]
