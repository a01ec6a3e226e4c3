"""A run's plan as data and as text: every figure is derived, every problem has its fix."""

from dataclasses import dataclass, field, replace

from engines.capability import Unsupported, conflicts
from engines.parallel.stages import split_problems
from runplan.checks.requirements import Requirement, has_experts, requirements
from runplan.layout.batches import BatchPlan, batch_problems, bubble_share, span
from runplan.layout.divisibility import divisibility_problems, head_counts
from runplan.layout.grid import DENSE, EXPERT, Grid
from runplan.model.model_shape import ModelShape, count_parameters, tower_parameters
from runplan.report.forwards_ahead import ahead_line, with_forwards_ahead
from runplan.report.launch_lines import launch_lines
from runplan.report.memory_lines import memory_lines, split_of
from runplan.report.time_lines import time_lines
from runplan.run_spec import RunSpec

DEVICES = {
    "cpu": "on the CPU, as the settings say, where equal runs give equal bits: --trainer.device auto takes a GPU",
    "auto": "on a GPU where there is one, else on the CPU (--trainer.device auto)",
}


@dataclass
class Plan:
    """Titled lines, problems with their fixes, and requirements with their answers."""

    title: str
    sections: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    requirements: list[Requirement] = field(default_factory=list)
    allowed: tuple[str, ...] = ()
    """Names of what may be untested (`EngineConfig.allow_untested`)."""

    @property
    def missing(self) -> list[Requirement]:
        """The requirements that are answered with `Unsupported`, but for those that may be untested."""
        unmet = (requirement for requirement in self.requirements if isinstance(requirement.answer, Unsupported))
        return [requirement for requirement in unmet if requirement.untested not in self.allowed]

    @property
    def untested(self) -> list[Requirement]:
        """The requirements that may be untested, and are."""
        return [requirement for requirement in self.requirements if requirement.untested in self.allowed]

    @property
    def to_allow(self) -> tuple[str, ...]:
        """The names that would let this run start untested; none where it starts, or lacks more."""
        names = [requirement.untested for requirement in self.missing]
        return tuple(dict.fromkeys(name for name in names if name)) if all(names) and not self.problems else ()

    @property
    def ready(self) -> bool:
        """Whether the run can be started today."""
        return not self.problems and not self.missing

    @property
    def derived(self) -> list[str]:
        """Lines that follow from the settings alone, whatever is installed."""
        lines = [self.title]
        for name, rows in self.sections.items():
            lines += [f"{name if i == 0 else '':<10}{row}" for i, row in enumerate(rows)]
        return lines + [f"PROBLEM   {problem}" for problem in self.problems]

    def __str__(self) -> str:
        state = "can be run" if self.ready else "cannot be run yet"
        if self.ready and self.untested:
            state += ", untested"
        lines = [
            *self.derived,
            *_grouped("UNTESTED", "{}", self.untested),
            *_grouped("MISSING", "No({})", self.missing),
        ]
        if self.to_allow:
            lines.append(f"{'':<10}--allow-untested {','.join(self.to_allow)} starts it")
        return "\n".join([*lines, f"{state}: {len(self.problems)} problems, {len(self.missing)} capabilities missing"])


