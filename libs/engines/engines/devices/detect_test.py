"""Kinds of devices without any at hand, and HCCL's settings."""

import os
from typing import Any, Literal

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from engines import EngineConfig, launch
from engines.devices.detect import accelerators_here, devices_of
from engines.devices.hccl import HOST_PORTS, NPU_PORTS, TIMEOUT, HcclSettings, port_range
from engines.loading import resolve_device

PORTS = st.integers(1024, 65535)


def test_kinds() -> None:
    assert devices_of("cpu") is devices_of(torch.device("cpu"))
    assert devices_of("cpu").current() == torch.device("cpu")
    assert [devices_of(kind).backend for kind in ("cpu", "cuda", "npu")] == [
        "gloo",
        "cpu:gloo,cuda:nccl",
        "cpu:gloo,npu:hccl",
    ]
    with pytest.raises(ValueError, match="device must be one of auto, cpu, cuda, npu, got 'xpu'"):
        devices_of("xpu")


def test_a_cpu_has_no_streams_and_no_random_state() -> None:
    cpu = devices_of("cpu")
    assert not cpu.overlaps
    assert cpu.memory() is None
    assert cpu.random_state() is None
    for call in (cpu.new_stream, cpu.current_stream, cpu.new_event, lambda: cpu.on_stream(None)):
        with pytest.raises(RuntimeError, match="a CPU has no streams"):
            call()
    with pytest.raises(ValueError, match="no random state beside the host's"):
        cpu.set_random_state(torch.get_rng_state())


@pytest.mark.parametrize(("kind", "reason"), [("npu", "torch_npu is not installed"), ("cuda", "torch sees no CUDA")])
def test_a_device_that_is_not_there_is_refused(kind: Literal["npu", "cuda"], reason: str) -> None:
    if devices_of(kind).missing() is None:
        pytest.skip(f"this machine has {kind}")
    for call in (lambda: resolve_device(EngineConfig(device=kind)), lambda: launch.launch(print, device=kind)):
        with pytest.raises(ValueError, match=f"device='{kind}' but {reason}.*: use device='cpu' or 'auto'"):
            call()
    assert kind not in [devices.kind for devices in accelerators_here()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "dtype='auto' is bfloat16, which cuda:0 can't compute in: set dtype='float32'"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16' is bfloat16, which cuda:0 can't compute in: set dtype='float32'"),
        ({"dtype": "float32", "master_dtype": "bfloat16"}, "master_dtype='bfloat16' is.*: set master_dtype='float32'"),
        ({"dtype": "float32", "moments_dtype": "bfloat16"}, "moments_dtype='bfloat16' is.*: set moments_dtype='auto'"),
        ({"dtype": "float32"}, None),
    ],
)
def test_a_dtype_that_the_device_lacks_is_refused_before_a_step(
    options: dict[str, Any], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An old GPU, as far as torch tells: torch itself would go on, by way of float32."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    config = EngineConfig(device="cuda", **options)
    if message is None:
        assert resolve_device(config) == torch.device("cuda", 0)
        return
    with pytest.raises(ValueError, match=message):
        resolve_device(config)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float64"), ("cpu", "float16"), ("mps", "float32")])
def test_dtypes_and_devices_that_no_engine_has_are_refused_by_the_settings(device: Any, dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"d(type|evice) must be one of"):
        EngineConfig(device=device, dtype=dtype)


@given(st.integers(120, 7200), st.tuples(PORTS, PORTS), st.tuples(PORTS, PORTS))
def test_settings_are_read_back_and_ranges_that_meet_are_refused(
    timeout: int, host: tuple[int, int], npu: tuple[int, int]
) -> None:
    assume(host[0] <= host[1] and npu[0] <= npu[1])
    variables = {TIMEOUT: str(timeout), HOST_PORTS: "{}-{}".format(*host), NPU_PORTS: "{}-{}".format(*npu)}
    if set(range(host[0], host[1] + 1)) & set(range(npu[0], npu[1] + 1)):
        with pytest.raises(ValueError, match="share ports"):
            HcclSettings.read(variables)
        return
    settings = HcclSettings.read(variables)
    assert settings.environment() == variables
    ports = min(host[1] - host[0], npu[1] - npu[0]) + 1
    settings.check_room(ports)
    with pytest.raises(ValueError, match=f"has {ports} ports for {ports + 1} ranks"):
        settings.check_room(ports + 1)


def test_what_the_environment_says_stays() -> None:
    npu = devices_of("npu")
    assert npu.environment({}) == HcclSettings().environment()
    assert set(npu.environment({TIMEOUT: "600"})) == {HOST_PORTS, NPU_PORTS}
    assert devices_of("cuda").environment({}) == devices_of("cpu").environment({}) == {}


def test_each_rank_of_a_machine_has_a_port() -> None:
    """51 of them unless told otherwise."""
    npu = devices_of("npu")
    assert npu.environment({}, ranks=51) == HcclSettings().environment()
    with pytest.raises(ValueError, match="HCCL_HOST_SOCKET_PORT_RANGE=60000-60050 has 51 ports for 52 ranks: widen it"):
        npu.environment({}, ranks=52)
    with pytest.raises(ValueError, match="HCCL_NPU_SOCKET_PORT_RANGE=7000-7002 has 3 ports for 4 ranks"):
        npu.environment({NPU_PORTS: "7000-7002"}, ranks=4)


@pytest.mark.parametrize(
    ("name", "value"), [(TIMEOUT, "60"), (TIMEOUT, "7201"), (TIMEOUT, "20 s"), (HOST_PORTS, "auto"), (NPU_PORTS, "9-5")]
)
def test_values_that_hccl_would_not_take(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        devices_of("npu").environment({name: value})


@pytest.mark.parametrize("text", ["", "1-", "1023-2000", "2000-1999", "2000-65536", "2000", "a-b", "2000-3000-4000"])
def test_what_is_no_port_range(text: str) -> None:
    with pytest.raises(ValueError, match="P must be FIRST-LAST"):
        port_range("P", text)


def test_a_group_leaves_the_interface_of_collectives_as_it_was() -> None:
    before = {name: os.environ.get(name) for name in devices_of("cpu").interfaces}
    assert launch.launch(dict, (before,), device="cpu") == before
    assert {name: os.environ.get(name) for name in before} == before
