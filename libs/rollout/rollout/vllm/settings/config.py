"""The settings of a vLLM engine, checked when they are made."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.length_limit import longest_of
from rollout.node_place import NodePlace
from rollout.vllm.limits.cpu import chosen_dtype
from rollout.vllm.settings.arguments import OWNED, numeric_arguments

if TYPE_CHECKING:  # whose field these settings are
    from rollout.config import RolloutConfig

DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICES = ("auto", "cpu")
COUNTS = (
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "nodes",
    "copies_per_device",
    "kv_cache_gib",
    "threads",
)
SWITCHES = (
    "expert_parallel",
    "experts_over_copies",
    "prefix_cache",
    "split_prompts",
    "drop_seeds",
    "weights_on_device",
    "sleep",
)


@dataclass(frozen=True)
class VllmConfig:
    """Settings of vLLM beyond a `RolloutConfig`."""

    python: str | None = None
    """Interpreter of an environment that has vLLM; None: $TESSERA_VLLM_PYTHON, else the one that runs here."""
    dtype: str = "auto"
    """Dtype that the model computes in; "auto": bfloat16 where the model has delta nets, else the model's own."""
    tensor_parallel: int = 1
    """Number of workers, each a process with a device of its own, that share each matrix."""
    pipeline_parallel: int = 1
    """Number of stages of layers, each of `tensor_parallel` workers; of one copy of the model, on a CPU."""
    data_parallel: int = 1
    """Number of copies of the model."""
    nodes: int = 1
    """Number of machines that the workers are spread over, as many on each; a process there starts them."""
    copies_per_device: int = 1
    """Number of copies that share an accelerator, each in a process whose CPU work between kernels overlaps with the
    others': for models so small that a device waits for it. Each takes its own `memory_share`."""
    expert_parallel: bool = False
    """Whether workers have whole experts, instead of a part of each one."""
    experts_over_copies: bool = False
    """With `expert_parallel`: experts are spread over the workers of all copies, which make each step together then,
    and end together; on a CPU."""
    prefix_cache: bool = False
    """Whether the states of common beginnings of prompts are cached; prompts are read in parts then."""
    split_prompts: bool = False
    """Whether a long prompt is read in several steps, of `RolloutConfig.prefill_tokens` tokens each, while other
    requests go on. Where prompts are read in parts, requests can't have a seed (on a CPU)."""
    drop_seeds: bool = False
    """Whether the seeds of all requests are dropped: such runs don't repeat. A CPU that reads prompts in parts refuses
    seeds; on an accelerator vLLM launches a kernel for each token of a request that has one (its `random_sample`)."""
    memory_share: float | None = None
    """Share of an accelerator's memory for weights and caches; None: vLLM's own. A CPU has `kv_cache_gib`."""
    graph_sizes: tuple[int, ...] | None = None
    """Numbers of decoding requests whose step is captured as a CUDA graph and replayed; others run layer by layer.
    None: on CUDA up to as many as decode together, elsewhere and where experts are told none."""
    weights_on_device: bool = False
    """Whether new weights pass through two sets of them in the memory of the accelerator that trainer and vLLM share
    (CUDA IPC), instead of two in host memory: faster there, for models small beside the device."""
    sleep: bool = False
    """Whether vLLM can free the device's memory between two rounds of sampling; it refuses that on a CPU."""
    kv_cache_gib: int = 1
    """GiB of memory of each worker for the caches of running requests (on a CPU)."""
    threads: int = 1
    """Number of threads of each worker on a CPU; more are slower where other work runs."""
    start_seconds: float = 300.0
    """Most seconds until the process is ready."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of vLLM's EngineArgs by name; an unknown name is refused at the start."""
    device: str = "auto"
    """"auto": what the vLLM of that environment was built for; "cpu": one that finds another device is refused."""

    def __post_init__(self) -> None:
        if self.python is not None and not self.python.strip():
            raise ValueError("python must name an interpreter, or be left out")
        if self.device not in DEVICES:
            raise ValueError(f"device is one of {', '.join(DEVICES)}, got {self.device!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for name in COUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is true or false, got {getattr(self, name)!r}")
        self._check_experts()
        if self.pipeline_parallel > 1:
            self._check_stages()
        if self.nodes > 1:
            self._check_nodes()
        if self.copies_per_device > 1:
            self._check_shared_devices()
        if self.weights_on_device and self.devices > 1:
            raise ValueError(
                f"weights_on_device is for one device, the trainer's, and vLLM spans {self.devices}: leave it out"
            )
        if not 0 < self.start_seconds < float("inf"):
            raise ValueError(f"start_seconds must be above 0 and finite, got {self.start_seconds}")
        if self.memory_share is not None and not 0 < self.memory_share < 1:
            raise ValueError(f"memory_share must lie between 0 and 1, got {self.memory_share!r}")
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in self.graph_sizes or ()):
            raise ValueError(f"graph_sizes are whole numbers of at least 1, got {self.graph_sizes!r}")
        for name in self.arguments:
            if name in OWNED:
                raise ValueError(f"arguments can't hold {name!r}: {OWNED[name]}")
        try:
            json.dumps(dict(self.arguments))
        except TypeError as error:
            raise ValueError(f"arguments must be plain values that JSON can hold: {error}") from error

    def _check_experts(self) -> None:
        if self.expert_parallel and self.tensor_parallel == 1 and not self.experts_over_copies:
            raise ValueError("expert_parallel has no effect on one worker, which has all experts: set tensor_parallel")
        if not self.experts_over_copies:
            return
        if not self.expert_parallel:
            raise ValueError("experts_over_copies deals whole experts: set expert_parallel=True with it")
        if self.data_parallel == 1:
            raise ValueError("experts_over_copies has no effect on one copy: set data_parallel, or leave it off")
        if self.copies_per_device > 1:
            raise ValueError("copies that share experts never shared a device: set copies_per_device=1")
        if self.arguments.get("async_scheduling"):
            raise ValueError("copies that share experts make each step together: leave async_scheduling out")

    def _check_nodes(self) -> None:
        if self.workers % self.nodes:
            raise ValueError(
                f"{self.workers} workers (tensor_parallel x pipeline_parallel) can't be spread evenly over "
                f"{self.nodes} machines (nodes): use a multiple of it"
            )
        if self.data_parallel > 1 or self.sleep:
            raise ValueError("a model over several machines (nodes) is one copy that never sleeps: leave both out")

    def _check_stages(self) -> None:
        if self.data_parallel > 1 or self.sleep:
            raise ValueError("a model in stages (pipeline_parallel) is one copy that never sleeps: leave both out")
        for name in ("async_scheduling", "speculative_config"):
            if self.arguments.get(name):
                raise ValueError(f"a model in stages (pipeline_parallel) never ran with {name}: leave it out")

    def _check_shared_devices(self) -> None:
        each, copies = self.copies_per_device, self.data_parallel
        if self.tensor_parallel > 1:
            raise ValueError("copies that share a device have one worker each: set tensor_parallel=1")
        if copies % each:
            raise ValueError(
                f"{copies} copies (data_parallel) do not fill devices of {each} copies each (copies_per_device)"
            )
        if self.memory_share is not None and each * self.memory_share >= 1:
            raise ValueError(
                f"{each} copies on a device take {each * self.memory_share:.0%} of its memory: lower memory_share"
            )

    @property
    def devices(self) -> int:
        """Number of devices that all copies need."""
        return self.workers * self.data_parallel // self.copies_per_device

    @property
    def workers(self) -> int:
        """Number of workers of each copy of the model."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def reads_in_parts(self) -> bool:
        """Whether a prompt may be read in more than one step; a hybrid's prefix cache needs it."""
        return self.prefix_cache or self.split_prompts


