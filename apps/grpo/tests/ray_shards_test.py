"""Two ranks send their shards straight to samplers in actors of a real Ray cluster, also where one of them is killed.

By hand: `./bazelw test //apps/grpo:tests/ray_shards_test`.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apps.common.cluster import RolloutLayout
from apps.grpo.config import GrpoConfig
from apps.grpo.main import run
from apps.grpo.testing.ranks import PreparedTasks, on_ranks
from apps.grpo.testing.ray import SCHEDULES, kill_sampler, note_buckets
from apps.grpo.testing.recipe import SHALLOW as RECIPE
from apps.grpo.testing.schedules import ASYNC, SYNC, Prepare, nothing, proofs, rows, same_weights
from rollout.workers.authentication import SECRET
from rollout.workers.ray_local import SMALL_STORE, local_ray
from schedules.config import ScheduleConfig


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[str]:
    """One node with room for two samplers, on loopback; the first rank of a run connects to it."""
    with local_ray(cpus=2, store_bytes=SMALL_STORE) as address:
        yield address


def trained(
    address: str, run_dir: Path, schedule: ScheduleConfig, transport: Any = "auto", first: Prepare = nothing
) -> list[dict[str, Any]]:
    """Train two steps on two ranks, of which the first is prepared; return the rows of the steps."""
    run_dir.mkdir()

    def make_tasks(config: GrpoConfig, tokenizer: object) -> PreparedTasks:
        del tokenizer
        return PreparedTasks(config.data.eval_prompts, run_dir=run_dir, prepare=(first,), sampler=nothing)

    engine = replace(RECIPE.config.engine, weights="sharded")
    config = on_ranks(run_dir, schedule=schedule, engine=engine, steps=2)
    layout = RolloutLayout(ray_workers=2, ray_address=address, weight_transport=transport)
    config = replace(config, cluster=replace(config.cluster, rollout=layout))
    run(config, replace(RECIPE, make_tasks=make_tasks))
    return rows(run_dir)[1:]


@SCHEDULES
def test_samplers_get_the_bits_of_gathered_tensors(
    tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch, schedule: ScheduleConfig
) -> None:
    """Without a byte of it in the first rank's pool; where somebody asks for it, through the object store."""
    monkeypatch.delenv(SECRET, raising=False)  # the launcher makes one
    shards, noted = replace(schedule, weight_sync="shards"), tmp_path / "noted"
    logged = trained(cluster, tmp_path / "shards", shards, first=functools.partial(note_buckets, noted))
    assert [row["weights/version"] for row in logged] == [1, 2]
    assert all(0 <= distance < 1e-5 for distance in proofs(logged))
    assert noted.read_text().split() == ["SentShards"] * 2
    if schedule is SYNC:
        noted.unlink()
        whole = trained(cluster, tmp_path / "whole", schedule)
        store = trained(cluster, tmp_path / "store", shards, "objects", functools.partial(note_buckets, noted))
        for name in ("whole", "store"):
            assert same_weights(tmp_path / name, tmp_path / "shards")
        assert {row["weights/bytes"] for row in (*whole, *logged)} == {whole[0]["weights/bytes"]}
        assert set(noted.read_text().split()) == {"Bucket"}
        assert [row["weights/version"] for row in store] == [1, 2]


@pytest.mark.parametrize("schedule", [SYNC, ASYNC], ids=lambda schedule: schedule.mode)
@pytest.mark.parametrize("call", ["join", "exchange"])
def test_a_sampler_that_is_killed_in_a_sync_is_replaced_on_all_ranks(
    tmp_path: Path, cluster: str, schedule: ScheduleConfig, call: str
) -> None:
    """The ranks and the sampler that lives give up together, and send the same weights to another pool."""
    shards = replace(schedule, weight_sync="shards")
    logged = trained(cluster, tmp_path / "run", shards, first=functools.partial(kill_sampler, call, 2))
    assert [row["weights/version"] for row in logged] == [1, 2]
    assert all(0 <= distance < 1e-5 for distance in proofs(logged))
    if schedule is SYNC:
        trained(cluster, tmp_path / "plain", schedule)
        assert same_weights(tmp_path / "plain", tmp_path / "run")
