"""Lines on memory: of each training rank by part, of the hosts, of the pool that samples; and the problems."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from engines.capability import unsupported
from engines.parallel.stages import split_layers, split_problems
from runplan.estimates.activations import Kind, activation_bytes, fsdp_kind
from runplan.estimates.buffers import train_buffers
from runplan.estimates.loading import DISK_BYTES
from runplan.estimates.logits import Head, fsdp_head, megatron_head
from runplan.estimates.peak_memory import Peak, peak_memory, scoring_peak
from runplan.estimates.states import GIB, States, fsdp_states, megatron_states, parameters_by_stage, width_of
from runplan.layout.grid import Grid
from runplan.model.model_shape import ModelShape, tower_parameters
from runplan.report.memory_table import memory_table, reference_bytes, table_lines
from runplan.run_spec import RunSpec
from runplan.samplers.pool_lines import gib, host_line, places

SectionsAndProblems = tuple[dict[str, list[str]], list[str]]


def memory_lines(spec: RunSpec, shape: ModelShape, grid: Grid, layers: Sequence[int]) -> SectionsAndProblems:
    """Return sections by title, and problems with their fixes."""
    states = states_of(spec, shape, grid, layers)
    peak = peak_of(spec, shape, grid, layers, states)
    width, samples = width_of(spec.engine), spec.app == "grpo"
    copied = samples and not spec.cluster.sampler.shares_weights(spec)
    buffers = train_buffers(shape, spec.engine, states, max(layers), width, copied)
    table = memory_table(spec, shape, states)
    hosts = [row for row in table if not row.name.startswith("sampler")] + buffers
    sections = {
        "Memory": _device(spec, shape, grid, layers, states, peak),
        "Kept": table_lines(table, spec.engine.device == "cpu"),
        "Buffers": [f"{buffer.name}: {places(buffer)}" for buffer in buffers],
        "Host": [host_line(hosts, spec.processes, spec.ranks, "training")],
    }
    problems = [text + nearest_fit(spec, shape, grid, layers) for text in _too_much(spec, states, peak)]
    moved = max((b.device for b in buffers), default=0.0) + max(0.0, states.device - states.gradients)
    memory = spec.device_memory_gib
    if memory is not None and peak.bytes / GIB < memory <= moved / GIB:
        problems.append(
            f"{moved / GIB:.0f} GiB of states and a tensor put together for the weight sync do not fit a device of "
            f"{memory:g} GiB: {_fewer(spec)}"
        )
    if samples:
        pool, more = spec.cluster.sampler.pool(spec, shape, states, peak)
        sections["Pool"] = pool
        problems += more
    return sections, problems


def split_of(spec: RunSpec, shape: ModelShape) -> list[int] | None:
    """Return the layers of each pipeline stage; None where they do not divide."""
    engine = spec.engine
    chunks, ends = engine.virtual_pipeline_parallel, (engine.first_stage_layers, engine.last_stage_layers)
    if split_problems(shape.layers, engine.pipeline_parallel, chunks, *ends):
        return None
    return [sum(stage) for stage in split_layers(shape.layers, engine.pipeline_parallel, chunks, *ends)]


def peak_of(spec: RunSpec, shape: ModelShape, grid: Grid, layers: Sequence[int], states: States) -> Peak:
    """Return the fullest moments of a step, scoring by the reference model among them."""
    peak = peak_memory(shape, spec.engine, grid, layers, spec.shards)
    if scored := reference_bytes(spec, shape, states):
        moment = scoring_peak(shape, spec.engine, states, scored, grid.tp)
        peak = replace(peak, moments=peak.moments | {"the reference model scores": moment})
    return peak


def states_of(spec: RunSpec, shape: ModelShape, grid: Grid, layers: Sequence[int], disk: int = DISK_BYTES) -> States:
    """Return the states of the rank with the most on its device; `disk`: bytes of a number in the checkpoint."""
    return max(states_by_stage(spec, shape, grid, layers, disk), key=lambda states: states.device)


def states_by_stage(
    spec: RunSpec, shape: ModelShape, grid: Grid, layers: Sequence[int], disk: int = DISK_BYTES
) -> list[States]:
    """Return the states of a rank of each pipeline stage; FSDP2 has one."""
    engine, width = spec.engine, width_of(spec.engine)
    if engine.backend != "megatron":
        return [fsdp_states(shape, engine, spec.shards, disk)]
    tower = tower_parameters(shape) if engine.vision != "off" else 0
    stages = enumerate(parameters_by_stage(shape, grid, layers, bool(engine.mtp_loss_scaling_factor)))
    return [megatron_states(engine, grid, parameters, width, 0 if stage else tower) for stage, parameters in stages]


def _stages(spec: RunSpec, shape: ModelShape, grid: Grid, layers: Sequence[int]) -> list[str]:
    """Return a line for each of several stages, with the bytes on each of its ranks."""
    every, lines = states_by_stage(spec, shape, grid, layers), []
    for stage, (count, states) in enumerate(zip(layers, every, strict=True) if len(every) > 1 else ()):
        parts = f"weights {gib(states.weights)} + gradients {gib(states.gradients)}"
        parts += f" + optimizer {gib(states.optimizer)}{_where(states)}"
        lines.append(f"stage {stage}, {count} layers: {parts} = {gib(states.device + states.host)}")
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
    line = f"logits and what is made of them{where}: {at_a_time}, {gib(head.logits)}"
    return f"{line}; gradients of the head beside them {gib(head.gradients)}"


def _device(
    spec: RunSpec, shape: ModelShape, grid: Grid, layers: Sequence[int], states: States, peak: Peak
) -> list[str]:
    engine, memory = spec.engine, spec.device_memory_gib
    line = f"{gib(states.device)} of {_named(states)} on the fullest rank"
    if memory is not None:
        line += f"; the device has {memory:g}"
    tokens, width = engine.max_tokens_per_rank, width_of(engine)
    kind: Kind = "fused norms" if engine.backend == "megatron" else fsdp_kind(shape, engine, width)
    whole, again = (
        gib(activation_bytes(shape, max(layers), tokens, how, width, grid.tp, kind)) for how in (False, True)
    )
    taken = f"{again}, layers computed again" if engine.gradient_checkpointing else f"{whole}, all kept"
    fewer = f"{again} by --trainer.gradient-checkpointing"
    other = f"{whole} were all kept" if engine.gradient_checkpointing else fewer
    return [
        line,
        *_stages(spec, shape, grid, layers),
        f"activations of a full micro-batch: {taken} ({other})",
        _logits(head_of(spec, shape, grid), tokens, grid),
        f"{gib(peak.bytes)} at the fullest moment of a step ({peak.when})",
    ]


def _too_much(spec: RunSpec, states: States, peak: Peak) -> list[str]:
    memory = spec.device_memory_gib
    if memory is None or peak.bytes / GIB < memory:
        return []
    if states.device / GIB >= memory:
        more = "" if states.on_host else ", or --trainer.optimizer-on-host"
        states_text = f"{states.device / GIB:.0f} GiB of {_named(states)}"
        return [f"{states_text} do not fit a device of {memory:g} GiB: {_fewer(spec)}{more}"]
    problem = f"{peak.bytes / GIB:.0f} GiB at the fullest moment of a step ({peak.when}) do not fit a device of "
    fix = "lower --trainer.max-tokens-per-rank, recompute layers (--trainer.gradient-checkpointing)"
    return [f"{problem}{memory:g} GiB: {fix}, or {_fewer(spec)}"]


def nearest_fit(spec: RunSpec, shape: ModelShape, grid: Grid, layers: Sequence[int]) -> str:
    """Return the flags with which a step fits the device, those that cost the least time: fewer tokens in a micro-batch
    before layers computed again, then states in host memory. "" where none of these is enough."""
    engine, memory = spec.engine, spec.device_memory_gib
    tokens = [engine.max_tokens_per_rank >> halved for halved in range(8)]
    tokens = tokens[:1] + [count for count in tokens[1:] if count >= spec.longest]
    for on_host, again, count in product(_ON_HOST, (False, True), tokens):
        wanted = dict.fromkeys((*on_host, *["gradient_checkpointing"] * again), True) | {"max_tokens_per_rank": count}
        changes = {name: value for name, value in wanted.items() if value != getattr(engine, name)}
        try:
            tried = replace(spec, engine=replace(engine, **changes))  # type: ignore[arg-type]
        except ValueError:  # not beside the other settings
            continue
        peak = peak_of(tried, shape, grid, layers, states_of(tried, shape, grid, layers)).bytes / GIB
        if memory is not None and changes and peak < memory and not unsupported(tried.engine):
            flags = [_FLAGS[name] + (f" {count}" if name == "max_tokens_per_rank" else "") for name in changes]
            return f"; {' '.join(flags)} is enough ({peak:.0f} GiB)"
    return ""


_ON_HOST = ((), ("optimizer_on_host",), ("optimizer_on_host", "parameters_on_host"))
_FLAGS = {
    "max_tokens_per_rank": "--trainer.max-tokens-per-rank",
    "gradient_checkpointing": "--trainer.gradient-checkpointing",
    "optimizer_on_host": "--trainer.optimizer-on-host",
    "parameters_on_host": "--trainer.parameters-on-host",
}


def _fewer(spec: RunSpec) -> str:
    return "raise --parallel.shard-ranks" if spec.shards < spec.ranks else "use more nodes"


def _named(states: States) -> str:
    return "weights and gradients" if states.on_host else "weights, gradients and optimizer states"
