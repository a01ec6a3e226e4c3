"""Settings of runs over many devices: pools, rollout, schedule, offload, media. Defaults are one process; how the
model is spread over training ranks is the engine's (`engines.EngineConfig`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, get_args

from apps.common.named_values import named_values
from apps.common.samplers import check_sampler, owners_of, sampler_backend, sampler_plan
from engines import EngineConfig
from schedules.config import ScheduleConfig

if TYPE_CHECKING:  # slow to load, and a command line needs none of it
    from runplan.samplers.base import SamplerPlan
    from schedules.backend import SamplerBackend

Placement = Literal["colocated", "separate"]
Admit = Literal["rounds", "any_step"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
SamplerDevice = Literal["auto", "cpu"]
WeightTransport = Literal["auto", "objects", "gloo", "nccl", "hccl"]
VLLM_FLAG = "--rollout.vllm"


@dataclass(frozen=True)
class Pools:
    """The machines of a run; `--nproc-per-node` is the number of ranks on each."""

    nodes: int = 1
    """Machines that train."""
    placement: Placement = "colocated"
    """Training and sampling take turns on the same devices, or each has its own."""
    rollout_nodes: int = 0
    """Machines that sample, where the placement is "separate"."""
    device_memory_gib: float | None = None
    """Memory of a device; the plan holds weights, gradients and optimizer states against it."""

    def __post_init__(self) -> None:
        _refuse(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield a text for each problem, which begins with a field's name."""
        wrong = [
            *_other(self, "placement", Placement),
            *_below(self, 1, "nodes"),
            *_below(self, 0, "rollout_nodes"),
        ]
        if self.device_memory_gib is not None and not 0 < self.device_memory_gib < 4096:
            wrong.append(f"device_memory_gib must lie between 0 and 4096, got {self.device_memory_gib}")
        yield from wrong
        if not wrong and (self.placement == "separate") != (self.rollout_nodes > 0):
            yield 'placement "separate" needs rollout_nodes above 0, and "colocated" has none of its own'


