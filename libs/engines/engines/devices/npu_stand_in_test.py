"""The stand-in for torch_npu: a device of its own whose misuse raises, and the operators that ours call on it.

Everything runs in forks: torch has one such device a process. The engine on it: npu_test.py.
"""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engines.devices import npu_operators
from engines.devices.detect import devices_of
from engines.devices.npu import torch_npu
from engines.fake_npu import build
from engines.fake_npu.build import reason_against
from engines.fake_npu.path import fake_npu_on_path
from engines.fake_npu.surface import read_surface, signature
from engines.proofs.forked_ranks import launch_forked
from engines.testing.npu_canary import canary, raises

pytestmark = pytest.mark.skipif(reason_against() is not None, reason=str(reason_against()))


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> Iterator[None]:
    with fake_npu_on_path():
        yield


def on_npu(function: Callable[..., Any], *args: Any, ranks: int = 1) -> Any:
    return launch_forked(function, args, ranks, device="npu")


# ---- the stand-in


def test_it_has_the_cpp_library_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a compiler that would link its own statically, too: torch has another, and locales of two do not mix.

    A source of a few lines that formats a number stands for the whole.
    """
    text = "#include <sstream>\nstd::string stand_in(double x) { std::ostringstream s; s << x; return s.str(); }\n"
    (tmp_path / "stand_in.cpp").write_text(text)
    monkeypatch.setattr(build, "HERE", tmp_path)
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\nexec {build.compiler()} -static-libstdc++ "$@"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    build.build(tmp_path / "made.so")
    command = ["nm", "--dynamic", "--defined-only", str(tmp_path / "made.so")]
    symbols = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "stand_in" in symbols
    assert "codecvt" not in symbols


def module_of_npu() -> Any:
    """What stands for `torch.npu`."""
    devices: Any = devices_of("npu")
    return devices.module


def canaries() -> dict[str, bool]:
    npu = module_of_npu()
    return canary("npu", npu.synchronize, npu.library.calls, npu.memory_allocated)


def test_the_stand_in_is_a_device_of_its_own_and_an_alias_is_not() -> None:
    checks = on_npu(canaries)
    assert len(checks) == 9
    assert all(checks.values()), checks
    alias = canary("cpu", lambda: None, lambda: 0, lambda: 0)
    assert not any(alias.values()), alias


def misuses() -> Iterator[tuple[str, type[Exception], Callable[[], Any]]]:
    npu, package = module_of_npu(), torch_npu()
    x = torch.ones(2, 8, device="npu")
    yield "an unknown function", AttributeError, lambda: npu.synchronise()
    yield "an unknown operator", AttributeError, lambda: package.npu_rms_norms(x, x)
    yield "an unknown argument", TypeError, lambda: npu.synchronize(stream=None)
    yield "an unknown argument of an operator", RuntimeError, lambda: package.npu_swiglu(x, axis=-1)
    yield "an argument too few", TypeError, lambda: npu.set_device()
    yield "CUDA asked", RuntimeError, torch.cuda.is_available
    yield "CUDA counted", RuntimeError, torch.cuda.memory_allocated
    yield "a device that is not there", RuntimeError, lambda: torch.ones(1, device="npu:9")
    yield "a tensor of the host among HCCL's", RuntimeError, lambda: _hccl().allreduce([torch.ones(1)])
    yield "an operator without a reference", NotImplementedError, lambda: package.npu_fast_gelu(x)
    yield "a function without one", NotImplementedError, lambda: npu.memory_stats()
    yield "a gradient that would be lost", RuntimeError, lambda: _grouped(package, x.clone().requires_grad_())


def _hccl() -> Any:
    world = dist.group.WORLD
    assert world is not None
    return world._get_backend(torch.device("npu"))


def _grouped(package: Any, x: torch.Tensor) -> Any:
    ends = torch.tensor([2], device="npu")
    return package.npu_grouped_matmul([x], [x.t()[None]], group_list=ends, split_item=3, group_type=0)


def misuses_raise() -> dict[str, bool]:
    return {name: raises(kind, call) for name, kind, call in misuses()}


def test_misuse_raises() -> None:
    checks = on_npu(misuses_raise)
    assert len(checks) == 12
    assert all(checks.values()), checks


def test_the_surface_is_the_wheels() -> None:
    """Figures of torch_npu 2.13.0; every schema and signature can be read."""
    surface = read_surface()
    assert surface.version == "2.13.0"
    assert (len(surface.functions), len(surface.operators), len(surface.operator_names())) == (106, 419, 398)
    assert {"npu_rms_norm", "npu_rotary_mul", "npu_swiglu"} <= set(surface.differentiable)
    assert "npu_grouped_matmul" not in surface.differentiable
    for arguments in surface.functions.values():
        signature(arguments)
    assert str(signature(surface.functions["set_rng_state"])) == "(new_state, device='npu')"


def late_copies() -> Any:
    """An event waits for what was asked for before it, and for no more."""
    npu = devices_of("npu")
    first = torch.full([3], 1.0, device="npu").to("cpu", non_blocking=True)
    event = npu.new_event()
    event.record(npu.current_stream())
    second = torch.full([3], 2.0, device="npu").to("cpu", non_blocking=True)
    event.synchronize()
    seen = [first.tolist(), bool(second.isnan().all())]
    npu.current_stream().synchronize()
    return [*seen, second.tolist()]


def test_late_copies_arrive_with_their_event() -> None:
    assert on_npu(late_copies) == [[1.0] * 3, True, [2.0] * 3]


# ---- operators of torch_npu


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()) * weight


def plain_rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
    return [torch.cat([_half_turned(x, cos[:, None], sin[:, None]), x[..., 4:]], -1) for x in (q, k)]


def _half_turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x[..., :2], x[..., 2:4]
    return torch.cat([a * cos[..., :2] - b * sin[..., :2], b * cos[..., 2:] + a * sin[..., 2:]], -1)


def plain_grouped(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    groups = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return torch.einsum("mk,mkn->mn", x, weight[groups])


def operator_cases() -> dict[str, tuple[Any, ...]]:
    """Each operation of ours, the formula in float64, and inputs by name; floats get gradients."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    silu = torch.nn.functional.silu
    x, gate, weight = normal(3, 5, 8), normal(3, 5, 8), normal(8)
    q, k, cos, sin = normal(2, 3, 5, 6), normal(2, 1, 5, 6), normal(2, 5, 4), normal(2, 5, 4)
    rows, matrices, counts = normal(9, 4), normal(4, 4, 6), torch.tensor([3, 0, 5, 1])
    return {
        "rms_norm": (lambda x, w: plain_norm(x, w, 1e-3), (x, weight), (1e-3,)),
        "gated_rms_norm": (lambda x, g, w: plain_norm(x, w, 1e-3) * silu(g), (x, gate, weight), (1e-3,)),
        "swiglu": (lambda g, u: silu(g) * u, (gate, x), ()),
        "rotary": (plain_rotary, (q, k, cos, sin), ()),
        "grouped_matmul": (plain_grouped, (rows, matrices, counts), ()),
    }


def values_and_gradients(
    function: Callable[..., Any],
    inputs: tuple[torch.Tensor, ...],
    rest: tuple[Any, ...],
    device: str,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    operands = [t.detach().clone().to(device) for t in inputs]
    operands = [t.to(dtype).requires_grad_() if t.is_floating_point() else t for t in operands]
    outputs = function(*operands, *rest)
    outputs = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
    sum((y * y.detach().cos()).sum() for y in outputs).backward()
    gradients = [t.grad for t in operands if t.is_floating_point()]
    return [value.detach().cpu().double() for value in [*outputs, *gradients]]


def operators_by_torch_npu() -> dict[str, list[torch.Tensor]]:
    return {
        name: values_and_gradients(getattr(npu_operators, name), inputs, rest, "npu", torch.float32)
        for name, (_, inputs, rest) in operator_cases().items()
    }


def test_operators_equal_their_formulas() -> None:
    """Values and gradients against float64."""
    got = on_npu(operators_by_torch_npu)
    for name, (plain, inputs, _) in operator_cases().items():
        wanted = values_and_gradients(plain, inputs, (), "cpu", torch.float64)
        for here, there in zip(wanted, got[name], strict=True):
            torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-5, msg=f"{name}: {{}}".format)