def check_routed_experts(config: "RolloutConfig") -> None:
    """Raise ValueError where the experts of tokens are asked for and could not be told."""
    if not config.routed_experts:
        return
    if config.vllm.pipeline_parallel > 1:
        raise ValueError("routed_experts are asked of one worker, and each stage has its own: no pipeline_parallel")
    if config.vllm.experts_over_copies and config.vllm.tensor_parallel > 1:
        raise ValueError(
            "routed_experts can't be told where copies of several workers share experts, as each worker routes a "
            "part of the tokens: set tensor_parallel=1, or leave experts_over_copies off"
        )
    if config.vllm.graph_sizes or config.vllm.arguments.get("enforce_eager") is False:
        raise ValueError(
            "routed_experts are noted by Python between layers, which a graph leaves out: no graph_sizes, and no "
            "enforce_eager=false"
        )
    if config.vllm.arguments.get("async_scheduling"):
        raise ValueError("routed_experts are asked for after each step: leave async_scheduling out")
    if config.vllm.arguments.get("speculative_config"):
        raise ValueError("routed_experts count a token a step: leave speculative_config out")


def numeric_settings(config: VllmConfig) -> dict[str, str]:
    """Return the settings that change numbers as NAME=VALUE, each with its kind (see `numeric_arguments`)."""
    typed = ("dtype", "tensor_parallel", "expert_parallel", "prefix_cache", "split_prompts", "graph_sizes")
    changed = [name for name in typed if getattr(config, name) != getattr(VllmConfig, name)]
    named = {f"{name}={getattr(config, name)}": "rounding" for name in changed}
    return named | numeric_arguments(config.arguments)


