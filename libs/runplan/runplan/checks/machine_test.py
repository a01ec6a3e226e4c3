"""What `--plan` says of the machine: packages, driver, devices and ports, each missing one with its fix."""

import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from engines import EngineConfig
from engines.devices import accelerator
from engines.devices.base import MemoryFigures
from engines.devices.detect import devices_of
from engines.devices.npu import Npu
from runplan.checks import machine
from runplan.checks.machine import seen_here
from runplan.plain_settings import PlainCluster, PlainPools
from runplan.run_spec import RunSpec

PLAIN = EngineConfig(device="npu", npu_operators="off")
SPEC = RunSpec("grpo", "r", PLAIN, PlainCluster(), processes=2, steps=1, rows=1, longest=8)
RANGES = {"HCCL_HOST_SOCKET_PORT_RANGE": "60000-60050", "HCCL_NPU_SOCKET_PORT_RANGE": "61000-61050"}


def npu(environ: Mapping[str, str] | None = None, **changes: Any) -> list[str]:
    return seen_here(replace(SPEC, **changes), dict(environ or {}))


def test_a_machine_without_cards_is_told_what_to_install() -> None:
    lines = npu()
    assert [line.partition(";")[0].partition(":")[2].strip() for line in lines if line.startswith("missing")] == [
        "torch_npu",
        "npu-smi",
        "ASCEND_HOME_PATH is not set",
        "device npu",
    ]
    assert "install torch_npu==2." in lines[0]
    assert "set_env.sh" in lines[2]


def test_other_devices_are_not_looked_for() -> None:
    assert seen_here(replace(SPEC, engine=EngineConfig(device="cpu")), {}) == []
    assert seen_here(replace(SPEC, engine=EngineConfig()), {}) == [f"device auto: {devices_of('auto').kind}"]


def test_what_is_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of torch_npu for this torch, npu-smi on the path, CANN's variable."""
    monkeypatch.syspath_prepend(str(tmp_path))
    torch = seen_here(SPEC, {})[0].partition("torch_npu==")[2].partition(",")[0]
    folder = tmp_path / f"torch_npu-{torch}.post4.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch_npu\nVersion: {torch}.post4\n")
    (tmp_path / "npu-smi").write_text("#!/bin/sh\n")
    (tmp_path / "npu-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    lines = npu({"ASCEND_TOOLKIT_HOME": "/opt/cann"})
    assert lines[:3] == [
        f"torch_npu {torch}.post4 beside torch {torch}",
        f"driver: {tmp_path / 'npu-smi'}",
        "CANN: /opt/cann",
    ]
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 1.11.0\n")
    assert "missing: torch_npu 1.11.0 is not for torch" in npu()[0]


def test_a_torch_npu_whose_operators_were_not_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the torch that is here, were that another one."""
    monkeypatch.setattr(machine, "version", {"torch": "2.14.0", "torch_npu": "2.14.0"}.__getitem__)
    line = npu(engine=EngineConfig(device="npu"))[0]
    assert line == "missing: torch_npu >=2.13,<2.14 for its operators, 2.14.0 is here; set --trainer.npu-operators off"
    assert npu()[0] == "torch_npu 2.14.0 beside torch 2.14.0"


def test_ports_that_others_hold_are_counted() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        ports = {**RANGES, "HCCL_HOST_SOCKET_PORT_RANGE": f"{port}-{port}"}
        assert f"missing: HCCL: 0 of 1 host ports are free ({port}-{port}) for 1 ranks" in npu(ports, processes=1)[-2]
    assert f"HCCL: 1 of 1 host ports are free ({port}-{port})" in npu(ports, processes=1)
    assert npu({**RANGES, "HCCL_CONNECT_TIMEOUT": "300"})[-1] == "HCCL: ranks wait 300 s for one another"
    assert "has 51 ports for 99 ranks" in npu(RANGES, processes=99)[-1]
    assert "share ports" in npu({"HCCL_NPU_SOCKET_PORT_RANGE": "60000-60001"})[-1]


class Cards:
    """torch.npu's names that are asked."""

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True


def test_devices_are_counted_and_their_memory_held_to_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Npu, "missing", lambda self: None)
    monkeypatch.setattr(Npu, "module", Cards)
    monkeypatch.setattr(accelerator.Accelerator, "memory", lambda self: MemoryFigures(0, 0, 32 * 2**30))
    lines = npu(cluster=PlainCluster(pools=PlainPools(device_memory_gib=64)))
    assert "missing: 1 devices for 2 ranks a node; set --nproc-per-node 1" in lines[3]
    assert lines[4] == "missing: a device has 32 GiB, the plan counts on 64"
    lines = npu(processes=1, cluster=PlainCluster(pools=PlainPools(device_memory_gib=32)))
    assert lines[3] == "1 devices for 1 ranks a node"
    assert "GiB" not in "".join(lines)


@pytest.mark.parametrize("device", ["cuda"])
def test_cuda_devices_too(device: Literal["cuda"]) -> None:
    (line,) = seen_here(replace(SPEC, engine=EngineConfig(device=device)), {})
    assert line.startswith("missing: device cuda; ")
