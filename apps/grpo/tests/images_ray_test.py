"""Pictures shown to samplers in actors of a real Ray cluster on this machine; each hand-over is proven by pictures.

By hand: `bazel test //apps/grpo:tests/images_ray_test`; with vLLM behind the actors in schedule_vllm_ray_test.
"""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.common.testing.weight_delta import load_tensors
from apps.grpo.main import run
from apps.grpo.testing.images import NATIVE, assert_tower_moved, image_config
from apps.grpo.testing.schedules import proofs, rows
from rollout import Episode
from rollout.episodes.summary import AnyEpisode
from rollout.sync.pieces import Bucket
from rollout.workers.bucket_messages import bucket_message, plain_bytes
from rollout.workers.process import WorkerProcess
from rollout.workers.ray_local import SMALL_STORE, local_ray
from rollout.workers.ray_pool import RayPool
from schedules.config import Mode
from schedules.rows.shared import held_here
from schedules.sampling.session import RolloutSession
from schedules.weights.weight_checks import WeightsNotTakenError


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One node with room for two samplers, on loopback; runs find this process connected."""
    with local_ray(cpus=2, store_bytes=SMALL_STORE):
        yield


def streams(steps: Iterable[Iterable[Episode]]) -> list[Any]:
    """Who answered what to which pictures."""
    return [
        [(e.task_id, e.group, e.reward, [(s.ids, s.loss_mask, media_of(s.media)) for s in e.segments]) for e in step]
        for step in steps
    ]


def media_of(media: Mapping[str, Any] | None) -> dict[str, Any]:
    assert media is not None
    return {key: torch.as_tensor(value).tolist() for key, value in media.items()}


def test_a_run_on_pictures_is_the_same_with_ray_as_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episode for episode with the tokens, grids and patches of each, and the weights bit for bit."""
    sampled, plain = list[list[Episode]](), RolloutSession.gather

    def gather(self: RolloutSession, episodes: list[Episode]) -> list[AnyEpisode]:
        known = plain(self, episodes)
        sampled.append(held_here(known))
        return known

    monkeypatch.setattr(RolloutSession, "gather", gather)
    run(image_config(tmp_path / "plain", engine="native"), NATIVE)
    expected, sampled[:] = streams(sampled), []
    run(image_config(tmp_path / "ray", engine="native", ray_workers=2), NATIVE)
    assert streams(sampled) == expected
    left, right = (load_tensors(tmp_path / name / "export") for name in ("plain", "ray"))
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert_tower_moved(tmp_path / "ray")
    assert all(0 < row["weights/check/abs"] < 1e-5 for row in rows(tmp_path / "ray")[1:])


@pytest.mark.parametrize("workers", [0, 2])
def test_fully_asynchronous_every_sampler_sees_by_the_new_tower(tmp_path: Path, workers: int) -> None:
    """In the run's own sampling process, and in Ray's actors."""
    run(image_config(tmp_path, "fully_async", "native", ray_workers=workers), NATIVE)
    steps = rows(tmp_path)[1:]
    assert [row["weights/version"] for row in steps] == [1, 2, 3]
    assert [row["rollout/failed_episodes"] for row in steps] == [0, 0, 0]
    assert all(0 < distance < 1e-4 for distance in proofs(steps))
    assert_tower_moved(tmp_path)


def with_another_tower(bucket: Bucket) -> Bucket:
    """A copy of the bucket with noise in a matrix of the tower."""
    other = Bucket(bucket.headers, bucket.buffer.clone())
    for header in other.headers:
        if "visual.merger.linear_fc2.weight" in header.name:
            end = header.start + header.numel * header.dtype.itemsize
            part = other.buffer[header.start : end].view(header.dtype)
            part += torch.randn(part.shape, generator=torch.Generator().manual_seed(0))
    return other


@pytest.mark.parametrize(("mode", "workers"), [("sync", 2), ("fully_async", 2), ("fully_async", 0)])
def test_one_sampler_with_another_tower_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode, workers: int
) -> None:
    """The last one of them; probes of text alone would not tell."""

    async def receive(self: RayPool, bucket: Bucket) -> int:
        sent = [(part, plain_bytes(part)) for part in (bucket, with_another_tower(bucket))]
        asked = [
            self._ask(i, "receive", bucket_message(part, data), data.numpy()) for i, (part, data) in enumerate(sent)
        ]
        found = await asyncio.gather(*map(asyncio.wrap_future, asked))
        return max(int(head["answer"]["missing"]) for head, _ in found)

    plain = WorkerProcess.receive

    async def receive_alone(self: WorkerProcess, bucket: Bucket) -> int:
        return await plain(self, with_another_tower(bucket))

    monkeypatch.setattr(RayPool, "receive", receive)
    monkeypatch.setattr(WorkerProcess, "receive", receive_alone)
    who = "sampler 1 of 2" if workers else "the sampler"
    with pytest.raises(WeightsNotTakenError, match=f"log-probs of {who}, of version 1"):
        run(image_config(tmp_path, mode, "native", ray_workers=workers), NATIVE)
