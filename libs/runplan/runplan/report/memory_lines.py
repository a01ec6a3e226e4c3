"""Lines on memory: of each training rank by part, of the hosts, of the pool that samples; and the problems."""

from collections.abc import Sequence

from runplan.estimates.buffers import (
    Buffer,
    cache_bytes,
    sampler_buffers,
    shares_weights,
    state_bytes,
    train_buffers,
    vllm_weights,
)
from runplan.estimates.logits import Head, fsdp_head, megatron_head
from runplan.estimates.peak_memory import Peak, activation_bytes, peak_memory, width_of
from runplan.estimates.states import GIB, States, fsdp_states, megatron_states, parameters_by_stage
from runplan.layout.grid import Grid
from runplan.model.model_shape import ModelShape, tower_parameters
from runplan.run_spec import RunSpec

SectionsAndProblems = tuple[dict[str, list[str]], list[str]]


def memory_lines(spec: RunSpec, shape: ModelShape, grid: Grid, layers: Sequence[int]) -> SectionsAndProblems:
    """Return sections by title, and problems with their fixes."""
    states = states_of(spec, shape, grid, layers)
    peak = peak_memory(shape, spec.engine, grid, layers, spec.shards)
    width, samples = width_of(spec.engine), spec.app == "grpo"
    copied = samples and not shares_weights(spec.engine, spec.cluster, spec.ranks, spec.shards)
    buffers = train_buffers(shape, spec.engine, states, max(layers), spec.cluster.offload, width, copied)
    sections = {
        "Memory": _device(spec, shape, grid, layers, states, peak),
        "Buffers": [f"{buffer.name}: {_places(buffer)}" for buffer in buffers],
        "Host": [_host(buffers, spec.processes, spec.ranks, "training")],
    }
    problems = _too_much(spec, states, peak)
    moved = max((b.device for b in buffers), default=0.0) + max(0.0, states.device - states.gradients)
    memory = spec.cluster.pools.device_memory_gib
    if memory is not None and peak.bytes / GIB < memory <= moved / GIB:
        problems.append(
            f"{moved / GIB:.0f} GiB of states and a tensor put together for the hand-over do not fit a device of "
            f"{memory:g} GiB: {_fewer(spec)}"
        )
    if samples:
        pool, more = _pool(spec, shape, width, states, peak)
        sections["Pool"] = pool
        problems += more
    return sections, problems


def states_of(spec: RunSpec, shape: ModelShape, grid: Grid, layers: Sequence[int]) -> States:
    """Return the states of the rank with the most on its device."""
    return max(states_by_stage(spec, shape, grid, layers), key=lambda states: states.device)


def states_by_stage(spec: RunSpec, shape: ModelShape, grid: Grid, layers: Sequence[int]) -> list[States]:
    """Return the states of a rank of each pipeline stage; FSDP2 has one."""
    engine, width = spec.engine, width_of(spec.engine)
    if engine.backend != "megatron":
        return [fsdp_states(shape, engine, spec.shards)]
    tower = tower_parameters(shape) if engine.vision != "off" else 0
    stages = enumerate(parameters_by_stage(shape, grid, layers))
    return [megatron_states(engine, grid, held, width, 0 if stage else tower) for stage, held in stages]


def _stages(spec: RunSpec, shape: ModelShape, grid: Grid, layers: Sequence[int]) -> list[str]:
    """Return a line for each of several stages, with the bytes on each of its ranks."""
    every, lines = states_by_stage(spec, shape, grid, layers), []
    for stage, (count, states) in enumerate(zip(layers, every, strict=True) if len(every) > 1 else ()):
        parts = f"weights {_gib(states.weights)} + gradients {_gib(states.gradients)}"
        parts += f" + optimizer {_gib(states.optimizer)}{_where(states)}"
        lines.append(f"stage {stage}, {count} layers: {parts} = {_gib(states.device + states.host)}")
    return lines


def _where(states: States) -> str:
    return " (all on the host)" if states.all_on_host else " (on the host)" if states.on_host else ""


def head_of(spec: RunSpec, shape: ModelShape, grid: Grid) -> Head:
    """Return the memory of the head for a full micro-batch every token of which trains."""
    engine, tokens, width = spec.engine, spec.engine.max_tokens_per_rank, width_of(spec.engine)
    if engine.backend == "megatron":
        return megatron_head(shape, engine, tokens, width, grid.tp)
    return fsdp_head(shape, engine, tokens, width)


def _logits(head: Head, tokens: int, grid: Grid) -> str:
    """Return how many tokens have logits at a time, and their bytes."""
    at_a_time = f"{head.rows} of {tokens} tokens at a time" if head.rows < tokens else f"all {tokens} tokens at once"
    where = " on the last stage" if grid.pp > 1 else ""
    line = f"logits and what is made of them{where}: {at_a_time}, {_gib(head.logits)}"
    return f"{line}; gradients of the head beside them {_gib(head.gradients)}"


