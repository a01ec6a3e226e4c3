"""A run's plan as data and as text: every figure is derived, every problem comes with its fix."""

from dataclasses import dataclass, field

from apps.common.plan.batches import BatchPlan, batch_problems, bubble_share, plan_batches, span
from apps.common.plan.grid import DENSE, EXPERT, Grid
from apps.common.plan.launch_lines import launch_lines
from apps.common.plan.memory_lines import memory_lines
from apps.common.plan.model_shape import ModelShape, count_parameters, tower_parameters
from apps.common.plan.needs import Need, has_experts, needs_of
from apps.common.plan.time_lines import time_lines
from apps.common.plan.widths import head_counts, width_problems
from apps.common.plan.work import Work
from engines.capability import No
from engines.parallel.stages import split_layers, split_problems


@dataclass
class Plan:
    """Titled lines, problems with their fixes, and needs with their answers."""

    title: str
    sections: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)

    @property
    def missing(self) -> list[Need]:
        """The needs that are answered with No."""
        return [need for need in self.needs if isinstance(need.answer, No)]

    @property
    def ready(self) -> bool:
        """Whether the run can be started today."""
        return not self.problems and not self.missing

    @property
    def derived(self) -> list[str]:
        """Lines of what follows from the settings alone, whatever is installed."""
        lines = [self.title]
        for name, rows in self.sections.items():
            lines += [f"{name if i == 0 else '':<10}{row}" for i, row in enumerate(rows)]
        return lines + [f"PROBLEM   {problem}" for problem in self.problems]

    def __str__(self) -> str:
        state = "can be run" if self.ready else "cannot be run yet"
        lines = [*self.derived, *_grouped(self.missing)]
        return "\n".join([*lines, f"{state}: {len(self.problems)} problems, {len(self.missing)} capabilities missing"])


def make_plan(work: Work) -> Plan:
    """Derive everything from the settings; what does not work out becomes a problem, and the rest goes on."""
    plan = Plan(_title(work))
    shape = work.origin.shape if work.origin else None
    plan.problems += work.grid_problems
    grid = None if plan.problems else work.grid
    layers: list[int] | None = None
    if shape is not None:
        plan.sections["Model"] = _model(shape)
        layers = _layers(plan, work, shape)
        _heads(plan, work, shape)
    plan.sections["Ranks"] = _ranks(work, grid)
    batches = _batches(plan, work, grid)
    if grid is not None and batches is not None:
        _stages(plan, work, grid, layers, batches)
    if shape is not None and (grid is None or layers is None):
        plan.sections["Memory"] = ["not derived: the ranks and the layers must divide first, see the problems"]
    if shape is not None and grid is not None and layers is not None:
        sections, problems = memory_lines(work, shape, grid, layers)
        plan.sections |= sections
        plan.problems += problems
        if batches is not None and (lines := time_lines(work, shape, grid, batches)):
            plan.sections["Time"] = lines
    if work.app == "grpo":
        _rollout(plan, work, shape)
        _schedule(plan, work)
    _data(plan, work)
    plan.sections["Launch"] = launch_lines(work)
    if work.origin is not None:
        plan.sections["Deviates"] = list(work.origin.deviations) or ["in nothing"]
    plan.needs = needs_of(work)
    return plan


def _title(work: Work) -> str:
    origin = work.origin
    return f"{work.recipe}: {work.app.upper()}, {work.steps} steps" + (f", after {origin.script}" if origin else "")


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


