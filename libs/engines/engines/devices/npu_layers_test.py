"""Layers by torch_npu's operators, both backends: called, as right as the plain ones, and reversible.

By the stand-in that computes on the CPU; everything runs in forks, as torch has one such device a process.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.compiler import set_stance
from torch.nn.attention import SDPBackend, sdpa_kernel

from engines import EngineConfig, build_engine
from engines.devices import layer_matching as layer_kinds
from engines.devices.npu import torch_npu
from engines.devices.npu_layers import use_npu_operators
from engines.fake_npu.build import reason_against
from engines.fake_npu.operators import CALLS
from engines.fake_npu.path import fake_npu_on_path
from engines.megatron.runtime.process_groups import release
from engines.proofs.forked_ranks import launch_forked
from engines.testing.executors import inside
from engines.tiny import tiny_batch, tiny_model
from objectives import GRPO, SFT

pytestmark = pytest.mark.skipif(reason_against() is not None, reason=str(reason_against()))
LENGTHS = [7, 3, 12, 5, 9, 2, 14, 6, 4]
NORM, ROTARY, SWIGLU, GROUPED = "npu_rms_norm", "npu_rotary_mul", "npu_swiglu", "npu_grouped_matmul"
TENSOR = {"backend": "megatron", "tensor_parallel": 2}
CASES: dict[int, list[tuple[str, bool, dict[str, Any], set[str]]]] = {
    1: [
        ("dense", False, {}, {NORM, ROTARY, SWIGLU}),
        ("attention", True, {"batching": "padded", "gradient_checkpointing": True}, {NORM, ROTARY, SWIGLU}),
        ("moe", True, {"router_aux_loss_coef": 0.01}, {NORM, ROTARY, SWIGLU, GROUPED}),
        ("dense", True, {"backend": "megatron"}, {NORM, ROTARY, SWIGLU}),
    ],
    2: [
        ("moe", False, {"expert_parallel": 2}, {NORM, ROTARY, SWIGLU, GROUPED}),
        ("moe", True, {**TENSOR, "expert_parallel": 2}, {NORM, ROTARY, SWIGLU}),
    ],
}
"""Model, GRPO or SFT, settings, and what is called."""
BOUND = 2e-5
"""Of float32, relative and absolute, after two steps: docs/ascend.md states it."""


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> Iterator[None]:
    with fake_npu_on_path():
        yield


def run(device: str, kind: str, grpo: bool, settings: dict[str, Any]) -> tuple[Any, ...]:
    """Losses and norms of two steps, weights and scores; which operators were called."""
    CALLS.clear()
    usual = {"lr": 1e-3, "eps": 1e-3, "max_tokens_per_rank": 20, "dtype": "float32", "device": device}
    built = build_engine(EngineConfig(**{**usual, **settings}), tiny_model(kind, seed=0, num_hidden_layers=2))
    objective = GRPO(off_policy="mask") if grpo else SFT()
    steps = [built.train_batch(tiny_batch(LENGTHS, seed=step), objective) for step in range(2)]
    weights = {part.name: part.flat.cpu().clone() for part in built.export_weights(max_bytes=2**40)}
    scores = built.forward(tiny_batch(LENGTHS, seed=7))["log_probs"].values().cpu()
    release()
    return [(step["loss"], step["grad_norm"]) for step in steps], weights, scores, dict(CALLS)


def run_all(device: str, ranks: int) -> list[tuple[Any, ...]]:
    with sdpa_kernel(SDPBackend.MATH), set_stance("force_eager"):
        return [run(device, kind, grpo, settings) for kind, grpo, settings, _ in CASES[ranks]]


@pytest.mark.parametrize("ranks", CASES)
def test_steps_by_npu_operators_equal_the_cpus(ranks: int) -> None:
    wanted = launch_forked(run_all, ("cpu", ranks), ranks)
    got = launch_forked(run_all, ("npu", ranks), ranks, device="npu")
    for case, here, there in zip(CASES[ranks], wanted, got, strict=True):
        print(case)
        for ours, theirs in zip(there[:3], here[:3], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=BOUND, atol=BOUND)
        assert (set(there[3]), here[3]) == (case[3], {})
        assert min(there[3].values()) >= 4, "in two steps and a score"


def bare(device: str) -> tuple[Any, Callable[[], torch.Tensor]]:
    """A model of experts and delta nets, and its logits."""
    model = tiny_model("moe", seed=0, num_hidden_layers=2).to(device)
    ids = torch.arange(1, 13, device=device)[None]
    return model, lambda: model(input_ids=ids, use_cache=False).logits.detach().cpu()


def undone() -> tuple[Any, ...]:
    """Logits before, with the operators, and after; what was changed and is left changed; which calls when."""
    model, logits = bare("npu")
    before = [type(module) for module in model.modules()], model.config._experts_implementation
    plain = logits()
    applied = use_npu_operators(model)
    assert use_npu_operators(model) is applied
    other, _ = bare("npu")
    assert [type(module) for module in other.modules()] == before[0], "another model is as it was"
    changed = [type(module) for module in model.modules()], model.config._experts_implementation
    CALLS.clear()
    fast, by = logits(), set(CALLS)
    applied.undo()
    CALLS.clear()
    after = logits()
    left = [type(module) for module in model.modules()], model.config._experts_implementation
    return plain, fast, after, before != changed, before == left, by, dict(CALLS), len(applied.changed)


def test_undone_all_is_as_before() -> None:
    plain, fast, after, changed, restored, by, calls, number = launch_forked(undone, device="npu")
    torch.testing.assert_close(fast, plain, rtol=BOUND, atol=BOUND)
    assert torch.equal(after, plain)
    assert (changed, restored, by, calls) == (True, True, {NORM, ROTARY, SWIGLU, GROUPED}, {})
    assert number > 10


def undone_in_an_engine() -> tuple[Any, ...]:
    """Log-probs of an engine whose operators were undone, beside one without; what was called before and after."""
    CALLS.clear()
    usual: dict[str, Any] = {"device": "npu", "dtype": "float32", "max_tokens_per_rank": 20}
    made = [EngineConfig(**usual, npu_operators=value) for value in ("auto", "off")]
    fast, plain = (build_engine(config, tiny_model("moe", seed=0, num_hidden_layers=2)) for config in made)
    batch = tiny_batch(LENGTHS)
    fast.forward(batch)
    before = set(CALLS)
    inside(fast).npu_operators.undo()
    CALLS.clear()
    scores = [built.forward(batch)["log_probs"].values().cpu() for built in (fast, plain)]
    return torch.equal(*scores), before, dict(CALLS)


def test_undone_in_an_engine_the_plain_one_is_left() -> None:
    """Packed calls too, which run attention layers by a code of their own."""
    assert launch_forked(undone_in_an_engine, device="npu") == (True, {NORM, ROTARY, SWIGLU, GROUPED}, {})


def switched_off() -> dict[str, int]:
    CALLS.clear()
    for backend in ("fsdp2", "megatron"):
        run("npu", "dense", False, {"backend": backend, "npu_operators": "off"})
    return dict(CALLS)


def test_switched_off_none_is_called() -> None:
    assert launch_forked(switched_off, device="npu") == {}


def of_another_version() -> bool:
    torch_npu().__version__ = "2.14.0"
    config = EngineConfig(device="npu", dtype="float32")
    with pytest.raises(ValueError, match=r"torch_npu >=2\.13,<2\.14, and 2\.14\.0 is installed"):
        build_engine(config, tiny_model("dense", num_hidden_layers=2))
    return True


def test_refused_for_another_torch_npu() -> None:
    assert launch_forked(of_another_version, device="npu")


def test_families_are_complete() -> None:
    """Each class of norm, MLP and experts in the models of the registry is named, but for Gemma's MLP (it has GELU)."""
    left = set()
    for kind in ("dense", "moe", "next", "attention"):
        for module in tiny_model(kind, num_hidden_layers=2).modules():
            name = type(module).__name__
            if "Norm" in name or name.endswith("MLP"):
                left.add(name)
    named = {*layer_kinds.NORMS, *layer_kinds.CENTERED_NORMS, *layer_kinds.GATED_NORMS, *layer_kinds.MLPS}
    assert left - named == set()
    assert len(left & named) > 8