def make_plan(spec: RunSpec) -> Plan:
    """Derive everything from the settings; what fails becomes a problem, and the rest goes on."""
    spec = with_forwards_ahead(spec)
    plan = Plan(_title(spec), allowed=spec.engine.allow_untested)
    shape = spec.shape
    plan.problems += spec.grid_problems
    grid = None if plan.problems else spec.grid
    plan.problems += conflicts(spec.engine)
    layers: list[int] | None = None
    if shape is not None:
        plan.sections["Model"] = _model(shape)
        layers = _layers(plan, spec, shape)
        _heads(plan, spec, shape)
    elif spec.unknown is not None:
        plan.sections["Model"] = [f"memory, layers and time are not planned: {spec.unknown}"]
    plan.sections["Ranks"] = _ranks(spec, grid)
    batches = _batches(plan, spec, grid)
    if grid is not None and batches is not None:
        _stages(plan, spec, grid, layers, batches)
    if shape is not None and (grid is None or layers is None):
        plan.sections["Memory"] = ["not derived: the ranks and the layers must divide first, see the problems"]
    if shape is not None and grid is not None and layers is not None:
        sections, problems = memory_lines(spec, shape, grid, layers)
        plan.sections |= sections
        plan.problems += problems
        if batches is not None and (ahead := ahead_line(spec, shape, max(batches.micro_batches))):
            plan.sections["Memory"].append(ahead)
        if batches is not None and (lines := _time(spec, shape, grid, batches)):
            plan.sections["Time"] = lines
    if spec.app == "grpo":
        _rollout(plan, spec, shape)
        _schedule(plan, spec)
    _data(plan, spec)
    if spec.own_code:
        plan.sections["Own code"] = list(spec.own_code)
    plan.sections["Launch"] = launch_lines(spec)
    if spec.origin is not None:
        plan.sections["Deviates"] = list(spec.origin.deviations) or ["in nothing"]
    plan.requirements = requirements(spec)
    return plan


def _title(spec: RunSpec) -> str:
    origin = spec.origin
    return f"{spec.recipe}: {spec.app.upper()}, {spec.steps} steps" + (f", after {origin.script}" if origin else "")


def _model(shape: ModelShape) -> list[str]:
    count = count_parameters(shape)
    kinds = f"{shape.layers} layers"
    if shape.linear_layers:
        kinds += f" ({shape.full_attention_layers} of full attention, {shape.linear_layers} gated delta nets)"
    mlp = f"{shape.experts} experts, {shape.experts_per_token} a token" if shape.experts else "dense"
    tower = tower_parameters(shape)
    seen = f"{mlp}; a vision tower of {tower / 1e9:.2f}B" if tower else mlp
    return [
        f"{shape.name}: {count.total / 1e9:.1f}B parameters, {count.active / 1e9:.1f}B active (text part); {seen}",
        f"{kinds}, hidden {shape.hidden}, {shape.heads} heads over {shape.kv_heads} of keys and values; {shape.source}",
    ]


def _ranks(spec: RunSpec, grid: Grid | None) -> list[str]:
    pools = spec.cluster.pools
    lines = [f"{pools.nodes} nodes x {spec.processes} = {spec.ranks} train, {pools.placement}"]
    if pools.rollout_nodes:
        actors, devices = spec.cluster.rollout.ray_workers, spec.cluster.rollout.devices
        spans = f" of {devices} devices" if devices > 1 else ""
        each = f"{actors} actors{spans}" if actors else f"x {spec.processes} = {spec.rollout_ranks}"
        lines[0] += f"; {pools.rollout_nodes} nodes {each} sample"
    if (device := DEVICES.get(spec.engine.device)) is not None:
        lines.append(device)
    if grid is None:
        return lines
    lines.append(" x ".join(f"{axis} {grid.size(axis)}" for axis in DENSE))
    if grid.ep > 1 or grid.etp > 1:
        lines.append("experts: " + " x ".join(f"{axis} {grid.size(axis)}" for axis in EXPERT))
    if spec.shards < spec.ranks:
        where = "within a node" if spec.processes % spec.shards == 0 else "across nodes"
        shared = f"shared by {spec.shards} ranks ({where})" if spec.shards > 1 else "whole on its rank"
        lines.append(f"{spec.ranks // spec.shards} copies of the weights, each {shared}")
    if spec.dynamic:
        most = grid.size("dp") * grid.size("cp")
        lines.append(f"1 to {most} ranks share a sequence, chosen for each micro-batch{_each_of(grid)}")
    for axis in ("tp", "cp", "pp", "ep"):
        if grid.size(axis) > 1:
            first = grid.groups(axis)[0]
            where = "within a node" if all(_one_node(group, spec) for group in grid.groups(axis)) else "across nodes"
            lines.append(f"first {axis} group: {_listed(first)} ({where})")
    return lines


def _each_of(grid: Grid) -> str:
    """Return the axes of each rank that shares a sequence, where several ranks split its layers."""
    split = [f"{axis} {grid.size(axis)}" for axis in ("tp", "pp") if grid.size(axis) > 1]
    return f", each of {' x '.join(split)}" if split else ""


