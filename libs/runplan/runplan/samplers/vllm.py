"""vLLM in a plan: its share of each device beside training's, and what it was shown to do."""

import math
import subprocess

from engines import EngineConfig
from engines.capability import Supported, Unsupported
from rollout.capability import backend_supports
from runplan.estimates.buffers import DISK, Buffer, cache_bytes, state_bytes, total_parameters
from runplan.estimates.peak_memory import Peak
from runplan.estimates.states import GIB, States
from runplan.estimates.sync_rates import SyncRate, rate_into_vllm
from runplan.model.model_shape import ModelShape, count_parameters, tower_parameters
from runplan.run_spec import RunSpec
from runplan.samplers.base import OVERLAP, SamplerDevice, SamplerPlan
from runplan.samplers.pool_lines import LinesAndProblems, gib, host_line
from runplan.settings import RolloutSettings

ASLEEP = 2.0
"""GiB that vLLM keeps of a device while it sleeps, its context and graphs: 1.9 on an H200 (vLLM 0.26)."""
# Settings that vLLM answers for, by rollout's features.
FEATURES = {
    "rollout.tp": "tensor_parallel",
    "rollout.pp": "pipeline_parallel",
    "rollout.dp": "data_parallel",
    "rollout.ep": "expert_parallel",
}
# Settings of vLLM, and those that it can't have yet.
SETTINGS: dict[str, Supported | Unsupported] = {
    "rollout.max_model_tokens": Supported("RolloutConfig.max_length"),
    "rollout.max_batched_tokens": Supported("RolloutConfig.prefill_tokens"),
    "rollout.ray_nodes": Unsupported(
        "workers of a model on two machines ran on CPUs alone: no two hosts with accelerators were at hand for NCCL "
        "between them",
        untested="nodes",
    ),
    "rollout.memory_share": Supported("rollout/vllm/graphs_gpu_test.py"),
    "rollout.copies_per_device": Supported("apps/grpo/benchmarks/step_with_vllm.py"),
    "rollout.weights_on_device": Supported("rollout/vllm/shared_device_gpu_test.py"),
    "rollout.sleep": Supported("apps/grpo/tests/sleep_vllm_test.py"),
    "rollout.chunked_prefill": Supported("rollout/vllm/parts_test.py"),
    "rollout.prefix_cache": Supported("rollout/vllm/parts_test.py"),
    "rollout.dtype": Supported("VllmConfig.dtype"),
    "rollout.device": Supported("apps/grpo/tests/shrink_npu_vllm_test.py"),
    "rollout.max_requests": Supported("RolloutConfig.max_batch"),
    "rollout.vllm": Supported("VllmConfig.arguments"),
    "rollout.cuda_graph_sizes": Supported("rollout/vllm/graphs_gpu_test.py"),
    "rollout.kv_cache_memory_gib": Unsupported(
        "vLLM's caches take what --rollout.gpu-memory-utilization leaves them, or --rollout.vllm "
        "kv_cache_memory_bytes=N: leave it out"
    ),
    "rollout.admit": Unsupported("vLLM lets requests begin as it sees fit: leave it out"),
}
EXPERTS_OF_COPIES = Unsupported(
    "experts over the copies of the model in vLLM (--rollout.data-parallel) ran on a CPU alone, no accelerator has run "
    "it: set --rollout.device cpu, or have each copy hold all experts, over its own workers: set ep to tp"
)
NODES_OF_CPUS = Supported("apps/common/tests/ray_machines_vllm_test.py")
WORKERS_OF_NODES = Unsupported(
    "on a CPU vLLM can have one worker on each of a model's machines: make tp x pp equal to --rollout.ray-nodes"
)
EXPERTS_OF_COPIES_ON_A_CPU = Supported("rollout/vllm/experts_over_copies_test.py")
STAGES = Unsupported(
    "a model in stages in vLLM (--rollout.pipeline-parallel) ran on a CPU alone, no accelerator has run it: set "
    "--rollout.device cpu, or use --rollout.tensor-parallel"
)
STAGES_APART = Unsupported(
    "a model in stages is one copy that never sleeps and tells no experts: set --rollout.data-parallel 1, "
    "--rollout.no-sleep and --trainer.no-routing-replay, or --rollout.pipeline-parallel 1"
)
SHARED_BY_WORKERS = Unsupported(
    "copies of several workers each, or that share experts, never shared a device: set --rollout.tensor-parallel 1 and "
    "ep 1, or leave it out"
)
COPIES_OVER_NODES = Unsupported(
    "a model over several machines is one copy: set --rollout.data-parallel 1, and more of --rollout.ray-workers"
)
RAY_SLEEP = Unsupported("vLLM in Ray's workers never slept between two rounds: set --rollout.no-sleep")


