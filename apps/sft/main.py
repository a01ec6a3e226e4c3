"""The sft app: `bazel run //apps/sft -- --help`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; --threads sets what a rank uses

import tyro

from apps.common.cli import command_line as cli
from apps.common.cli.command_line import CommandLine
from apps.common.cli.environment import restart_with, share_between_machines
from apps.common.cli.peer_flags import SFT as PEERS
from apps.common.cli.plan_command import answer_without_running
from apps.common.cli.recipes import beside_own_model
from apps.common.cli.untested import FLAG_TYPE
from apps.common.importing import without_collections
from apps.common.launch.flag import HELP as LAUNCH_HELP
from apps.common.launch.flag import parse_launch_flag
from apps.common.program import program
from apps.common.shrink.flag import parse_shrink_flag
from apps.sft.config import OWNED, SftConfig
from apps.sft.first_look import look
from apps.sft.registry import recipes, registered, spec_of
from engines.backends import TRAIN_BACKENDS
from runplan.run_spec import RunSpec
from schedules.config import Mode

if TYPE_CHECKING:  # slow to load, and a command line needs none of it
    from apps.sft.run import run as run
    from apps.sft.run import run_shrunk as run_shrunk
    from apps.sft.run import shrunk as shrunk
    from apps.sft.run import shrunk_spec as shrunk_spec

RUNS = Path("runs/sft")
_OF_RUN = ("run", "run_shrunk", "shrunk", "shrunk_spec")
"""Functions of `apps.sft.run`, which are found here too."""

COMMANDS = {
    "--config FILE.yaml": "Settings of a file, in place of the recipe's; flags override them.",
    "--print-config": "Print all settings as such a file, and start nothing.",
    "--plan": "Print memory, time, ranks and what keeps the run from starting. It needs no GPU and no weights.",
    "--shrink[=PROCESSES]": "Run the recipe in small, here: a tiny random model, two ranks of each parallelism.",
    **LAUNCH_HELP,
    "--recipe list": "List the recipes; with --plan, which of them can be run today.",
    "--help-all": "All flags.",
}
"""Flags that are of no field."""
GROUPS = {
    "Model and data": (
        *("model", "data.data", "data.eval_data", "data.form", "data.train_on", "data.max_tokens"),
        *("data.truncation", "data.bad_rows"),
    ),
    "Steps": ("steps", "epochs", "batch_size", "engine.lr", "engine.lr_schedule", "engine.max_tokens_per_rank"),
    "Training over devices": (
        *("nproc_per_node", "cluster.pools.nodes", "engine.backend", "engine.device", "engine.dtype"),
        *("engine.tensor_parallel", "engine.context_parallel", "engine.lora.rank", "engine.gradient_checkpointing"),
    ),
    "The run": ("recipe", "run_dir", "resume", "seed", "eval_every", "save_every", "export", "tracker"),
}
"""Fields of `--help`."""


def command_line() -> CommandLine[SftConfig]:
    """Return the command line of the app."""
    return CommandLine(
        prog=program("sft"),
        kind=SftConfig,
        recipes={name: recipe.config for name, recipe in recipes().items()},
        runs=RUNS,
        own_recipe=lambda spec, options: registered(spec, options).config,
        by_flag={"--model": "finetune", "--data": "finetune"},
        owned=OWNED,
        types={
            "cluster.schedule.mode": Annotated[Mode, tyro.conf.arg(aliases=["--schedule"])],
            "engine.allow_untested": FLAG_TYPE,
            "engine.backend": Literal[tuple(TRAIN_BACKENDS)],
        },
        groups=GROUPS,
        commands=COMMANDS,
        peers=PEERS,
        own_model=beside_own_model,
        fixed=("recipe", "model", "seed", "engine.lora", "data.task", "data.demonstrations"),
    )


def configure(argv: Sequence[str]) -> SftConfig:
    """Return the configuration of a command line; with --model or --data the default recipe is "finetune"."""
    return command_line().parse(argv)


def main(argv: Sequence[str], own_process: bool = False) -> None:
    """Plan or run what the command line asks for.

    `own_process`: this is the program's own process, which starts again with the variables that a recipe owns.
    """
    typed, (argv, launched) = argv, parse_launch_flag(argv)
    argv, most = parse_shrink_flag(argv)

    def planned(rest: Sequence[str]) -> RunSpec:
        config = configure(rest)
        if config.epochs is not None:
            raise ValueError("--plan reads no data, so it can't count --epochs: give --max-steps for it")
        return spec_of(config) if most is None else _run_module().shrunk_spec(config, most)

    answer_without_running(argv, recipes, lambda: _run_module().specs_of_recipes(most), planned, typed)
    share_between_machines(argv, SftConfig)
    config = configure(argv)
    if launched:
        from apps.common.launch.ray_ranks import launch_ranks  # imports torch

        launch_ranks("sft", argv, config, RUNS)
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
        from apps.sft import run as module  # slow to load

    return module


def __getattr__(name: str) -> Any:
    if name not in _OF_RUN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_run_module(), name)


if __name__ == "__main__":
    cli.main(lambda: main(sys.argv[1:], own_process=True))
