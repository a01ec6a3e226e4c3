"""Errors of gloo and NCCL, as they are worded, become one line that names the other machine."""

from pathlib import Path

import pytest

from apps.common.run.lost_machine import lost_machine

GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.231.0.2]:15532: Connection reset by "
    "peer. This is typically caused by a remote worker hanging or bugs in the application."
)
NCCL = (
    "NCCL error in: NCCLUtils.hpp:268, remote process exited or there was a network error, NCCL version 2.28.9\n"
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.\n"
    "Last error:\nsocketPollConnect: connect to 10.0.0.7<41234> failed: Connection refused"
)


@pytest.mark.parametrize(("text", "address"), [(GLOO, "10.231.0.2"), (NCCL, "10.0.0.7")])
def test_the_other_machine_is_named(text: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    lost = lost_machine(RuntimeError(text), tmp_path)
    assert lost is not None
    assert f"rank 0: the machine at {address} no longer answers" in str(lost)
    assert "start again" in str(lost), "there is no checkpoint"
    assert lost_machine(RuntimeError("CUDA error: out of memory"), tmp_path) is None
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert lost_machine(RuntimeError(text), tmp_path) is None, "all ranks are here"
