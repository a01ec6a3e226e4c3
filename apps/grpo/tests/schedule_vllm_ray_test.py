"""vLLM behind actors of a real Ray cluster: its weights are proven at each step, and it is replaced when it dies.

By hand, with an interpreter that has vLLM: `bazel test //apps/grpo:tests/schedule_vllm_ray_test`.
"""

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import ray

from apps.common.cluster import RolloutLayout
from apps.grpo.config import GrpoConfig
from apps.grpo.main import run
from apps.grpo.testing.images import SERVED, assert_tower_moved, image_config
from apps.grpo.testing.schedules import proofs, rows, served
from rollout.workers.ray_local import SMALL_STORE, local_ray
from rollout.workers.ray_pool import RayPool
from schedules.config import Mode, ScheduleConfig

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)
CHILD = b"vllm/server/start.py"
MARK = "TESSERA_TEST_OF"
"""In the environment of every process that comes of these tests: other runs of vLLM on this machine are not theirs."""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One node with room for two samplers, on loopback; runs find this process connected."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, str(os.getpid()))
        with local_ray(cpus=2, store_bytes=SMALL_STORE):
            yield


def in_ray(run_dir: Path, workers: int = 1, schedule: ScheduleConfig = ScheduleConfig("sync")) -> GrpoConfig:  # noqa: B008  frozen
    return served(run_dir, RolloutLayout("vllm", ray_workers=workers), schedule)


def children() -> dict[int, int]:
    """The processes of vLLM that come of these tests by number, with their parents."""
    found, mark = {}, f"{MARK}={os.getpid()}".encode()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            ours = mark in (path.parent / "environ").read_bytes().split(b"\0")
            if ours and CHILD in (path.parent / "cmdline").read_bytes():
                found[int(path.parent.name)] = parent
        except OSError:
            continue
    return found


def kill_once(monkeypatch: pytest.MonkeyPatch, name: str, which: int, whom: str) -> list[RayPool]:
    """SIGKILL at the pool's call number `which` of `name`, for an actor or its vLLM; the pools, as they begin."""
    pools, calls, plain = [], 0, RayPool._ask

    def ask(self: RayPool, index: int, asked: str, arguments: Mapping[str, Any], data: Any = None) -> Any:
        nonlocal calls
        if self not in pools:
            pools.append(self)
        calls += asked == name
        found = plain(self, index, asked, arguments, data)
        if asked == name and calls == which:
            actor = ray.get(self._actors[index].process.remote())
            victim = actor if whom == "actor" else next(pid for pid, parent in children().items() if parent == actor)
            os.kill(victim, signal.SIGKILL)
        return found

    monkeypatch.setattr(RayPool, "_ask", ask)
    return pools


def assert_proven(run_dir: Path, steps: int) -> None:
    """Each hand-over is: log-probs are the new weights' as far as bfloat16 goes, under the new version."""
    logged = rows(run_dir)[1:]
    assert [row["step"] for row in logged] == list(range(1, steps + 1))
    assert [row["weights/version"] for row in logged] == list(range(1, steps + 1))
    assert max(proofs(logged)) < 0.03
    assert min(proofs(logged, "weights/pause_ms")) > 0
    assert not children()  # none outlives its actor


def test_two_samplers_take_each_steps_weights(tmp_path: Path) -> None:
    run(in_ray(tmp_path, 2))
    assert_proven(tmp_path, 3)
    assert max(row["log_prob_difference"] for row in rows(tmp_path)[1:]) < 0.03


def test_one_step_behind_each_of_two_samplers_takes_each_steps_weights(tmp_path: Path) -> None:
    """Sampling overlaps with training: a step's answers are by the weights before its own."""
    run(in_ray(tmp_path, 2, ScheduleConfig("one_step_off")))
    assert_proven(tmp_path, 3)
    assert [row["schedule/staleness"] for row in rows(tmp_path)[1:]] == [0, 1, 1]


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_two_samplers_see_by_each_steps_tower(tmp_path: Path, mode: Mode) -> None:
    """Proven by the pictures of the step in each of them."""
    run(image_config(tmp_path, mode, ray_workers=2), SERVED)
    assert_proven(tmp_path, 3)
    assert [row["rollout/failed_episodes"] for row in rows(tmp_path)[1:]] == [0, 0, 0]
    assert_tower_moved(tmp_path)


@pytest.mark.parametrize(("name", "which", "whom"), [("commit", 2, "actor"), ("sample", 3, "vllm")])
def test_one_that_is_killed_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, which: int, whom: str
) -> None:
    pools = kill_once(monkeypatch, name, which, whom)
    run(in_ray(tmp_path))
    assert len(pools) == 2
    assert_proven(tmp_path, 3)


def test_fully_asynchronous_one_that_is_killed_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = kill_once(monkeypatch, "play", 10, "vllm")
    run(in_ray(tmp_path, schedule=ScheduleConfig("fully_async", staleness_threshold=1.0, partial_rollout=True)))
    assert len(pools) == 2
    assert_proven(tmp_path, 3)