def _device(
    spec: RunSpec, shape: ModelShape, grid: Grid, layers: Sequence[int], states: States, peak: Peak
) -> list[str]:
    engine, memory = spec.engine, spec.cluster.pools.device_memory_gib
    line = f"{_gib(states.device)} of {_named(states)} on the fullest rank"
    if memory is not None:
        line += f"; the device has {memory:g}"
    parts = f"weights {_gib(states.weights)}, gradients {_gib(states.gradients)}, optimizer {_gib(states.optimizer)}"
    tokens, width = engine.max_tokens_per_rank, width_of(engine)
    whole, again = (_gib(activation_bytes(shape, max(layers), tokens, how, width, grid.tp)) for how in (False, True))
    taken = f"{again}, layers computed again" if engine.gradient_checkpointing else f"{whole}, all kept"
    other = f"{whole} were all kept" if engine.gradient_checkpointing else f"{again} by --engine.gradient-checkpointing"
    return [
        line,
        parts + _where(states),
        *_stages(spec, shape, grid, layers),
        f"activations of a full micro-batch: {taken} ({other})",
        _logits(head_of(spec, shape, grid), tokens, grid),
        f"{_gib(peak.bytes)} at the fullest moment of a step ({peak.when})",
    ]


def _too_much(spec: RunSpec, states: States, peak: Peak) -> list[str]:
    memory = spec.cluster.pools.device_memory_gib
    if memory is None or peak.bytes / GIB < memory:
        return []
    if states.device / GIB >= memory:
        more = "" if states.on_host else ", or --engine.optimizer-on-host"
        states_text = f"{states.device / GIB:.0f} GiB of {_named(states)}"
        return [f"{states_text} do not fit a device of {memory:g} GiB: {_fewer(spec)}{more}"]
    problem = f"{peak.bytes / GIB:.0f} GiB at the fullest moment of a step ({peak.when}) do not fit a device of "
    fix = "lower --engine.max-tokens-per-rank, recompute layers (--engine.gradient-checkpointing)"
    return [f"{problem}{memory:g} GiB: {fix}, or {_fewer(spec)}"]


def _pool(spec: RunSpec, shape: ModelShape, width: int, states: States, peak: Peak) -> tuple[list[str], list[str]]:
    """Return lines and problems of the sampling devices, and of the processes that feed them."""
    layout, memory = spec.cluster.rollout, spec.cluster.pools.device_memory_gib
    if shares_weights(spec.engine, spec.cluster, spec.ranks, spec.shards):
        return ["weights of each sampler: training's own, in place"], []
    buffers = sampler_buffers(shape, layout, width)
    lines = [f"{buffer.name} of each sampler: {_places(buffer)}" for buffer in buffers]
    if layout.engine != "vllm":
        own = "a server" if layout.engine == "openai" else "a sampler"
        return lines or [f"{own} of its own: not planned"], []
    size = layout.devices
    samplers = max(1, spec.rollout_ranks // size)
    lines.append(_host(buffers, max(1, spec.processes // size), samplers, "sampling"))
    weights = vllm_weights(shape, layout)
    line = f"{_gib(weights)} of weights a device"
    if memory is None or not layout.memory_share:
        return [*lines, f"{line}; its cache takes what vLLM is let (--rollout.memory-share)"], []
    room = layout.memory_share * memory * GIB - weights
    if room <= 0:
        problem = (
            f"{weights / GIB:.0f} GiB of weights do not fit {layout.memory_share:.0%} of a device of {memory:g} GiB"
        )
        return [*lines, line], [f"{problem}: raise --rollout.tp, or --rollout.memory-share"]
    each, fixed = cache_bytes(shape, layout.tp), state_bytes(shape, layout.tp)
    fits = int(room / (each * spec.longest + fixed))
    lines.append(f"{line}, {_gib(room)} for caches, graphs and activations: {fits} sequences of {spec.longest} tokens")
    if spec.cluster.pools.placement == "separate":
        return lines, []
    staged = sum(buffer.device for buffer in buffers) / GIB
    turns, problems = _shared(spec, states, peak.bytes / GIB, staged, memory)
    return [*lines, *turns], problems


ASLEEP = 2.0
"""GiB that vLLM keeps of a device while it sleeps, its context and graphs: 1.9 on an H200 (vLLM 0.26)."""


def _shared(spec: RunSpec, states: States, trains: float, stays: float, memory: float) -> tuple[list[str], list[str]]:
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
        fix = "lower --rollout.memory-share" + ("" if layout.sleep else ", or set --rollout.sleep")
        problems.append(
            f"{trains:.0f} GiB in training's turn, vLLM's share {beside}, do not fit a device of {memory:g} GiB: {fix}"
        )
    if samples >= memory:
        fix = "lower --rollout.memory-share" + ("" if offload else ", or set --offload")
        problems.append(f"{samples:.0f} GiB in vLLM's turn, {rests}, do not fit a device of {memory:g} GiB: {fix}")
    return [f"{line}vLLM's ({rests})"], problems


def _host(buffers: Sequence[Buffer], node: int, every: int, pool: str) -> str:
    """Return the line on host memory: what stays, and the largest of what is temporary."""
    stays = sum(buffer.host for buffer in buffers if buffer.always)
    passing = max((buffer.host for buffer in buffers if not buffer.always), default=0.0)
    rank = stays + passing
    return (
        f"{pool}: at most {_gib(rank)} of host memory a process ({_gib(stays)} of it always), {_gib(rank * node)} "
        f"a node, {_gib(rank * every)} in all"
    )


def _places(buffer: Buffer) -> str:
    places = (
        f"{_gib(size)} {where}" for size, where in ((buffer.device, "on the device"), (buffer.host, "on the host"))
    )
    texts = [text for text, size in zip(places, (buffer.device, buffer.host), strict=True) if size]
    return " and ".join(texts) + ("" if buffer.always else ", meanwhile")


def _fewer(spec: RunSpec) -> str:
    return "raise --engine.shard-ranks" if spec.shards < spec.ranks else "use more nodes"


def _named(states: States) -> str:
    return "weights and gradients" if states.on_host else "weights, gradients and optimizer states"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
