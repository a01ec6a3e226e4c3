"""The native sampler in a plan: a whole model on each device, or training's own weights in place."""

from collections.abc import Iterable, Iterator

from engines import EngineConfig
from engines.capability import Supported, Unsupported
from engines.fast.settings import replication_refusal
from rollout.capability import backend_supports
from rollout.config import KEEP_TOKENS
from runplan.estimates.buffers import DISK, Buffer, cache_bytes, largest_tensor, state_bytes, total_parameters
from runplan.estimates.peak_memory import Peak
from runplan.estimates.states import GIB, States, width_of
from runplan.estimates.sync_rates import ON_DEVICE, SyncRate
from runplan.model.adapters import (
    LinearSizes,
    adapted_elements,
    adapter_parameters,
    attention_linears,
    delta_net_linears,
    mlp_linears,
    syncs_adapters,
)
from runplan.model.model_shape import ModelShape
from runplan.run_spec import RunSpec
from runplan.samplers.base import SamplerPlan
from runplan.samplers.pool_lines import LinesAndProblems, gib
from runplan.settings import ClusterSettings, RolloutSettings
from seqpack.memory import names as ledger

NO_OPTIONS = Unsupported("the native engine holds a whole model on each device and has no options of its own")
BOUND_CACHES = Supported("rollout/native/scheduler/memory_bound_test.py")
ADMIT = Supported("apps/grpo/sampling/native_test.py")
ADMIT_ROUNDS = Unsupported(
    "the samplers of fully_async let requests begin at any step: leave it out, or use another schedule"
)


class NativePlan(SamplerPlan):
    """Native sampler in a plan."""

    in_process = True

    def buffers(self, shape: ModelShape, layout: RolloutSettings, width: int) -> list[Buffer]:
        """Return its weights, and the second set that a weight sync stages."""
        del layout
        whole = float(width * total_parameters(shape))
        return [
            Buffer("weights", device=whole, always=True),
            Buffer("staged weights", device=whole + width * largest_tensor(shape)),
        ]

    def held(self, spec: RunSpec, shape: ModelShape) -> list[Buffer]:
        """Return its weights and the copies that it derives from them, staged weights and caches."""
        width, engine = width_of(spec.engine), spec.engine
        shared = self.shares_weights(spec)
        whole = 0.0 if shared else float(width * total_parameters(shape))
        staged = whole
        if syncs_adapters(engine.lora):  # the base of adapted layers, their sums, and the pairs
            layers = adapted_elements(shape, engine.lora)
            staged = 2.0 * width * layers + 4 * adapter_parameters(shape, engine.lora)
        joined = joined_elements(shape) * width * (2 if engine.device == "cpu" else 1)
        return [
            Buffer(ledger.SAMPLER_WEIGHTS, device=whole + joined, always=True, note="training's" if shared else ""),
            Buffer(ledger.SAMPLER_STAGED, device=staged, note="in a weight sync"),
            Buffer(ledger.SAMPLER_CACHES, device=_bound_bytes(spec, shape, width), note="at most"),
        ]

    def pool(self, spec: RunSpec, shape: ModelShape, states: States, peak: Peak) -> LinesAndProblems:
        """Return where its weights are; their bytes are in the memory table."""
        if spec.cluster.rollout.ray_workers:
            return super().pool(spec, shape, states, peak)
        text = "training's own, in place" if self.shares_weights(spec) else "a copy of its own"
        return [f"weights of each sampler: {text}"], list(_too_long(spec, shape))

    def shares_weights(self, spec: RunSpec) -> bool:
        """Return whether it computes with training's weights in place."""
        return shares_weights(spec.engine, spec.cluster, spec.ranks, spec.shards)

    def own_sync_rate(self, spec: RunSpec) -> SyncRate | None:
        """Return the rate to another process on the same device: copies are made on the device, and checked, too."""
        del spec
        return ON_DEVICE

    def supports(self, feature: str) -> Supported | Unsupported:
        """Return whether it has a feature of rollout's engines."""
        return backend_supports("native", feature)

    def own_setting(self, spec: RunSpec, path: str) -> Supported | Unsupported:
        """Return whether a changed rollout setting has an effect on it."""
        if path == "rollout.kv_cache_memory_gib":
            return BOUND_CACHES
        if path != "rollout.admit":
            return NO_OPTIONS
        ahead = spec.cluster.schedule.mode == "fully_async" and spec.cluster.rollout.admit == "rounds"
        return ADMIT_ROUNDS if ahead else ADMIT


