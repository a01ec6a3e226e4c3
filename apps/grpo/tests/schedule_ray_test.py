"""Samplers in actors of a real Ray cluster on this machine, in every schedule; also when one of them is killed.

By hand: `bazel test //apps/grpo:tests/schedule_ray_test`.
"""

import asyncio
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import ray

from apps.common.cluster import RolloutLayout
from apps.grpo.main import run
from apps.grpo.testing.ray import SCHEDULES, go_in_ray, in_ray
from apps.grpo.testing.recipe import RECIPE
from apps.grpo.testing.schedules import ASYNC, ONE, SYNC, assert_nothing_lost, proofs, rows, same_weights, small
from rollout import Episode
from rollout.episodes.summary import AnyEpisode
from rollout.sync.pieces import Bucket
from rollout.workers.bucket_messages import bucket_message, plain_bytes
from rollout.workers.ray_local import SMALL_STORE, local_ray
from rollout.workers.ray_pool import RayPool
from schedules.config import ScheduleConfig
from schedules.rows.shared import held_here
from schedules.sampling.session import RolloutSession
from schedules.weights.weight_checks import WeightsNotTakenError

GLOO = RolloutLayout(ray_workers=2, weight_transport="gloo")
SHORT: dict[str, Any] = {"steps": 2, "save_every": 2, "eval_every": 2}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One node with room for two samplers, on loopback; runs find this process connected."""
    with local_ray(cpus=2, store_bytes=SMALL_STORE):
        yield


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[list[Episode]]:
    """The episodes that a run trains on, as they come to the trainer."""
    found, plain = list[list[Episode]](), RolloutSession.gather

    def gather(self: RolloutSession, episodes: list[Episode]) -> list[AnyEpisode]:
        known = plain(self, episodes)
        held = held_here(known)
        if len(held) > len({episode.group for episode in held}):  # an evaluation has one answer a prompt
            found.append(held)
        return known

    monkeypatch.setattr(RolloutSession, "gather", gather)
    return found


def streams(steps: Iterable[Iterable[Episode]]) -> list[Any]:
    """Who answered what, without what depends on the clock or, in its last bits, on who else is in a forward pass."""
    return [
        [(e.task_id, e.group, e.reward, [(s.ids, s.loss_mask) for s in e.segments]) for e in step] for step in steps
    ]


def log_probs(steps: Iterable[Iterable[Episode]]) -> list[float]:
    return [x for step in steps for e in step for s in e.segments for x in s.log_probs]


@pytest.mark.parametrize("schedule", [SYNC, ONE], ids=lambda schedule: schedule.mode)
def test_a_run_is_the_same_with_ray_as_without(
    tmp_path: Path, sampled: list[list[Episode]], schedule: ScheduleConfig
) -> None:
    """Episode for episode, and the weights bit for bit."""
    run(small(tmp_path / "plain", schedule, **SHORT), RECIPE)
    plain, sampled[:] = list(sampled), []
    accuracies = [row.get("eval/score") for row in rows(tmp_path / "plain")]
    assert len(plain) == 2
    for workers in (1, 2):
        run_dir = tmp_path / f"ray-{workers}"
        run(in_ray(run_dir, schedule, RolloutLayout(ray_workers=workers), **SHORT), RECIPE)
        assert streams(sampled) == streams(plain)
        assert log_probs(sampled) == (log_probs(plain) if workers == 1 else pytest.approx(log_probs(plain), abs=1e-5))
        assert same_weights(tmp_path / "plain", run_dir)
        assert [r["weights/version"] for r in rows(run_dir)[1:]] == [1, 2]
        assert [row.get("eval/score") for row in rows(run_dir)] == accuracies
        sampled[:] = []


def test_a_run_that_goes_on_ends_with_the_bits_of_one_that_was_not_cut(tmp_path: Path) -> None:
    """Its samplers begin with the checkpoint's weights, under the checkpoint's version."""
    run(small(tmp_path / "plain", SYNC, save_every=2, eval_every=4), RECIPE)
    run(in_ray(tmp_path / "run", SYNC, save_every=2, eval_every=4, steps=2), RECIPE)
    run(in_ray(tmp_path / "run", SYNC, save_every=2, eval_every=4, resume=True), RECIPE)
    assert same_weights(tmp_path / "plain", tmp_path / "run")
    assert [row["weights/version"] for row in rows(tmp_path / "run")[1:]] == [1, 2, 3, 4]


@SCHEDULES
def test_weights_that_are_broadcast_are_the_trainers(tmp_path: Path, schedule: ScheduleConfig) -> None:
    """Through gloo to two samplers, in every schedule; in turn the run ends with the bits of one without Ray."""
    run(in_ray(tmp_path / "ray", schedule, GLOO, **SHORT), RECIPE)
    logged = rows(tmp_path / "ray")
    assert [row["weights/version"] for row in logged[1:]] == [1, 2]
    assert all(0 < proof < 1e-5 for proof in proofs(logged[1:]))
    if schedule is SYNC:
        run(small(tmp_path / "plain", schedule, **SHORT), RECIPE)
        assert same_weights(tmp_path / "plain", tmp_path / "ray")


def test_a_sampler_that_is_killed_while_weights_are_broadcast_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next pool makes a group of its own; what comes out is what would have."""
    pools = kill_one(monkeypatch, "receive", 2)
    run(in_ray(tmp_path / "run", SYNC, GLOO, **SHORT, keep_checkpoints=0), RECIPE)
    assert len(pools) == 2
    monkeypatch.undo()
    run(small(tmp_path / "plain", SYNC, **SHORT), RECIPE)
    assert same_weights(tmp_path / "plain", tmp_path / "run")