@dataclass(frozen=True)
class RolloutLayout:
    """The sampling engine and its spread over devices."""

    engine: str = "native"
    """"native" samples with the training framework itself, "vllm" with vLLM; "openai", a server, can't take a run's
    weights. FILE.py:NAME or package.module:NAME is a `schedules.SamplerBackend` of your own."""
    tp: int = 1
    """Workers that share each matrix."""
    dp: int = 1
    """Copies of the model in one engine."""
    copies_per_device: int = 1
    """Copies (dp) that share a device, each a process that takes a memory_share of its own: for a model so small that
    the device waits for the processor's work on each step of vLLM."""
    ep: int = 1
    """Whole experts are dealt to the tp workers of each copy, to all tp x dp workers, or to none (1)."""
    memory_share: float = 0.0
    """Share of device memory that the engine takes for weights and cache; 0: on GPUs that training shares what the plan
    leaves, else the engine's own."""
    max_model_tokens: int | None = None
    """Longest sequence that the engine accepts; without it prompt and response together."""
    max_batched_tokens: int | None = None
    """Tokens of one forward pass of the engine."""
    chunked_prefill: bool = False
    """Read a long prompt in pieces, beside responses that are sampled (vLLM)."""
    prefix_cache: bool = False
    """Keep what was computed for prompts that begin alike (vLLM)."""
    cuda_graph_sizes: tuple[int, ...] | None = None
    """Batch sizes whose decoding is captured as graphs. Without it on GPUs up to max_requests; no number: none."""
    ray_workers: int = 0
    """Samplers in actors of a Ray cluster, in place of the run's own process; 0 leaves Ray alone."""
    ray_cpus: float = 1.0
    """Processors that each of them has to itself."""
    ray_gpus: float | None = None
    """CUDA devices that each of them has to itself. Without it, where samplers compute on CUDA, as many as its engine
    spans: 1, or vLLM's tp x dp; on a CPU none. A cluster that the run starts hands out those that no rank trains on."""
    ray_nodes: int = 1
    """Machines that each of them spans, with an equal part of its tp x pp workers and of its devices on each (vLLM)."""
    ray_address: str | None = None
    """The cluster's HOST:PORT; without it $RAY_ADDRESS, else one of this machine that lives as long as the run."""
    weight_transport: WeightTransport = "auto"
    """What new weights reach Ray's samplers through. "objects": Ray's store, in host memory, once a machine. "gloo": a
    broadcast over sockets, from host memory to host memory. "nccl": a broadcast from the trainer's CUDA device to that
    of each sampler. "auto": "nccl" where all of them have CUDA devices of their own on this machine, else "objects".
    Beyond this machine a broadcast's sockets have no secret, unlike Ray's. "hccl" (NPUs): nobody has run it."""
    admit: Admit | None = None
    """When the native engine lets a request begin: beside whatever runs ("any_step"), or with all that were asked while
    the last ones ran ("rounds"), in which equal runs give equal bits. Without it in rounds, fully_async at any step."""
    kv_cache_memory_gib: float | None = None
    """Memory of the native engine's caches: of running requests, each with all tokens that it may have, of prompts, and
    of the prefix cache. Requests wait for room. Without it what the plan leaves, where they might need more."""
    dtype: Dtype = "auto"
    """What vLLM computes in; "auto": bfloat16 where the model has delta nets, else the model's own."""
    max_requests: int | None = None
    """Requests that vLLM decodes together."""
    weights_on_device: bool = False
    """Hand vLLM new weights through two sets of them in the memory of the CUDA device that it shares with training, in
    place of two in host memory: sooner, for models small beside the device."""
    vllm: tuple[str, ...] = ()
    """Further engine arguments of vLLM, as NAME=VALUE (block_size=32); one that it does not have is refused."""
    sleep: bool = False
    """vLLM gives back the memory of its weights and caches while the devices that it shares train; new weights wait
    where they are staged (mode sync). With --offload training gives back its own while answers are sampled."""
    device: SamplerDevice = "auto"
    """What vLLM computes on; "auto": what training has. "cpu", beside any device that trains: new weights pass through
    host memory either way."""
    engine_options: tuple[str, ...] = ()
    """NAME=VALUE options of a sampler of your own, by the arguments of its class."""
    pp: int = 1
    """Stages of layers, one after another, each of tp workers (vLLM on a CPU)."""

    def __post_init__(self) -> None:
        _refuse(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield a text for each problem, most of which begin with a field's name."""
        counts = ("tp", "pp", "dp", "copies_per_device", "ep", "max_model_tokens", "max_batched_tokens", "max_requests")
        ray = [*_below(self, 1, "ray_nodes"), *_below(self, 0, "ray_workers")]
        wrong = [*_below(self, 1, *counts), *ray, *self._out_of_range()]
        # what is wrong together may follow from a value that is wrong alone: that is told first
        yield from wrong or self._beside_each_other()

    def _out_of_range(self) -> Iterator[str]:
        """Yield a text for each field whose value is wrong whatever the others are."""
        for name, choices in (("dtype", Dtype), ("device", SamplerDevice)):
            yield from _other(self, name, choices)
        try:
            check_sampler(self.engine, self.engine_options)
        except ValueError as error:
            yield str(error)
        if self.admit is not None:
            yield from _other(self, "admit", Admit)
        try:
            named_values(VLLM_FLAG, self.vllm, "block_size=32")
        except ValueError as error:
            yield str(error)
        if not 0 < self.ray_cpus < float("inf"):
            yield f"ray_cpus must be above 0 and finite, got {self.ray_cpus}"
        if self.ray_gpus is not None and not 0 <= self.ray_gpus < float("inf"):
            yield f"ray_gpus must be at least 0 and finite, got {self.ray_gpus}"
        yield from _other(self, "weight_transport", WeightTransport)
        if self.weight_transport == "hccl":
            yield 'weight_transport "hccl": nobody has run weights between NPUs; use "objects" or "gloo"'
        if self.ray_address is not None and not self.ray_address.strip():
            yield "ray_address is empty: leave it out"
        if self.kv_cache_memory_gib is not None and not 0 < self.kv_cache_memory_gib < float("inf"):
            yield f"kv_cache_memory_gib must be above 0 and finite, got {self.kv_cache_memory_gib}"
        if not 0 <= self.memory_share < 1:
            yield f"memory_share must lie in [0, 1), got {self.memory_share}"
        if any(size < 1 for size in self.cuda_graph_sizes or ()):
            yield f"cuda_graph_sizes must be at least 1 each, got {self.cuda_graph_sizes}"

    def _beside_each_other(self) -> Iterator[str]:
        """Yield a text for each set of fields that exclude each other."""
        if self.vllm and "vllm" not in sampler_plan(self.engine, self.engine_options).own_settings:
            others = " or ".join(map(repr, owners_of("vllm")))
            yield f"{VLLM_FLAG} has no effect with engine {self.engine!r}: leave it out, or use engine {others}"
        elif self.vllm:
            yield from self.backend.layout_problems(self)
        idle = {"ray_cpus": 1.0, "ray_gpus": None, "ray_nodes": 1, "ray_address": None, "weight_transport": "auto"}
        if not self.ray_workers and (said := [name for name, usual in idle.items() if getattr(self, name) != usual]):
            yield f"{', '.join(said)}: no effect without ray_workers, say how many"
        if self.weight_transport == "nccl" and self.ray_gpus is not None and self.ray_gpus < 1:
            yield f'weight_transport "nccl" needs a whole device for each sampler, and ray_gpus is {self.ray_gpus}'
        if self.tp * self.pp % self.ray_nodes:
            workers = f"tp {self.tp}" if self.pp == 1 else f"tp x pp = {self.tp * self.pp}"
            yield f"{workers} is no multiple of ray_nodes {self.ray_nodes}, over which its workers are spread evenly"
        if self.ep not in (1, self.tp, self.tp * self.dp):
            sizes = f"1, tp = {self.tp} or tp x dp = {self.tp * self.dp}"
            yield f"rollout ep must be {sizes}, got {self.ep}: set it to {self.tp * self.dp}"
        if self.copies_per_device > 1:
            yield from self._shared_devices()

    def _shared_devices(self) -> Iterator[str]:
        """Yield a text for each problem of copies that share a device."""
        each = self.copies_per_device
        if self.dp % each:
            yield (
                f"{self.dp} copies do not fill devices of {each} each (--rollout.copies-per-device): make "
                f"--rollout.data-parallel a multiple of {each}"
            )
        if each * self.memory_share >= 1:
            yield (
                f"{each} copies on a device take {each * self.memory_share:.0%} of its memory: lower "
                f"--rollout.gpu-memory-utilization below {1 / each:.2g}"
            )

    @property
    def backend(self) -> SamplerBackend:
        """The sampler, with its options."""
        return sampler_backend(self.engine, self.engine_options)

    @property
    def experts_over_copies(self) -> bool:
        """Whether each copy has a part of the experts, over the workers of all."""
        return self.ep > self.tp

    @property
    def devices(self) -> int:
        """The number of devices that one engine spans."""
        return self.tp * self.pp * self.dp // self.copies_per_device

    def ranks_each(self, ranks: int) -> int:
        """Return how many of `ranks` training ranks sample through one engine: as many as it spans, or one pool."""
        if self.ray_workers:
            return ranks
        return min(self.devices, ranks) if self.backend.spans_ranks else 1


@dataclass(frozen=True)
class Media:
    """The columns of samples that hold more than text."""

    images_column: str | None = None
    """Column of a file of rows that holds images, one or a list; without it the column "images", where there is one."""

    def __post_init__(self) -> None:
        if self.images_column == "":
            raise ValueError("images_column must name a column, or be left out")


@dataclass(frozen=True)
class Cluster:
    """The settings that a run on one process does not need."""

    pools: Pools = field(default_factory=Pools)
    rollout: RolloutLayout = field(default_factory=RolloutLayout)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    offload: bool = False
    """Keep training's weights, gradients and optimizer states in host memory while answers are sampled (mode sync)."""
    media: Media = field(default_factory=Media)
    env: tuple[str, ...] = ()
    """Environment variables that the recipe owns, as NAME=value; set before anything is imported."""

    def __post_init__(self) -> None:
        _refuse(self.problems())

    def problems(self) -> Iterator[str]:
        """Return a text for each problem that is not of one of the parts."""
        return self.out_of_range()

    def out_of_range(self) -> Iterator[str]:
        """Yield the same texts: no such problem depends on a part."""
        names = [entry.partition("=")[0] for entry in self.env]
        for entry, name in zip(self.env, names, strict=True):
            if "=" not in entry or not name.isidentifier() or not entry.isascii() or " " in entry:
                yield f"env entries are NAME=value without blanks, got {entry!r}"
        if len(set(names)) < len(names):
            yield f"env names a variable twice: {', '.join(names)}"

    @property
    def changed(self) -> list[tuple[str, Any]]:
        """Dotted names of the fields that are not at their defaults, each with its value."""
        return [(path, attrgetter(path)(self)) for path in changed_fields(self)]

    @property
    def sampler(self) -> SamplerPlan:
        """Sampler in a plan."""
        return sampler_plan(self.rollout.engine, self.rollout.engine_options)

    def weights_apart(self, engine: EngineConfig) -> str | None:
        """Return what `kept_apart` does."""
        return kept_apart(engine, self)


def kept_apart(engine: EngineConfig, cluster: Cluster) -> str | None:
    """Return why the native sampler can't compute with its training process's weights; None where it can."""
    mode = cluster.schedule.mode
    if not cluster.sampler.in_process or cluster.rollout.ray_workers or mode == "fully_async":
        return "it is in a process of its own"
    if mode != "sync":
        return f"{mode} samples by earlier weights while these are trained"
    if cluster.offload:
        return "training's weights are in host memory while answers are sampled"
    if engine.device == "npu":
        return "shared weights have not been run on an NPU"
    return None


def _refuse(problems: Iterator[str]) -> None:
    if text := "; ".join(problems):
        raise ValueError(text)


def _below(config: Any, least: int, *names: str) -> Iterator[str]:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            yield f"{name} must be at least {least}, got {value}"


def _other(config: Any, name: str, choices: Any) -> Iterator[str]:
    value = getattr(config, name)
    if value not in get_args(choices):
        yield f"{name} must be one of {', '.join(map(repr, get_args(choices)))}, got {value!r}"


def changed_fields(cluster: Cluster) -> list[str]:
    """Return the dotted names of the fields that are not at their defaults, in order of definition."""
    return _changed(cluster, Cluster(), "")


def _changed(config: Any, default: Any, prefix: str) -> list[str]:
    names: list[str] = []
    for item in fields(config):
        value, usual = getattr(config, item.name), getattr(default, item.name)
        name = prefix + item.name
        if is_dataclass(value):
            names += _changed(value, usual, f"{name}.")
        elif value != usual:
            names.append(name)
    return names
