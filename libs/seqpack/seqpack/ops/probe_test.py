import importlib.util
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

from seqpack.ops import probe
from seqpack.ops.delta_rule import gated_delta_rule_step
from seqpack.ops.probe import OpRequest, backends, choose

CUDA = torch.device("cuda")


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Packages and a device that are not here."""

    def set_up(
        packages: Collection[str], capability: tuple[int, int] = (9, 0), triton: str = "3.6.0", nvcc: bool = True
    ) -> None:
        versions = {**dict.fromkeys(packages, "1.0"), "triton": triton}
        monkeypatch.setattr(probe, "installed", lambda package, distribution=None: versions.get(package))
        monkeypatch.setattr(probe, "has_nvcc", lambda: nvcc)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    return set_up


def request(
    op: str, dtype: torch.dtype = torch.bfloat16, grad: bool = True, device: torch.device = CUDA, **sizes: int | bool
) -> OpRequest:
    return OpRequest(op, device, dtype, grad, sizes)


def names(op: str, **options: Any) -> list[str]:
    table = probe._TABLE[op]
    return [name for name, entry in table.items() if entry.refuse(request(op, **options)) is None and entry.automatic]


def test_report_covers_each_operation_with_reasons() -> None:
    report = backends("cpu")
    assert set(report) == {"causal_conv1d", "gated_delta_rule", "gated_delta_rule_step", "attention"}
    for op, entries in report.items():
        assert entries["torch"].available, op
        for name, (available, reason) in entries.items():
            assert available or reason, (op, name)


def test_whoever_may_choose_a_kernel_can_load_it() -> None:
    """By its name alone, which no import shows: a build that leaves out what nobody imports would leave it out."""
    found = [
        entry.load()
        for table in probe._TABLE.values()
        for name, entry in table.items()
        if name not in ("torch", "naive")
    ]
    assert len(found) == 6
    assert all(map(callable, found))


def test_the_cpu_takes_plain_torch_and_says_why_not_more() -> None:
    report = backends("cpu", torch.float32)
    assert [n for n, a in report["attention"].items() if a.available] == ["torch", "naive"]
    assert report["attention"]["varlen"].reason == "needs a CUDA device, the tensors are on cpu"


@pytest.mark.skipif(importlib.util.find_spec("fla") is not None, reason="flash-linear-attention is installed here")
def test_a_missing_package_is_named() -> None:
    with pytest.raises(
        ValueError, match="'fla': the package flash-linear-attention is not installed; use backend='auto'"
    ):
        choose(request("gated_delta_rule", device=torch.device("cpu")), "fla")


def test_kernels_are_chosen_by_what_fits(pretend: Callable[..., None]) -> None:
    pretend(["fla", "flash_qla", "causal_conv1d"])
    assert names("gated_delta_rule", key_dim=128, value_dim=128) == ["flash_qla", "fla", "torch"]
    assert names("gated_delta_rule", key_dim=64, value_dim=64, grad=False) == ["fla", "torch"]
    assert names("gated_delta_rule", dtype=torch.float32) == ["torch"]
    assert names("gated_delta_rule", chunk_size=True) == ["torch"]
    assert names("gated_delta_rule_step") == ["torch"]
    assert names("gated_delta_rule_step", grad=False) == ["fla", "torch"]
    assert names("causal_conv1d", kernel=4, dim=64) == ["causal_conv1d", "fla", "torch"]
    assert names("causal_conv1d", kernel=5, dim=64) == ["fla", "torch"]
    assert names("causal_conv1d", kernel=4, dim=60) == ["fla", "torch"]
    assert names("causal_conv1d", kernel=4, dim=64, state=True) == ["fla", "torch"]
    assert names("attention", head_dim=128) == ["varlen", "torch"]
    assert names("attention", head_dim=512) == ["torch"]
    pretend(["fla"], capability=(7, 5))
    assert names("attention", head_dim=128) == ["torch"]


def test_flash_qla_is_turned_off_by_the_variable_that_fla_reads(
    pretend: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(["fla", "flash_qla", "tilelang"])
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    assert names("gated_delta_rule", key_dim=128, value_dim=128) == ["fla", "torch"]
    pretend(["fla", "flash_qla"])
    assert names("gated_delta_rule", key_dim=128, value_dim=128) == ["torch"]


def test_triton_that_cannot_go_backward_on_hopper_is_avoided(pretend: Callable[..., None]) -> None:
    pretend(["fla"])
    assert names("gated_delta_rule") == ["torch"]
    assert names("gated_delta_rule", grad=False) == ["fla", "torch"]
    with pytest.raises(ValueError, match=r"on Hopper with triton 3\.6\.0: install tilelang \(with nvcc\) or flash-qla"):
        choose(request("gated_delta_rule"), "fla")
    pretend(["fla"], triton="3.7.1")
    assert names("gated_delta_rule") == ["fla", "torch"]
    pretend(["fla"], capability=(10, 0))
    assert names("gated_delta_rule") == ["fla", "torch"]
    pretend(["fla", "tilelang"])
    assert names("gated_delta_rule") == ["fla", "torch"]
    pretend(["fla", "tilelang"], nvcc=False)
    assert names("gated_delta_rule") == ["torch"]
    pretend(["fla", "flash_qla"])
    assert names("gated_delta_rule", key_dim=64, value_dim=64) == ["torch"]


def test_operands_on_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="operands are on cpu and meta"):
        OpRequest.of("attention", torch.zeros(1), torch.zeros(1, device="meta"))


def test_a_step_has_no_oracle_of_its_own() -> None:
    q = torch.zeros(1, 1, 2)
    with pytest.raises(ValueError, match="choose from auto, fla, torch"):
        gated_delta_rule_step(q, q, q, q[..., 0], q[..., 0], torch.zeros(1, 1, 2, 2), backend="naive")
