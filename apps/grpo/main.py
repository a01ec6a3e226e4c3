"""The grpo app: `bazel run //apps/grpo -- --help`."""

import functools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; --threads sets what a rank uses

import tyro

from apps.common.cli import command_line as cli
from apps.common.cli.certificates import tell_proofs, write_proofs
from apps.common.cli.command_line import CommandLine
from apps.common.cli.environment import restart_with
from apps.common.cli.flags import changed, flag
from apps.common.cli.peer_flags import GRPO as PEERS
from apps.common.cli.plan_command import answer_without_running
from apps.common.cli.recipes import beside_own_model
from apps.common.cli.refusals import Refusals
from apps.common.cli.untested import FLAG_TYPE
from apps.common.data.model_files import at_hand
from apps.common.data.tokenizer import quiet_libraries
from apps.common.program import program
from apps.common.run.config_file import write_config
from apps.common.run.full_disk import writing
from apps.common.run.moved_weights import check_moved
from apps.common.run.reporter import report_on_stop
from apps.common.run.run_dir import resolve_run_dir, steps_done
from apps.common.shrink.command import check_nothing_dropped, parse_shrink_flag, print_differences, without_vllm
from apps.common.shrink.fields import Difference, ProcessLimit, by_flag
from apps.common.shrink.npu import fake_npu_for, with_fake_npu
from apps.grpo.config import OWNED, GrpoConfig
from apps.grpo.preflight import check_machine, check_made, prepare
from apps.grpo.recipe import Recipe
from apps.grpo.recipe_resets import without_idle_settings
from apps.grpo.registry import recipes, registered, runnable, spec_of
from apps.grpo.shrink.nodes import nodes_for
from apps.grpo.shrink.shrink import shrink, shrunk_recipe, supplied
from apps.grpo.shrink.varied import LINE
from apps.grpo.train import Result, train
from engines.backends import TRAIN_BACKENDS
from engines.launch import ensure_group, launch, runs_in_this_process, under_torchrun
from engines.weights.hub import model_directory
from objectives.advantages import ESTIMATORS
from objectives.losses import POLICY_LOSSES
from objectives.off_policy import Correction
from runlog import check_tracker
from runplan.run_spec import RunSpec
from schedules.config import MODES
from schedules.runtime.collectives import broadcast_result, rank_and_world

RUNS = Path("runs/grpo")
OFF_POLICY = (
    "Weights between the policy the update starts from and the sampler. Unless they are named (None), mask where "
    "fully_async samples ahead of training, else none."
)


def command_line() -> CommandLine[GrpoConfig]:
    """Return the command line of the app."""
    return CommandLine(
        prog=program("grpo"),
        kind=GrpoConfig,
        recipes={name: recipe.config for name, recipe in recipes().items()},
        runs=RUNS,
        by_flag={"--environment": "environment", "--model": "math", "--data": "math", "--preset": "math"},
        owned=OWNED,
        types={
            "advantage": Literal[(*ESTIMATORS, *ESTIMATORS.aliases)],
            "cluster.schedule.mode": Annotated[Literal[tuple(MODES)], tyro.conf.arg(aliases=["--schedule"])],
            "engine.allow_untested": FLAG_TYPE,
            "engine.backend": Literal[tuple(TRAIN_BACKENDS)],
            "objective.policy_loss": Literal[tuple(POLICY_LOSSES)],
            "objective.off_policy": Annotated[Correction | None, tyro.conf.arg(help=OFF_POLICY)],
        },
        peers=PEERS,
        own_model=beside_own_model,
        fixed=("recipe", "model", "warm_start", "engine.lora"),
        beside=_unused,
        reset=without_idle_settings,
    )


def _unused(config: GrpoConfig, default: GrpoConfig) -> Iterator[str]:
    if not config.warm_start.steps:
        for path in changed(config, default):
            if path.startswith("warm_start.") and path != "warm_start.steps":
                yield f"{flag(path)} has no effect with --warm-start.steps 0: leave it out"


def configure(argv: Sequence[str]) -> GrpoConfig:
    """Return the configuration of a command line; with --model or --data the default recipe is "math".

    Raises:
        SystemExit, ValueError: see `CommandLine.parse`; a flag has no effect beside the others.
    """
    return command_line().parse(argv)