class VllmPlan(SamplerPlan):
    """vLLM in a plan."""

    own_settings = ("vllm",)
    target = "vllm"
    ray = Supported("apps/grpo/tests/schedule_vllm_ray_test.py")

    def buffers(self, shape: ModelShape, layout: RolloutSettings, width: int) -> list[Buffer]:
        """Return the two sets of weights, in use and staged, which its workers read
        (`rollout.vllm.weights.shared_weights`)."""
        del width
        two = 2.0 * DISK * total_parameters(shape)
        if layout.weights_on_device:
            return [Buffer("two sets of weights", device=two, always=True)]
        return [Buffer("two sets of weights", host=two, always=True)]

    def pool(self, spec: RunSpec, shape: ModelShape, states: States, peak: Peak) -> LinesAndProblems:
        """Return lines and problems of the sampling devices, and of the processes that feed them."""
        layout, memory = spec.cluster.rollout, spec.device_memory_gib
        lines, _ = super().pool(spec, shape, states, peak)
        buffers, size = self.buffers(shape, layout, DISK), layout.devices
        samplers = max(1, spec.rollout_ranks // size)
        lines.append(host_line(buffers, max(1, spec.processes // size), samplers, "sampling"))
        weights = vllm_weights(shape, layout)
        line = f"{gib(weights)} of weights a device"
        if memory is None or not layout.memory_share:
            return [*lines, f"{line}; its cache takes what vLLM is let (--rollout.gpu-memory-utilization)"], []
        room = layout.memory_share * memory * GIB - weights
        if room <= 0:
            problem = (
                f"{weights / GIB:.0f} GiB of weights do not fit {layout.memory_share:.0%} of a device of {memory:g} GiB"
            )
            return [*lines, line], [f"{problem}: raise --rollout.tensor-parallel, or --rollout.gpu-memory-utilization"]
        held = stage_share(shape, layout)
        each, fixed = held * cache_bytes(shape, layout.tp), held * state_bytes(shape, layout.tp)
        fits = int(room / (each * spec.longest + fixed))
        lines.append(
            f"{line}, {gib(room)} for caches, graphs and activations: {fits} sequences of {spec.longest} tokens"
        )
        if spec.cluster.pools.placement == "separate":
            return lines, []
        staged = sum(buffer.device for buffer in buffers) / GIB
        turns, problems = _shared(spec, states, peak.bytes / GIB, staged, memory)
        return [*lines, *turns], problems

    def own_sync_rate(self, spec: RunSpec) -> SyncRate | None:
        """Return the rate through the memory that the trainer and its workers share."""
        return rate_into_vllm(spec.cluster.rollout.weights_on_device, spec.cluster.rollout.dp)

    def supports(self, feature: str) -> Supported | Unsupported:
        """Return whether it has a feature of rollout's engines."""
        return backend_supports("vllm", feature)

    def requirements(self, spec: RunSpec) -> dict[str, Supported | Unsupported]:
        """Return further requirements: NPUs, where it is to compute on those that train."""
        return {"vLLM beside NPUs": self.supports("npu")} if _on_npus(spec) else {}

    def own_setting(self, spec: RunSpec, path: str) -> Supported | Unsupported:
        """Return whether a changed rollout setting has an effect on it."""
        layout = spec.cluster.rollout
        if path == "rollout.sleep" and layout.ray_workers:
            return RAY_SLEEP
        if path == "rollout.sleep" and spec.cluster.schedule.mode != "sync":
            return OVERLAP
        if path == "rollout.copies_per_device" and (layout.tp > 1 or layout.experts_over_copies):
            return SHARED_BY_WORKERS
        if path == "rollout.ray_nodes" and layout.dp > 1:
            return COPIES_OVER_NODES
        on_a_cpu = "cpu" in (layout.device, spec.engine.device)
        if path == "rollout.ray_nodes" and on_a_cpu:
            return NODES_OF_CPUS if layout.ray_nodes == layout.tp * layout.pp else WORKERS_OF_NODES
        if path == "rollout.pp" and (layout.dp > 1 or layout.sleep or spec.engine.routing_replay):
            return STAGES_APART
        if path == "rollout.pp" and not on_a_cpu:
            return STAGES
        if path == "rollout.ep" and layout.experts_over_copies:
            return EXPERTS_OF_COPIES_ON_A_CPU if on_a_cpu else EXPERTS_OF_COPIES
        return SETTINGS[path] if path in SETTINGS else self.supports(FEATURES.get(path, "vllm"))

    def shares_processors(self, spec: RunSpec) -> bool:
        """Return whether its workers, more than there are ranks, share a machine's processors."""
        layout = spec.cluster.rollout
        there = layout.device == "cpu" or spec.engine.device in ("cpu", "auto")
        return there and spec.rollout_ranks < layout.devices

    def shrunk_device(self, engine: EngineConfig, layout: RolloutSettings) -> SamplerDevice:
        """Return "cpu" beside a stand-in for an NPU, which vLLM does not know; else the run's own choice."""
        return "cpu" if engine.device == "npu" else layout.device

    def seen_here(self, spec: RunSpec) -> list[str]:
        """Return the line on vLLM's plugin for NPUs, where vLLM computes on them."""
        return [_vllm_ascend()] if _on_npus(spec) else []


def vllm_weights(shape: ModelShape, layout: RolloutSettings) -> float:
    """Return the bytes of a worker's weights: its part of each matrix, and of the experts."""
    count = count_parameters(shape)
    sharers = layout.tp if layout.ep == 1 else max(layout.tp, layout.ep)
    held = stage_share(shape, layout)
    dense = (count.embeddings + held * count.dense + tower_parameters(shape)) / layout.tp
    return DISK * (dense + held * count.experts / sharers)


def stage_share(shape: ModelShape, layout: RolloutSettings) -> float:
    """Return the share of the layers that the longest of its stages has."""
    return math.ceil(shape.layers / layout.pp) / shape.layers


def _on_npus(spec: RunSpec) -> bool:
    return (spec.engine.device, spec.cluster.rollout.device) == ("npu", "auto")


def _shared(spec: RunSpec, states: States, trains: float, stays: float, memory: float) -> LinesAndProblems:
    """Return the line and problems of devices with `memory` that training, which fills `trains` of it at most, and vLLM
    share, all in GiB; `stays` is taken beside either. The larger turn has to fit the device."""
    layout, offload, alone = spec.cluster.rollout, spec.cluster.offload, trains < memory
    share = layout.copies_per_device * layout.memory_share * memory
    samples = share + stays + (0.0 if offload else states.device / GIB)
    trains += stays + (ASLEEP * layout.copies_per_device if layout.sleep else share)
    beside = "asleep" if layout.sleep else "beside it"
    rests = "training on the host" if offload else "training's states beside it"
    line = f"of {memory:g} GiB of a device {trains:.1f} are taken in training's turn (vLLM {beside}), {samples:.1f} in "
    problems = []
    if alone and trains >= memory:
        fix = "lower --rollout.gpu-memory-utilization" + ("" if layout.sleep else ", or set --rollout.sleep")
        problems.append(
            f"{trains:.0f} GiB in training's turn, vLLM's share {beside}, do not fit a device of {memory:g} GiB: {fix}"
        )
    if samples >= memory:
        fix = "lower --rollout.gpu-memory-utilization" + ("" if offload else ", or set --offload")
        problems.append(f"{samples:.0f} GiB in vLLM's turn, {rests}, do not fit a device of {memory:g} GiB: {fix}")
    return [f"{line}vLLM's ({rests})"], problems


def _vllm_ascend() -> str:
    """Return the line on vLLM's plugin for NPUs, whose version an interpreter of vLLM's environment reports."""
    from rollout.vllm.client.process import find_python  # vLLM's modules, which other plans do without
    from rollout.vllm.server.ascend import PACKAGE, refuse_other_versions  # the same
    from rollout.vllm.settings.config import VllmConfig  # the same

    program = f"""
from importlib.metadata import PackageNotFoundError, version
try:
    print(version({PACKAGE!r}))
except PackageNotFoundError:
    pass
"""
    try:
        python = find_python(VllmConfig())
        answer = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        installed = answer.stdout.strip() or None
        refuse_other_versions(installed)
    except (ValueError, OSError, subprocess.TimeoutExpired) as error:
        return f"missing: {error}"
    return f"vllm-ascend {installed} in the environment of {python}"