def _one_node(group: tuple[int, ...], spec: RunSpec) -> bool:
    return len({rank // spec.processes for rank in group}) == 1


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"


def _layers(plan: Plan, spec: RunSpec, shape: ModelShape) -> list[int] | None:
    engine = spec.engine
    chunks, ends = engine.virtual_pipeline_parallel, (engine.first_stage_layers, engine.last_stage_layers)
    plan.problems += split_problems(shape.layers, engine.pipeline_parallel, chunks, *ends)
    return split_of(spec, shape)


def _heads(plan: Plan, spec: RunSpec, shape: ModelShape) -> None:
    tp, ep = spec.engine.tensor_parallel, spec.engine.expert_parallel
    counted = head_counts(shape)
    plan.problems += divisibility_problems(shape, spec.engine)
    if tp > 1:
        plan.sections["Each rank"] = [", ".join(f"{count // tp} {name}" for name, count in counted.items())]
    if ep * spec.engine.expert_tensor_parallel > 1 and shape.experts and shape.experts % ep == 0:
        plan.sections.setdefault("Each rank", []).append(f"{shape.experts // ep} of {shape.experts} experts a layer")


def _batches(plan: Plan, spec: RunSpec, grid: Grid | None) -> BatchPlan | None:
    tokens, sequences = spec.engine.max_tokens_per_rank, spec.rows * spec.group
    problems = batch_problems(sequences, spec.mini_batches, spec.longest, spec.micro_batch_tokens)
    plan.problems += problems
    if problems or grid is None:
        return None
    batches = spec.batches(grid)
    rows = f"{spec.rows} prompts x {spec.group} answers" if spec.app == "grpo" else f"{spec.rows} conversations"
    lines = [f"{rows} = {batches.sequences} sequences of at most {spec.longest} tokens a step"]
    sizes = [sum(ranks) for ranks in batches.rank_sequences]
    steps = spec.mini_batches * spec.epochs
    lines.append(f"{steps} optimizer steps on it, each on {span(sizes)} sequences")
    if spec.dynamic:
        least = -(-spec.longest // tokens)
        lines.append(f"micro-batches of {tokens} tokens a rank; the longest sequence takes {least} ranks")
    else:
        each = span([count for ranks in batches.rank_sequences for count in ranks])
        lines.append(
            f"{each} sequences a data-parallel rank; {batches.sequences_per_micro_batch} at full length in a "
            f"micro-batch of {tokens} tokens a rank: at most {span(batches.micro_batches)} micro-batches"
        )
    plan.sections["Batch"] = lines
    return batches


def _stages(plan: Plan, spec: RunSpec, grid: Grid, layers: list[int] | None, batches: BatchPlan) -> None:
    if grid.pp == 1:
        return
    chunks = spec.engine.virtual_pipeline_parallel
    fewest = min(batches.micro_batches)
    waits = bubble_share(fewest, grid.pp, chunks)
    lines = [f"{' + '.join(map(str, layers)) if layers else 'undivided'} layers over {grid.pp} stages"]
    if chunks > 1:
        lines[0] += f", in {chunks} chunks each"
    lines.append(f"a stage waits {waits:.0%} of the time with {fewest} micro-batches")
    if chunks > 1 and fewest % grid.pp:
        plan.problems.append(
            f"{fewest} micro-batches are no multiple of pp = {grid.pp}, which the interleaved schedule needs: choose "
            "another batch size, or virtual_pipeline_parallel 1"
        )
    plan.sections["Stages"] = lines


def _rollout(plan: Plan, spec: RunSpec, shape: ModelShape | None) -> None:
    rollout, sampler = spec.cluster.rollout, spec.cluster.sampler
    size = rollout.devices
    stages = f" x pp {rollout.pp}" if rollout.pp > 1 else ""
    lines = [f"{rollout.engine}: tp {rollout.tp}{stages} x dp {rollout.dp}, ep {rollout.ep}"]
    if rollout.copies_per_device > 1:
        lines.append(f"{rollout.copies_per_device} copies share a device, each with memory and a processor of its own")
    if spec.rollout_ranks % size and not sampler.shares_processors(spec):
        plan.problems.append(
            f"{spec.rollout_ranks} sampling devices are no multiple of tp{stages and ' x pp'} x dp = {size}: change "
            "--rollout.tensor-parallel or the number of nodes"
        )
    elif not sampler.in_process:
        replicas = max(1, spec.rollout_ranks // size)
        lines[0] += f"; {replicas} replicas over {max(size, spec.rollout_ranks)} devices"
    accepted = rollout.max_model_tokens
    if accepted is not None and accepted < spec.longest:
        plan.problems.append(
            f"the sampling engine accepts {accepted} tokens, a sequence may have {spec.longest}: raise "
            "--rollout.max-model-tokens"
        )
    if shape is not None and shape.heads % rollout.tp:
        plan.problems.append(
            f"{shape.heads} heads do not divide over rollout tp = {rollout.tp}: lower it (--rollout.tensor-parallel)"
        )
    if shape is not None and rollout.pp > shape.layers:
        plan.problems.append(
            f"{shape.layers} layers do not fill rollout pp = {rollout.pp} stages: lower it "
            "(--rollout.pipeline-parallel)"
        )
    if spec.engine.routing_replay:
        lines.append(f"the sampler tells each token's experts (--trainer.routing-replay): {_experts(spec)}")
    plan.sections["Rollout"] = lines


def _experts(spec: RunSpec) -> str:
    return {
        True: "the model has experts",
        False: "the model has none",
        None: "this needs a model with experts, which is not known here and refused where it has none when it is read",
    }[has_experts(spec)]


def _schedule(plan: Plan, spec: RunSpec) -> None:
    schedule = spec.cluster.schedule
    if schedule.mode == "sync":
        return
    lines: list[str] = [schedule.mode]
    if schedule.mode == "fully_async":
        required = -(-spec.rows // spec.mini_batches) * schedule.required_batches
        most = int(required * (schedule.stale_share + 1) * schedule.parameter_sync_step)
        lines[0] += f": an optimizer step takes {required} groups, weights move every {schedule.parameter_sync_step}"
        lines.append(f"at most {most} groups are in flight or waiting, then sampling pauses")
        if schedule.interrupts:
            lines.append("generation is interrupted for new weights and goes on: log-probs of several versions mix")
    plan.sections["Schedule"] = lines


def _time(spec: RunSpec, shape: ModelShape, grid: Grid, batches: BatchPlan) -> list[str]:
    """Return the lines on time; those of a GPU where the choice of device is left open."""
    if spec.engine.device != "auto":
        return time_lines(spec, shape, grid, batches)
    first, *rest = time_lines(replace(spec, engine=replace(spec.engine, device="cuda")), shape, grid, batches)
    return [f"on a GPU: {first}", *rest]


def _data(plan: Plan, spec: RunSpec) -> None:
    origin = spec.origin
    if origin is None:
        return
    taken = spec.steps * spec.rows
    line = f"{origin.dataset}: {spec.steps} steps take {taken} rows"
    if origin.dataset_rows is not None:
        held = spec.held_out_of(origin.dataset_rows)
        line += f", {taken / (origin.dataset_rows - held):.1f} passes over {origin.dataset_rows - held}"
        line += f" ({held} of {origin.dataset_rows} are held out: no --eval-data)" if held else ""
        if spec.rows > origin.dataset_rows:
            plan.problems.append(f"a step takes {spec.rows} rows and the data has {origin.dataset_rows}: lower it")
    plan.sections["Data"] = [line, *origin.remarks]


def _grouped(head: str, form: str, missing: list[Requirement]) -> list[str]:
    """Return one line a reason, with all requirements that lack for it."""
    reasons: dict[str, list[str]] = {}
    for requirement in missing:
        assert isinstance(requirement.answer, Unsupported)
        reasons.setdefault(requirement.answer.reason, []).append(requirement.feature)
    return [f"{head:<10}{', '.join(features)}: {form.format(reason)}" for reason, features in reasons.items()]