def run(config: GrpoConfig, recipe: Recipe | None = None) -> Result:
    """Check all that can be checked, then train on the ranks that the configuration asks for.

    `recipe`: tasks, model and demonstrations; the registered one that the configuration names unless given.

    Raises:
        ValueError: model, data or settings can't be used; said before anything is sampled.
    """
    quiet_libraries()
    recipe, refusals = recipe or registered(config.recipe), Refusals()
    refusals.of(lambda: runnable(config, recipe))
    refusals.of(lambda: check_machine(config))
    for name in config.tracker:
        refusals.of(functools.partial(check_tracker, name))
    directory, whole = refusals.of(functools.partial(at_hand, config.model)) or (None, False)
    prepared = prepare(config, recipe, directory, refusals, whole) if directory else None
    if config.model is None and refusals.lines:
        check_made(config, recipe, refusals)
    refusals.tell()
    if under_torchrun():
        # rank 0 makes the model and the folder, the others wait for it
        ensure_group(config.engine.device, config.engine.collective_timeout_seconds)
    run_dir = resolve_run_dir(config.run_dir, RUNS, config.recipe, config.resume)
    if config.resume:
        steps_done(run_dir, config.steps)
    with writing("the tiny model", run_dir):
        model = _model(config, recipe, run_dir)
    if prepared is None or not whole or model != directory:
        prepared = prepare(config, recipe, model, refusals)
    refusals.tell()
    broadcast_result(None)  # every rank has passed its checks
    with writing("the configuration", run_dir):
        if rank_and_world()[0] == 0:
            write_config(config, run_dir)
            write_proofs(run_dir, prepared.checked.certificates, prepared.checked.accepted)
            tell_proofs(prepared.checked.certificates, config.engine.allow_untested, prepared.checked.accepted)
    job = functools.partial(train, model=model, run_dir=run_dir, demonstrations=recipe.demonstrations)
    if runs_in_this_process(config.nproc_per_node):
        job = functools.partial(job, opened=prepared.checked.opened)
    with report_on_stop(run_dir, run_dir / "warm-start"):
        engine, arguments = config.engine, (config, prepared.tasks)
        waits = engine.collective_timeout_seconds
        result: Result = launch(job, arguments, config.nproc_per_node, engine.device, config.threads, waits)
        return result


def _model(config: GrpoConfig, recipe: Recipe, run_dir: Path) -> Path:
    if config.model is not None:
        return model_directory(config.model)
    assert recipe.make_model is not None
    if rank_and_world()[0] == 0:
        recipe.make_model(run_dir / "model", config.seed)
    return broadcast_result(run_dir / "model")


def shrunk(config: GrpoConfig, most: ProcessLimit) -> tuple[GrpoConfig, Recipe, tuple[Difference, ...]]:
    """Return the configuration at the size of the allowed processes, its recipe, and every field that differs.

    Raises:
        ValueError: there is no such recipe, or there are too few processes.
    """
    recipe = recipes()[config.recipe]
    small, differences = shrink(config, recipe, most)
    return small, shrunk_recipe(small, recipe), differences


def shrunk_spec(config: GrpoConfig, most: ProcessLimit) -> RunSpec:
    """Return the run spec of a configuration at the size of the allowed processes; see `shrunk`."""
    return with_fake_npu(spec_of(*shrunk(config, most)[:2]))


def run_shrunk(config: GrpoConfig, most: ProcessLimit) -> Result:
    """Run a recipe in small, with a tiny random model of its architecture; print the differences first.

    Raises:
        ValueError: the run would have to do without something, which the text names; or see `run`.
        IdleRunError: some weights that the run trains did not move.
    """
    if config.resume:
        raise ValueError("a shrunk run goes on without --shrink: its settings are in its folder")
    small, recipe, differences = shrunk(config, most)
    print_differences(config.recipe, [*by_flag(config, recipes()[config.recipe].config), *differences, LINE])
    check_nothing_dropped(spec_of(small, recipe))
    run_dir = resolve_run_dir(config.run_dir, RUNS, f"{config.recipe}-shrunk", resume=False)
    with fake_npu_for(small.engine.device), nodes_for(small):
        result = run(supplied(small, recipe, run_dir), recipe)
    sys.stdout.write(f"{check_moved(run_dir, small.engine)}\n")
    return result


def main(argv: Sequence[str], own_process: bool = False) -> None:
    """Plan or run what the command line asks for.

    `own_process`: this is the program's own process, which starts again with the variables that a recipe owns.
    """
    typed, (argv, most) = argv, parse_shrink_flag(without_vllm(argv))

    def specs() -> list[tuple[RunSpec, RunSpec]]:
        configs = [recipe.config for recipe in recipes().values()]
        return [(spec_of(config), shrunk_spec(config, most or ProcessLimit())) for config in configs]

    def planned(rest: Sequence[str]) -> RunSpec:
        config = configure(rest)
        return spec_of(config) if most is None else shrunk_spec(config, most)

    answer_without_running(argv, specs, planned, typed)
    config = configure(argv)
    if own_process:
        restart_with(config.cluster.env)
    if most is None:
        run(config)
    else:
        run_shrunk(config, most)


if __name__ == "__main__":
    cli.main(lambda: main(sys.argv[1:], own_process=True))