def _ranks(work: Work, grid: Grid | None) -> list[str]:
    pools = work.cluster.pools
    lines = [f"{pools.nodes} nodes x {work.processes} = {work.ranks} train, {pools.placement}"]
    if pools.rollout_nodes:
        actors, devices = work.cluster.rollout.ray_workers, work.cluster.rollout.devices
        spans = f" of {devices} devices" if devices > 1 else ""
        each = f"{actors} actors{spans}" if actors else f"x {work.processes} = {work.rollout_ranks}"
        lines[0] += f"; {pools.rollout_nodes} nodes {each} sample"
    if grid is None:
        return lines
    lines.append(" x ".join(f"{axis} {grid.size(axis)}" for axis in DENSE))
    if grid.ep > 1 or grid.etp > 1:
        lines.append("experts: " + " x ".join(f"{axis} {grid.size(axis)}" for axis in EXPERT))
    if work.shards < work.ranks:
        where = "within a node" if work.processes % work.shards == 0 else "across nodes"
        shared = f"shared by {work.shards} ranks ({where})" if work.shards > 1 else "whole on its rank"
        lines.append(f"{work.ranks // work.shards} copies of the weights, each {shared}")
    if work.dynamic:
        most = grid.size("dp") * grid.size("cp")
        lines.append(f"1 to {most} ranks share a sequence, chosen for each micro-batch{_each_of(grid)}")
    for axis in ("tp", "cp", "pp", "ep"):
        if grid.size(axis) > 1:
            first = grid.groups(axis)[0]
            where = "within a node" if all(_one_node(group, work) for group in grid.groups(axis)) else "across nodes"
            lines.append(f"first {axis} group: {_listed(first)} ({where})")
    return lines


def _each_of(grid: Grid) -> str:
    """Return what a rank that shares a sequence is, where several ranks split its layers."""
    split = [f"{axis} {grid.size(axis)}" for axis in ("tp", "pp") if grid.size(axis) > 1]
    return f", each of {' x '.join(split)}" if split else ""