def kill_one(monkeypatch: pytest.MonkeyPatch, name: str, which: int) -> list[RayPool]:
    """SIGKILL for the process of one sampler at the pool's call number `which` of `name`; the pools, as they begin."""
    pools, calls, plain = [], 0, RayPool._ask

    def ask(self: RayPool, index: int, asked: str, arguments: Mapping[str, Any], data: Any = None) -> Any:
        nonlocal calls
        if self not in pools:
            pools.append(self)
        calls += asked == name
        found = plain(self, index, asked, arguments, data)
        if asked == name and calls == which:
            os.kill(ray.get(self._actors[index].process.remote()), signal.SIGKILL)
        return found

    monkeypatch.setattr(RayPool, "_ask", ask)
    return pools


@pytest.mark.parametrize(("schedule", "call", "which"), [(SYNC, "sample", 5), (ONE, "sample", 5), (SYNC, "commit", 3)])
def test_a_killed_sampler_is_replaced_and_its_tasks_begin_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sampled: list[list[Episode]],
    schedule: ScheduleConfig,
    call: str,
    which: int,
) -> None:
    """In turn what comes out is what would have; one step behind, the answers of one step are by newer weights."""
    config = in_ray(tmp_path / "run", schedule, **SHORT, keep_checkpoints=0)
    pools = kill_one(monkeypatch, call, which)
    run(config, RECIPE)
    assert len(pools) == 2
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2]
    first = config.data.eval_prompts
    assert [list(dict.fromkeys(e.task_id for e in step)) for step in sampled] == [
        [f"number-{first + 4 * step + n}" for n in range(4)] for step in range(2)
    ]
    if schedule is SYNC:
        monkeypatch.undo()
        run(small(tmp_path / "plain", schedule, **SHORT), RECIPE)
        assert same_weights(tmp_path / "plain", tmp_path / "run")


def test_answers_of_a_replaced_sampler_are_as_old_as_they_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while step 2 is trained, one step behind: step 3's answers are by the weights after step 2, its own."""
    pools = kill_one(monkeypatch, "sample", 7)  # two calls for the evaluation, two for a step
    run(in_ray(tmp_path / "run", ONE, steps=3, save_every=3, eval_every=3), RECIPE)
    assert len(pools) == 2
    logged = rows(tmp_path / "run")[1:]
    assert [row["weights/version"] for row in logged] == [1, 2, 3]
    assert [row["rollout/policy_version"] for row in logged] == [0, 0, 2]
    assert [row["schedule/staleness"] for row in logged] == [0, 1, 0]
    assert logged[2]["log_prob_difference"] < 1e-3 < logged[1]["log_prob_difference"]
    assert all(row["weights/bytes"] > 0 for row in logged)


def test_fully_asynchronous_nothing_is_lost_when_a_sampler_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them plays some of the groups; the ledger's run against an independent log."""
    run_dir = tmp_path / "run"
    pools = kill_one(monkeypatch, "play", 9)
    go_in_ray(in_ray(run_dir, ASYNC))
    assert len(pools) == 2
    assert_nothing_lost(run_dir, small(run_dir, ASYNC))
    assert max(row["schedule/staleness"] for row in rows(run_dir)[1:]) <= 1


