"""The engine on device npu, by a stand-in that computes on the CPU: no Ascend hardware was at hand.

Everything runs in forks: torch has one such device a process. The stand-in itself: npu_stand_in_test.py.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch.compiler import set_stance
from torch.nn.attention import SDPBackend, sdpa_kernel

from engines import EngineConfig, TrainEngine, build_engine
from engines.devices.accelerator import Accelerator
from engines.devices.detect import accelerators_here, devices_of
from engines.execution.micro_batches import MicroBatch, MicroBatches
from engines.fake_npu.build import reason_against
from engines.fake_npu.path import fake_npu_on_path
from engines.fsdp2 import prepared_model
from engines.launch import RankError
from engines.megatron.megatron_executor import MegatronExecutor
from engines.megatron.runtime.process_groups import release
from engines.proofs.forked_ranks import launch_forked
from engines.testing.executors import inside
from engines.testing.metrics import shared_metrics
from engines.tiny import tiny_batch, tiny_model
from objectives import GRPO, SFT

pytestmark = pytest.mark.skipif(reason_against() is not None, reason=str(reason_against()))
LENGTHS = [7, 3, 12, 5, 9, 2, 14, 6, 4]


@pytest.fixture(scope="module", autouse=True)
def stand_in() -> Iterator[None]:
    with fake_npu_on_path():
        yield


def on_npu(function: Callable[..., Any], *args: Any, ranks: int = 1) -> Any:
    return launch_forked(function, args, ranks, device="npu")


@contextlib.contextmanager
def planted(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def run(
    device: Literal["cpu", "npu"], kind: str = "dense", grpo: bool = False, options: tuple[tuple[str, Any], ...] = ()
) -> tuple[Any, ...]:
    """Losses, norms, weights and scores of two steps."""
    objective = GRPO(off_policy="mask") if grpo else SFT()
    settings = {"lr": 1e-2, "eps": 1e-3, "max_tokens_per_rank": 20, "weight_decay": 0.1, "dtype": "float32"}
    if device == "npu":  # npu_layers_test.py has the others
        settings["npu_operators"] = "off"
    config = EngineConfig(device=device, **{**settings, **dict(options)})
    built = build_engine(config, tiny_model(kind, seed=0, scale=2.0, num_hidden_layers=2))
    steps = [built.train_batch(tiny_batch(LENGTHS, seed=step), objective) for step in range(2)]
    weights = {part.name: part.flat.cpu().clone() for part in built.export_weights(max_bytes=2**40)}
    scores = built.forward(tiny_batch(LENGTHS, seed=7))["log_probs"].values().cpu()
    return steps, weights, scores, {parameter.device.type for parameter in parameters_of(inside(built))}


def parameters_of(executor: Any) -> list[Any]:
    stages = executor.stages if isinstance(executor, MegatronExecutor) else [executor.model]
    return [parameter for stage in stages for parameter in stage.parameters()]


_all_reduce = dist.all_reduce


def all_reduce_of_hccl(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """HCCL adds up no float64; gloo under the stand-in would."""
    assert (tensor.device.type, tensor.dtype) != ("npu", torch.float64), "HCCL reduces no float64"
    return _all_reduce(tensor, *args, **kwargs)


def cases() -> list[dict[str, Any]]:
    return [
        {"kind": "dense"},
        {"kind": "moe", "grpo": True},
        {"kind": "dense", "grpo": True, "options": (("batching", "padded"), ("gradient_checkpointing", True))},
    ]


def run_all(device: Literal["cpu", "npu"]) -> list[tuple[Any, ...]]:
    """On both devices by the same attention and norms: the CPU would take some that no other device has."""
    with (
        sdpa_kernel(SDPBackend.MATH),
        planted(dist, "all_reduce", all_reduce_of_hccl),
        planted(prepared_model, "use_host_norms", lambda model: None),
    ):
        return [run(device, **case) for case in cases()]


def same(found: tuple[Any, ...], wanted: tuple[Any, ...], where: str) -> None:
    steps, weights, scores, place = found
    assert place == {where}
    assert [shared_metrics(metrics) for metrics in steps] == [shared_metrics(metrics) for metrics in wanted[0]]
    assert weights.keys() == wanted[1].keys()
    assert [name for name, value in weights.items() if not torch.equal(value, wanted[1][name])] == []
    assert torch.equal(scores, wanted[2])


@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_equal_the_cpus(ranks: int) -> None:
    """SFT and GRPO, dense and MoE, packed and padded: metrics, weights and scores to the bit."""
    wanted, got = launch_forked(run_all, ("cpu",), ranks), on_npu(run_all, "npu", ranks=ranks)
    for case, there, here in zip(cases(), got, wanted, strict=True):
        print(case)
        same(there, here, "npu")


MEGATRON: dict[int, list[dict[str, Any]]] = {
    1: [{"kind": "moe", "grpo": True, "options": (("distributed_optimizer", True),)}],
    2: [
        {"kind": "dense", "options": (("tensor_parallel", 2), ("gradient_checkpointing", True))},
        {"kind": "moe", "grpo": True, "options": (("tensor_parallel", 2), ("expert_parallel", 2))},
        {"kind": "moe", "options": (("expert_parallel", 2), ("distributed_optimizer", True), ("dtype", "bfloat16"))},
        {"kind": "dense", "grpo": True, "options": (("pipeline_parallel", 2), ("context_parallel", "dynamic"))},
    ],
}


def run_megatron(device: Literal["cpu", "npu"], ranks: int) -> list[tuple[Any, ...]]:
    """Nothing is compiled on either device: the compiler's code for a CPU rounds differently."""
    results = []
    with sdpa_kernel(SDPBackend.MATH), planted(dist, "all_reduce", all_reduce_of_hccl), set_stance("force_eager"):
        for case in MEGATRON[ranks]:
            options = (("backend", "megatron"), *case.get("options", ()))
            results.append(run(device, **{**case, "options": options}))
            release()
    return results


