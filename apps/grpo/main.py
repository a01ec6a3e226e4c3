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
from apps.common.cli.command_line import CommandLine
from apps.common.cli.environment import start_with
from apps.common.cli.flags import changed, flag
from apps.common.cli.peer_flags import GRPO as PEERS
from apps.common.data.model_files import check_model_directory
from apps.common.data.tokenizer import load_tokenizer, quiet_libraries
from apps.common.plan.command import answer_without_running
from apps.common.plan.work import Work
from apps.common.run.config_file import write_config
from apps.common.run.ranks import from_rank_0, rank_and_world
from apps.common.run.reporter import stoppable
from apps.common.run.run_dir import resolve_run_dir, steps_done
from apps.common.shrink.command import asked_for, refuse_dropped, tell
from apps.common.shrink.fields import Difference, Most, by_flag
from apps.common.shrink.npu import stand_in_for
from apps.grpo.config import OWNED, GrpoConfig
from apps.grpo.preflight import check_machine, check_model, check_prompts
from apps.grpo.recipe import Recipe
from apps.grpo.registry import recipes, runnable, work_of
from apps.grpo.shrink.nodes import nodes_for
from apps.grpo.shrink.shrink import shrink, shrunk_recipe, supplied
from apps.grpo.train import Result, train
from engines.launch import ensure_group, launch, under_torchrun
from engines.weights.hub import model_directory
from objectives.advantages import ESTIMATORS
from objectives.losses import POLICY_LOSSES
from objectives.off_policy import Correction
from runlog import check_tracker

RUNS = Path("runs/grpo")
OFF_POLICY = (
    "Weights between the policy the update starts from and the sampler. Unless they are named (None), mask where "
    "fully_async samples ahead of training, else none."
)


def command_line() -> CommandLine[GrpoConfig]:
    """Return what `configure` reads flags by."""
    return CommandLine(
        prog="grpo",
        kind=GrpoConfig,
        recipes={name: recipe.config for name, recipe in recipes().items()},
        runs=RUNS,
        by_flag={"--environment": "environment", "--model": "math", "--data": "math", "--preset": "math"},
        owned=OWNED,
        types={
            "advantage": Literal[tuple(ESTIMATORS)],
            "objective.policy_loss": Literal[tuple(POLICY_LOSSES)],
            "objective.off_policy": Annotated[Correction | None, tyro.conf.arg(help=OFF_POLICY)],
        },
        peers=PEERS,
        fixed=("recipe", "model", "warm_start", "engine.lora"),
        beside=_unused,
    )


def _unused(config: GrpoConfig, default: GrpoConfig) -> Iterator[str]:
    if not config.warm_start.steps:
        for path in changed(config, default):
            if path.startswith("warm_start.") and path != "warm_start.steps":
                yield f"{flag(path)} has no effect with --warm-start.steps 0: leave it out"


def configure(argv: Sequence[str]) -> GrpoConfig:
    """Return the configuration of a command line; a given model or file turns the usual recipe to "math".

    Raises:
        SystemExit, ValueError: see `CommandLine.parse`; a flag has no effect beside the others.
    """
    return command_line().parse(argv)


def run(config: GrpoConfig, recipe: Recipe | None = None) -> Result:
    """Check all that can be checked, then train on as many ranks as asked for.

    `recipe`: tasks, model and demonstrations; the registered one that the configuration names unless given.

    Raises:
        ValueError: model, data or settings can't be used; said before anything is sampled.
    """
    quiet_libraries()
    recipe = runnable(config, recipe)
    check_machine(config)
    for name in config.tracker:
        check_tracker(name)
    if under_torchrun():
        # rank 0 makes the model and the folder, the others wait for it
        ensure_group(config.engine.device, config.engine.collective_timeout_seconds)
    run_dir = resolve_run_dir(config.run_dir, RUNS, config.recipe, config.resume)
    if config.resume:
        steps_done(run_dir, config.steps)
    model = _model(config, recipe, run_dir)
    model_config, tokenizer = check_model_directory(model), load_tokenizer(model)
    check_model(config, model, model_config, tokenizer)
    assert recipe.make_tasks is not None
    tasks = recipe.make_tasks(config, tokenizer)
    check_prompts(config, tasks, tokenizer, model)
    from_rank_0(None)  # every rank has passed its checks
    if rank_and_world()[0] == 0:
        write_config(config, run_dir)
    job = functools.partial(train, model=model, run_dir=run_dir, demonstrations=recipe.demonstrations)
    with stoppable(run_dir, run_dir / "warm-start"):
        engine, given = config.engine, (config, tasks)
        waits = engine.collective_timeout_seconds
        result: Result = launch(job, given, config.processes, engine.device, config.threads, waits)
        return result


def _model(config: GrpoConfig, recipe: Recipe, run_dir: Path) -> Path:
    if config.model is not None:
        return model_directory(config.model)
    assert recipe.make_model is not None
    if rank_and_world()[0] == 0:
        recipe.make_model(run_dir / "model", config.seed)
    return from_rank_0(run_dir / "model")


def shrunk(config: GrpoConfig, most: Most) -> tuple[GrpoConfig, Recipe, tuple[Difference, ...]]:
    """Return the configuration at the size of the processes allowed, its recipe, and every field that differs.

    Raises:
        ValueError: there is no such recipe, or there are too few processes.
    """
    recipe = recipes()[config.recipe]
    small, differences = shrink(config, recipe, most)
    return small, shrunk_recipe(small, recipe), differences


def run_shrunk(config: GrpoConfig, most: Most) -> Result:
    """Run a recipe in small, with a tiny random model of its architecture; differences are printed first.

    Raises:
        ValueError: the run would have to do without something, which the text names; or see `run`.
    """
    if config.resume:
        raise ValueError("a shrunk run goes on without --shrink: its settings are in its folder")
    small, recipe, differences = shrunk(config, most)
    tell(config.recipe, [*by_flag(config, recipes()[config.recipe].config), *differences])
    refuse_dropped(work_of(small, recipe))
    run_dir = resolve_run_dir(config.run_dir, RUNS, f"{config.recipe}-shrunk", resume=False)
    with stand_in_for(small.engine.device), nodes_for(small):
        return run(supplied(small, recipe, run_dir), recipe)


def main(argv: Sequence[str], own_process: bool = False) -> None:
    """Plan or run what the command line asks for.

    `own_process`: this is the program's own process, which starts again with the variables that a recipe owns.
    """
    argv, most = asked_for(argv)

    def works() -> list[tuple[Work, Work]]:
        found = [recipe.config for recipe in recipes().values()]
        return [(work_of(config), work_of(*shrunk(config, most or Most())[:2])) for config in found]

    def planned(rest: Sequence[str]) -> Work:
        config = configure(rest)
        return work_of(config) if most is None else work_of(*shrunk(config, most)[:2])

    answer_without_running(argv, works, planned)
    config = configure(argv)
    if own_process:
        start_with(config.cluster.environment)
    if most is None:
        run(config)
    else:
        run_shrunk(config, most)


if __name__ == "__main__":
    cli.main(lambda: main(sys.argv[1:], own_process=True))