MAX_ROWS = 512
"""Rows that decode together at most, by default (`rollout.NativeEngine`)."""
PREFILL_TOKENS = 16384
"""Prompt tokens of its prefill cache at most, by default."""
LEAN = ("qwen3_5", "qwen3", "qwen2", "llama", "mistral")
"""Model types that its lean decoder reads, or their beginnings."""


def joined_elements(shape: ModelShape) -> int:
    """Count the elements of small matrices that the lean decoder joins to larger ones, copies of the module's."""
    if shape.experts or not shape.model_type.startswith(LEAN):
        return 0
    every = [
        *shape.full_attention_layers * joined_inputs(attention_linears(shape)),
        *shape.linear_layers * joined_inputs(delta_net_linears(shape)),
        *shape.layers * joined_inputs(mlp_linears(shape)),
        shape.hidden * shape.vocab,
    ]
    from rollout.native.lean.model_weights import JOIN_ELEMENTS  # imports torch

    return sum(size for size in every if size <= JOIN_ELEMENTS)


def joined_inputs(linears: Iterable[LinearSizes]) -> list[int]:
    """Return the elements of the matrices of one mixer or MLP, those of one input together."""
    sums: dict[bool, int] = {}
    for name, inputs, outputs in linears:
        last = name in ("o_proj", "out_proj", "down_proj")
        sums[last] = sums.get(last, 0) + inputs * outputs
    return [*sums.values()]


def cached_bytes(spec: RunSpec, shape: ModelShape, width: int) -> float:
    """Return the bytes of all caches at most: slots of decoding rows (rows and lengths grow by doubling), the prefix
    cache, and the prefill cache with the logits after each prompt."""
    asked = max(spec.rows * spec.group, spec.held_out)
    if spec.cluster.schedule.mode != "sync":
        asked = MAX_ROWS  # groups of several steps are in flight
    rows = min(MAX_ROWS, asked)
    token = cache_bytes(shape, 1) * width / DISK
    state = state_bytes(shape, 1) * width / DISK
    slots = 2 * rows * (2 * spec.longest * token + state)
    prefill = min(PREFILL_TOKENS, rows * spec.longest) * token + rows * (state + shape.vocab * 4)
    kept = min(KEEP_TOKENS * token, rows * (spec.longest * token + state)) if token else rows * state
    return slots + prefill + kept


def _bound_bytes(spec: RunSpec, shape: ModelShape, width: int) -> float:
    """Return the bytes of all caches at most, within the bound that the settings name."""
    most, asked = spec.cluster.rollout.kv_cache_memory_gib, cached_bytes(spec, shape, width)
    return asked if most is None else min(asked, most * GIB)


def row_bytes(spec: RunSpec, shape: ModelShape) -> float:
    """Return the bytes of the keys, values and states of the longest sequence."""
    token, state = (of(shape, 1) * width_of(spec.engine) / DISK for of in (cache_bytes, state_bytes))
    return spec.longest * token + state


def _too_long(spec: RunSpec, shape: ModelShape) -> Iterator[str]:
    """Yield the problem of a request that has no room in the caches even alone: a slot, and what was read of it."""
    most, needed = spec.cluster.rollout.kv_cache_memory_gib, 2 * row_bytes(spec, shape) + 4 * shape.vocab
    if most is not None and needed > most * GIB:
        yield (
            f"a request of {spec.longest} tokens needs {gib(needed)} of the native sampler's caches, which may take "
            f"{gib(most * GIB)}: raise --rollout.kv-cache-memory-gib, or lower --max-episode-tokens"
        )


def shares_weights(engine: EngineConfig, cluster: ClusterSettings, ranks: int, shards: int) -> bool:
    """Return whether the native sampler computes with the trainer's weights in place.

    A run asks its engine itself (`engines.shared_parameters`). `shards`: ranks that share a copy of sharded weights.
    """
    if cluster.weights_apart(engine) is not None or engine.backend != "fsdp2" or engine.lora.rank:
        return False
    on_cpu = engine.device == "cpu"
    alone = engine.weights == "auto" and ranks == 1 and not on_cpu
    if (alone or engine.weights == "replicated") and replication_refusal(engine) is None:
        return True
    dtype = ("float32" if on_cpu else "bfloat16") if engine.dtype == "auto" else engine.dtype
    return shards == 1 and dtype == engine.master_dtype and (on_cpu or not engine.parameters_on_host)
