"""Weights shard to shard between machines, as namespaces of this one, in a group that authenticates."""

import json
import secrets
from pathlib import Path
from typing import Any, Literal

import pytest

from apps.common.testing.machines import Machine, machines, missing, start_torchrun
from engines.fake_npu.build import reason_against
from engines.fake_npu.path import fake_npu_on_path
from rollout.workers.authentication import SECRET

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
SECONDS = 600
MIB = 16


def run(
    every: list[Machine],
    ranks: int,
    port: int,
    folder: Path,
    given: list[str],
    samplers: int,
    device: Literal["cpu", "npu"] = "cpu",
) -> list[Any]:
    """Return what each rank wrote; all end well."""
    out = folder / "out"
    out.mkdir()
    program = ["-m", "apps.common.testing.timed_shards", str(out), str(MIB), str(samplers), device]
    env = {machine.number: {SECRET: given[machine.number], "OMP_NUM_THREADS": "1"} for machine in every}
    codes = [process.wait(SECONDS) for process in start_torchrun(every, ranks, port, folder, program, env)]
    assert not any(codes), [path.read_text()[-3000:] for path in folder.glob("log*")]
    return [json.loads((out / str(rank)).read_text()) for rank in range(len(every) * ranks)]


@pytest.mark.parametrize(("count", "ranks", "samplers"), [(2, 1, 2), (2, 2, 4), (4, 1, 1)])
def test_machines_give_samplers_the_bits_of_an_export(count: int, ranks: int, samplers: int, tmp_path: Path) -> None:
    with machines(count, tmp_path, rate="800mbit") as every:
        found = run(every, ranks, 29521, tmp_path, [secrets.token_hex(32)] * count, samplers)
    assert all(one["same"] for one in found)
    assert all(one["from"] == (["cpu"] if one["sent"] else []) for one in found)
    total = count * ranks
    for one in found:
        own, sampler = one["weights"] / total, one["rank"] < samplers
        assert one["sent"] == pytest.approx(own * (samplers - sampler), rel=0.1), "its part, to each other sampler"
        assert one["taken"] == pytest.approx((one["weights"] - own) * sampler, rel=0.1), "what it lacks"


@pytest.mark.skipif(reason_against() is not None, reason=str(reason_against()))
def test_npus_send_theirs_by_the_same_code_over_hccl(tmp_path: Path) -> None:
    """By the stand-in for NPUs, whose HCCL takes no tensor of the host: every bucket leaves from the device."""
    with fake_npu_on_path(), machines(2, tmp_path) as every:
        found = run(every, 1, 29523, tmp_path, [secrets.token_hex(32)] * 2, 2, "npu")
    assert all(one["same"] for one in found)
    assert all(one["from"] == ["npu"] for one in found)
    assert all("npu:hccl" in one["backends"] for one in found)


def test_a_machine_with_another_secret_gets_no_weights(tmp_path: Path) -> None:
    with machines(2, tmp_path) as every:
        found = run(every, 1, 29522, tmp_path, [secrets.token_hex(32) for _ in range(2)], 2)
    assert "process 1 of 2 does not know the run's secret" in found[0]["refused"]
    assert "process 0 of 2 does not know the run's secret" in found[1]["refused"]