def test_fully_asynchronous_a_pool_of_which_one_sampler_fails_to_commit_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives, and has the new weights as the other has: both would refuse their number when it is tried again."""
    run_dir = tmp_path / "run"
    pools, commits, plain = list[RayPool](), 0, RayPool._ask

    def ask(self: RayPool, index: int, asked: str, arguments: Mapping[str, Any], data: Any = None) -> Any:
        nonlocal commits
        if self not in pools:
            pools.append(self)
        found = plain(self, index, asked, arguments, data)
        commits += asked == "commit"
        if asked != "commit" or commits != 4:
            return found
        failed: Future[Any] = Future()
        found.add_done_callback(lambda _: failed.set_exception(RuntimeError("did not take all weights")))
        return failed

    monkeypatch.setattr(RayPool, "_ask", ask)
    with pytest.warns(RuntimeWarning, match="is replaced: weights 2 are not taken.*did not take all weights"):
        go_in_ray(in_ray(run_dir, ASYNC))
    assert len(pools) == 2
    assert_nothing_lost(run_dir, small(run_dir, ASYNC))
    assert [row["weights/version"] for row in rows(run_dir)[1:]] == [1, 2, 3, 4]


def scaled(bucket: Bucket) -> Bucket:
    """Weights half as large again."""
    other = Bucket(bucket.headers, bucket.buffer.clone())
    for header in other.headers:
        end = header.start + header.numel * header.dtype.itemsize
        other.buffer[header.start : end].view(header.dtype).mul_(1.5)
    return other


@pytest.mark.parametrize(("schedule", "which", "version"), [(SYNC, 5, 1), (ONE, 7, 2)])
def test_a_replaced_pool_with_other_weights_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: ScheduleConfig, which: int, version: int
) -> None:
    """Before what it sampled is trained, or told: of the second step, or of the evaluation after it."""
    pools = kill_one(monkeypatch, "sample", which)  # two calls an evaluation, two a step
    receive = RayPool.receive

    async def other(self: RayPool, bucket: Bucket) -> int:
        return await receive(self, scaled(bucket) if len(pools) > 1 else bucket)

    monkeypatch.setattr(RayPool, "receive", other)
    with pytest.raises(WeightsNotTakenError, match=f"after version {version} was handed over"):
        run(in_ray(tmp_path / "run", schedule, **SHORT), RECIPE)
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1]


@pytest.mark.parametrize("schedule", [SYNC, ASYNC], ids=lambda schedule: schedule.mode)
def test_one_sampler_of_several_with_other_weights_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: ScheduleConfig
) -> None:
    """Whatever went wrong on its way: it took what it got, and says that it has the new weights."""

    async def receive(self: RayPool, bucket: Bucket) -> int:
        sent = [(part, plain_bytes(part)) for part in (bucket, scaled(bucket))]
        asked = [
            self._ask(i, "receive", bucket_message(part, data), data.numpy()) for i, (part, data) in enumerate(sent)
        ]
        found = await asyncio.gather(*map(asyncio.wrap_future, asked))
        return max(int(head["answer"]["missing"]) for head, _ in found)

    monkeypatch.setattr(RayPool, "receive", receive)
    with pytest.raises(WeightsNotTakenError, match="log-probs of sampler 1 of 2, of version 1"):
        run(in_ray(tmp_path / "run", schedule, **SHORT), RECIPE)


def test_every_hand_over_is_proven(tmp_path: Path) -> None:
    run(in_ray(tmp_path / "run", SYNC, **SHORT), RECIPE)
    assert all(0 < row["weights/check/abs"] < 1e-5 for row in rows(tmp_path / "run")[1:])


def test_what_the_cluster_cannot_hold_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    for schedule in (SYNC, ONE, ASYNC):
        with pytest.raises(ValueError, match=r"3 samplers of 1 CPU each find 2 places on 1 nodes"):
            run(in_ray(tmp_path / schedule.mode, schedule, RolloutLayout(ray_workers=3)), RECIPE)
        written = tmp_path / schedule.mode / "metrics.jsonl"
        assert not written.exists() or not written.read_text()