def engine_arguments(
    config: "RolloutConfig", model: Path, hf_config: Mapping[str, Any], place: NodePlace | None = None
) -> dict[str, Any]:
    """Return vLLM's engine arguments for a model's directory, whose config's text part is `hf_config`.

    `place`: of this process among the machines that the engine spans.
    """
    own, longest = config.vllm, longest_of(hf_config, config.max_length)
    arguments = {
        "model": str(model),
        "dtype": chosen_dtype(hf_config, own.dtype),
        "max_model_len": longest,
        "max_num_seqs": config.max_batch,
        "max_num_batched_tokens": max(config.prefill_tokens, config.max_batch, 0 if own.split_prompts else longest),
        "enable_prefix_caching": own.prefix_cache,
        "enable_chunked_prefill": own.reads_in_parts,
        "enable_sleep_mode": own.sleep,
        "tensor_parallel_size": own.tensor_parallel,
        "pipeline_parallel_size": own.pipeline_parallel,
        "distributed_executor_backend": "mp" if own.workers > 1 else "uni",
        "enable_expert_parallel": own.expert_parallel,
        "seed": config.seed,
    }
    if place is not None:
        names = ("node_rank", "nnodes", "master_addr", "master_port")
        arguments |= {name: getattr(place, name) for name in names}
    if config.tokenizer is not None:
        arguments["tokenizer"] = str(config.tokenizer)
    return {**arguments, **accelerator_arguments(own, config.routed_experts), **own.arguments}


def accelerator_arguments(config: VllmConfig, eager: bool = False) -> dict[str, Any]:
    """Return the engine arguments for accelerators: memory, and graphs of steps that only decode, uncompiled.

    Without `enforce_eager` among them the kind of device decides on graphs (`rollout.vllm.server.platforms`); `eager`:
    there are none.
    """
    arguments: dict[str, Any] = {}
    if config.graph_sizes:
        arguments = decode_graphs(config.graph_sizes)
    elif eager or config.graph_sizes is not None:
        arguments["enforce_eager"] = True
    if config.memory_share is not None:
        arguments["gpu_memory_utilization"] = config.memory_share
    return arguments


def decode_graphs(sizes: Iterable[int]) -> dict[str, Any]:
    """Return the engine arguments for graphs of steps in which so many requests decode."""
    graphs = {"mode": "NONE", "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted(set(sizes))}
    return {"enforce_eager": False, "compilation_config": graphs}


def text_config(model: Path) -> dict[str, Any]:
    """Return the config.json of a model directory, or its text part where it has several.

    Raises:
        ValueError: the directory has none.
    """
    path = model / "config.json"
    if not path.is_file():
        raise ValueError(f"{model} is no model directory: it has no config.json")
    config = json.loads(path.read_text())
    return {**config, **config.get("text_config", {})}