@pytest.mark.parametrize("ranks", MEGATRON)
def test_megatron_steps_equal_the_cpus(ranks: int) -> None:
    """Tensor, expert, pipeline and context parallelism: metrics, weights and scores to the bit."""
    wanted = launch_forked(run_megatron, ("cpu", ranks), ranks)
    got = on_npu(run_megatron, "npu", ranks, ranks=ranks)
    for case, there, here in zip(MEGATRON[ranks], got, wanted, strict=True):
        print(case)
        same(there, here, "npu")


def resumed(folder: str) -> tuple[bool, bool, list[str]]:
    """A run that goes on from a checkpoint, and one that never stopped."""
    config = EngineConfig(device="npu", lr=1e-2, max_tokens_per_rank=20, dtype="float32")
    made = [build_engine(config, tiny_model(seed=seed, num_hidden_layers=2)) for seed in (0, 1)]
    made[0].train_batch(tiny_batch(LENGTHS), SFT())
    made[0].save(folder)
    drawn = torch.rand(3, device="npu").cpu()
    made[1].load(folder)
    again = torch.rand(3, device="npu").cpu()
    for built in made:
        built.offload()
        built.onload()
    steps = [shared_metrics(built.train_batch(tiny_batch(LENGTHS, seed=1), SFT())) for built in made]
    return torch.equal(drawn, again), steps[0] == steps[1], [kind.kind for kind in accelerators_here()]


def test_a_checkpoint_holds_the_devices_random_state(tmp_path: Path) -> None:
    assert on_npu(resumed, str(tmp_path / "checkpoint")) == (True, True, ["npu"])


def moments_of(built: TrainEngine) -> list[Any]:
    return [state[name] for state in inside(built).optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


def with_moments_on(host: bool, folder: str) -> tuple[Any, ...]:
    """Bytes on the device after a step; where moments are, what they weigh; steps and weights, of a resumed run too."""
    config = EngineConfig(device="npu", lr=1e-2, max_tokens_per_rank=20, optimizer_on_host=host, grad_clip=0.1)
    built, other = (build_engine(config, tiny_model("moe", seed=seed, num_hidden_layers=2)) for seed in (0, 1))
    built.train_batch(tiny_batch(LENGTHS), SFT())
    built.save(folder)
    memory = devices_of("npu").memory()
    assert memory is not None
    before, size = memory.allocated, sum(m.to_local().nbytes for m in moments_of(built))
    built.offload()
    built.onload()
    other.load(folder)
    steps = [shared_metrics(one.train_batch(tiny_batch(LENGTHS, seed=1), SFT())) for one in (built, other)]
    weights = {part.name: part.flat.cpu().clone() for part in built.export_weights(max_bytes=2**40)}
    return before, {m.device.type for one in (built, other) for m in moments_of(one)}, size, steps, weights


@pytest.mark.parametrize("ranks", [1, 2])
def test_moments_on_the_host_change_no_bit(ranks: int, tmp_path: Path) -> None:
    """They never stay on the device: not after a step, an offload, a checkpoint; and save what they weigh there."""
    runs = [on_npu(with_moments_on, host, str(tmp_path / str(host)), ranks=ranks) for host in (True, False)]
    (lean, places, moments, steps, weights), (full, plain_places, _, wanted, plain_weights) = runs
    assert (places, plain_places) == ({"cpu"}, {"npu"})
    assert steps == [steps[0]] * 2 == wanted
    assert [name for name, value in weights.items() if not torch.equal(value, plain_weights[name])] == []
    assert full - lean >= 0.99 * moments > 0, f"{full - lean} bytes less on the device, {moments} of moments"


# ---- planted errors


def stays_on_the_host(self: MicroBatches) -> Iterator[MicroBatch]:
    return _iterate(MicroBatches(self.batch, self.parts, self.group, torch.device("cpu"), self.keys))


_iterate = MicroBatches.__iter__


def unawaited_copies(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _cpu(tensor, "cpu", non_blocking=tensor.numel() > 100)  # of weights: a step whose metrics were so would fail


_cpu = torch.Tensor.to
PLANTED = {
    "a name of CUDA's": (
        *(Accelerator, "new_event", lambda self: torch.cuda.Event()),
        "torch.cuda|Tried to instantiate dummy base class",
    ),
    "a name that torch_npu lacks": (Accelerator, "new_event", lambda self: self.module.Evnt(), "has no torch.npu.Evnt"),
    "an argument that it lacks": (
        *(Accelerator, "current_stream", lambda self: self.module.current_stream(stream=None)),
        "unexpected keyword.*'stream'",
    ),
    "a batch left on the host": (MicroBatches, "__iter__", stays_on_the_host, "same device"),
}


def run_planted(name: str) -> None:
    owner, attribute, value, _ = PLANTED[name]
    with planted(owner, attribute, value):
        run("npu")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_error_is_caught(name: str) -> None:
    with pytest.raises(RankError, match=PLANTED[name][-1]):
        on_npu(run_planted, name)


def unawaited() -> dict[str, torch.Tensor]:
    with planted(torch.Tensor, "cpu", unawaited_copies):
        weights: dict[str, torch.Tensor] = run("npu")[1]
        return weights


def test_a_copy_that_nobody_waits_for_is_caught() -> None:
    weights = on_npu(unawaited)
    assert any(value.isnan().any() for value in weights.values())