def _one_node(group: tuple[int, ...], work: Work) -> bool:
    return len({rank // work.processes for rank in group}) == 1


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"


def _layers(plan: Plan, work: Work, shape: ModelShape) -> list[int] | None:
    engine = work.engine
    chunks, ends = engine.virtual_pipeline_parallel, (engine.first_stage_layers, engine.last_stage_layers)
    problems = split_problems(shape.layers, engine.pipeline_parallel, chunks, *ends)
    plan.problems += problems
    if problems:
        return None
    return [sum(stage) for stage in split_layers(shape.layers, engine.pipeline_parallel, chunks, *ends)]


def _heads(plan: Plan, work: Work, shape: ModelShape) -> None:
    tp, ep = work.engine.tensor_parallel, work.engine.expert_parallel
    counted = head_counts(shape)
    plan.problems += width_problems(shape, work.engine)
    if tp > 1:
        plan.sections["Each rank"] = [", ".join(f"{count // tp} {name}" for name, count in counted.items())]
    if ep * work.engine.expert_tensor_parallel > 1 and shape.experts and shape.experts % ep == 0:
        plan.sections.setdefault("Each rank", []).append(f"{shape.experts // ep} of {shape.experts} experts a layer")


def _batches(plan: Plan, work: Work, grid: Grid | None) -> BatchPlan | None:
    sharing = work.ranks if work.dynamic else work.context_parallel
    tokens = work.engine.max_tokens_per_rank
    sequences = work.rows * work.group
    problems = batch_problems(sequences, work.mini_batches, work.longest, sharing * tokens)
    plan.problems += problems
    if problems or grid is None:
        return None
    dp = 1 if work.dynamic else grid.dp
    batches = plan_batches(sequences, work.mini_batches, dp, work.longest, sharing * tokens)
    rows = f"{work.rows} prompts x {work.group} answers" if work.app == "grpo" else f"{work.rows} conversations"
    lines = [f"{rows} = {batches.sequences} sequences of at most {work.longest} tokens a step"]
    sizes = [sum(ranks) for ranks in batches.rank_sequences]
    steps = work.mini_batches * work.epochs
    lines.append(f"{steps} optimizer steps on it, each on {span(sizes)} sequences")
    if work.dynamic:
        least = -(-work.longest // tokens)
        lines.append(f"micro-batches of {tokens} tokens a rank; the longest sequence takes {least} ranks")
    else:
        each = span([count for ranks in batches.rank_sequences for count in ranks])
        lines.append(
            f"{each} sequences a data-parallel rank; {batches.sequences_per_micro_batch} at full length in a "
            f"micro-batch of {tokens} tokens a rank: at most {span(batches.micro_batches)} micro-batches"
        )
    plan.sections["Batch"] = lines
    return batches


def _stages(plan: Plan, work: Work, grid: Grid, layers: list[int] | None, batches: BatchPlan) -> None:
    if grid.pp == 1:
        return
    chunks = work.engine.virtual_pipeline_parallel
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


def _rollout(plan: Plan, work: Work, shape: ModelShape | None) -> None:
    rollout = work.cluster.rollout
    size = rollout.devices
    lines = [f"{rollout.engine}: tp {rollout.tp} x dp {rollout.dp}, ep {rollout.ep}"]
    if rollout.copies_per_device > 1:
        lines.append(f"{rollout.copies_per_device} copies share a device, each with memory and a processor of its own")
    if work.rollout_ranks % size and not _on_processors(work, size):
        plan.problems.append(
            f"{work.rollout_ranks} sampling devices are no multiple of tp x dp = {size}: change --cluster.rollout.tp "
            "or the number of nodes"
        )
    elif rollout.engine != "native":
        replicas = max(1, work.rollout_ranks // size)
        lines[0] += f"; {replicas} replicas over {max(size, work.rollout_ranks)} devices"
    accepted = rollout.max_model_tokens
    if accepted is not None and accepted < work.longest:
        plan.problems.append(
            f"the sampling engine accepts {accepted} tokens, a sequence may have {work.longest}: raise "
            "--cluster.rollout.max-model-tokens"
        )
    if shape is not None and shape.heads % rollout.tp:
        plan.problems.append(
            f"{shape.heads} heads do not divide over rollout tp = {rollout.tp}: lower it (--cluster.rollout.tp)"
        )
    if work.engine.routing_replay:
        lines.append(f"the sampler tells each token's experts (--engine.routing-replay): {_experts(work)}")
    plan.sections["Rollout"] = lines


def _on_processors(work: Work, size: int) -> bool:
    """Return whether vLLM's workers, more of them than ranks, share a machine's processors."""
    rollout = work.cluster.rollout
    there = rollout.device == "cpu" or work.engine.device in ("cpu", "auto")
    return there and rollout.engine == "vllm" and work.rollout_ranks < size


def _experts(work: Work) -> str:
    return {
        True: "the model has experts",
        False: "the model has none",
        None: "this needs a model with experts, which is not known here and refused where it has none when it is read",
    }[has_experts(work)]


def _schedule(plan: Plan, work: Work) -> None:
    schedule = work.cluster.schedule
    if schedule.mode == "sync":
        return
    lines: list[str] = [schedule.mode]
    if schedule.mode == "fully_async":
        required = -(-work.rows // work.mini_batches) * schedule.required_batches
        most = int(required * (schedule.stale_share + 1) * schedule.parameter_sync_step)
        lines[0] += f": an optimizer step takes {required} groups, weights move every {schedule.parameter_sync_step}"
        lines.append(f"at most {most} groups are in flight or waiting, then sampling pauses")
        if schedule.interrupts:
            lines.append("generation is interrupted for new weights and goes on: log-probs of several versions mix")
    plan.sections["Schedule"] = lines


def _data(plan: Plan, work: Work) -> None:
    origin = work.origin
    if origin is None:
        return
    taken = work.steps * work.rows
    line = f"{origin.dataset}: {work.steps} steps take {taken} rows"
    if origin.dataset_rows is not None:
        line += f", {taken / origin.dataset_rows:.1f} passes over {origin.dataset_rows}"
        if work.rows > origin.dataset_rows:
            plan.problems.append(f"a step takes {work.rows} rows and the data has {origin.dataset_rows}: lower it")
    plan.sections["Data"] = [line, *origin.remarks]


def _grouped(missing: list[Need]) -> list[str]:
    """Return one line a reason, with all that lacks for it."""
    reasons: dict[str, list[str]] = {}
    for need in missing:
        assert isinstance(need.answer, No)
        reasons.setdefault(need.answer.reason, []).append(need.feature)
    return [f"MISSING   {', '.join(features)}: No({reason})" for reason, features in reasons.items()]
