"""The grpo app: `bazel run //apps/grpo -- --help`."""

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; --threads sets what a rank uses

import tyro

from apps.common.cli import command_line as cli
from apps.common.cli.command_line import CommandLine
from apps.common.cli.environment import restart_with, share_between_machines
from apps.common.cli.flags import changed, flag, name_or_file
from apps.common.cli.peer_flags import GRPO as PEERS
from apps.common.cli.plan_command import answer_without_running
from apps.common.cli.recipes import beside_own_model
from apps.common.cli.untested import FLAG_TYPE
from apps.common.importing import without_collections
from apps.common.launch.flag import HELP as LAUNCH_HELP
from apps.common.launch.flag import parse_launch_flag
from apps.common.program import program
from apps.common.shrink.flag import parse_shrink_flag, without_vllm
from apps.grpo.config import OWNED, GrpoConfig
from apps.grpo.first_look import look
from apps.grpo.recipe_resets import without_idle_settings
from apps.grpo.registry import recipes, registered, spec_of
from engines.backends import TRAIN_BACKENDS
from objectives.choices import ESTIMATORS, POLICY_LOSSES, Correction
from runplan.run_spec import RunSpec
from schedules.config import MODES

if TYPE_CHECKING:  # slow to load, and a command line needs none of it
    from apps.grpo.run import run as run
    from apps.grpo.run import run_shrunk as run_shrunk
    from apps.grpo.run import shrunk as shrunk
    from apps.grpo.run import shrunk_spec as shrunk_spec

RUNS = Path("runs/grpo")
_OF_RUN = ("run", "run_shrunk", "shrunk", "shrunk_spec")
"""Functions of `apps.grpo.run`, which are found here too."""
OFF_POLICY = (
    "Weights between the policy the update starts from and the sampler. Unless they are named (None), mask where "
    "fully_async samples ahead of training, else none."
)

COMMANDS = {
    "--config FILE.yaml": "Settings of a file, in place of the recipe's; flags override them.",
    "--print-config": "Print all settings as such a file, and start nothing.",
    "--plan": "Print memory, time, ranks and what keeps the run from starting. It needs no GPU and no weights.",
    "--shrink[=PROCESSES]": "Run the recipe in small, here: a tiny random model, two ranks of each parallelism.",
    "--no-vllm": "With --shrink: the native sampler in place of the recipe's.",
    **LAUNCH_HELP,
    "--recipe list": "List the recipes; with --plan, which of them can be run today.",
    "--help-all": "All flags.",
    "--help-KIND [NAME]": "The options of your own code for a choice: --help-loss FILE.py:NAME, --help-advantage, ...",
}
"""Flags that are of no field."""
GROUPS = {
    "Model and data": (
        *("model", "data.data", "data.eval_data", "plugins.reward", "plugins.environment", "plugins.tool"),
    ),
    "Steps": (
        *("steps", "prompts_per_step", "group_size", "engine.lr", "engine.max_tokens_per_rank"),
        *("sampling.max_new_tokens", "sampling.temperature", "max_episode_tokens", "max_turns"),
    ),
    "Loss": ("advantage", "objective.policy_loss", "objective.kl_coef"),
    "Sampling": (
        *("cluster.rollout.engine", "cluster.rollout.tp", "cluster.rollout.memory_share", "cluster.schedule.mode"),
    ),
    "Training over devices": (
        *("nproc_per_node", "cluster.pools.nodes", "engine.backend", "engine.tensor_parallel"),
        *("engine.context_parallel", "engine.lora.rank", "engine.gradient_checkpointing"),
    ),
    "The run": ("recipe", "run_dir", "resume", "seed", "eval_every", "save_every", "tracker"),
}
"""Fields of `--help`."""


def command_line() -> CommandLine[GrpoConfig]:
    """Return the command line of the app."""
    return CommandLine(
        prog=program("grpo"),
        kind=GrpoConfig,
        recipes={name: recipe.config for name, recipe in recipes().items()},
        runs=RUNS,
        own_recipe=lambda spec, options: registered(spec, options).config,
        by_flag={
            "--environment": "environment",
            "--task-source": "environment",
            "--model": "math",
            "--data": "math",
            "--preset": "math",
        },
        owned=OWNED,
        types={
            "advantage": name_or_file((*ESTIMATORS, *ESTIMATORS.aliases)),
            "cluster.schedule.mode": name_or_file(MODES, aliases=["--schedule"]),
            "engine.allow_untested": FLAG_TYPE,
            "engine.backend": Literal[tuple(TRAIN_BACKENDS)],
            "objective.policy_loss": name_or_file(POLICY_LOSSES, aliases=["--loss"]),
            "objective.off_policy": Annotated[Correction | None, tyro.conf.arg(help=OFF_POLICY)],
        },
        groups=GROUPS,
        commands=COMMANDS,
        peers=PEERS,
        own_model=beside_own_model,
        fixed=("recipe", "model", "warm_start", "engine.lora"),
        beside=_unused,
        reset=without_idle_settings,
    )


def _unused(config: GrpoConfig, default: GrpoConfig) -> Iterator[str]:
    if config.resume and config.cluster.schedule.mode in ("one_step_off", "fully_async"):
        for path in ("prompts_per_step", "group_size"):
            if path in changed(config, default):
                yield (
                    f"{flag(path)} can't change when a run that samples ahead is resumed, as its ledger has groups of "
                    "the earlier number: leave it out, or start a new run"
                )
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


def main(argv: Sequence[str], own_process: bool = False) -> None:
    """Plan or run what the command line asks for.

    `own_process`: this is the program's own process, which starts again with the variables that a recipe owns.
    """
    typed, (argv, launched) = argv, parse_launch_flag(argv)
    argv, most = parse_shrink_flag(without_vllm(argv))

    def planned(rest: Sequence[str]) -> RunSpec:
        from apps.grpo.vllm_defaults import settled  # slow to load

        config = settled(configure(rest))
        return spec_of(config) if most is None else _run_module().shrunk_spec(config, most)

    answer_without_running(argv, recipes, lambda: _run_module().specs_of_recipes(most), planned, typed)
    share_between_machines(argv, GrpoConfig)
    config = configure(argv)
    if launched:
        from apps.common.launch.ray_ranks import launch_ranks  # imports torch

        launch_ranks("grpo", argv, config, RUNS)
        return
    if own_process:
        restart_with(config.cluster.env)
    if most is not None:
        _run_module().run_shrunk(config, most)
        return
    with look(config, RUNS):
        _run_module().run(config)


def _run_module() -> Any:
    """Return the module that runs, which imports torch: help and errors come without."""
    with without_collections():
        from apps.grpo import run as module  # slow to load

    return module


def __getattr__(name: str) -> Any:
    if name not in _OF_RUN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_run_module(), name)


if __name__ == "__main__":
    cli.main(lambda: main(sys.argv[1:], own_process=True))
