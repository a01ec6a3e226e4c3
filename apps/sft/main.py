"""The sft app: `bazel run //apps/sft -- --help`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; --threads sets what a rank uses

from apps.common import cli
from apps.common.cli import CommandLine
from apps.common.config_file import write_config
from apps.common.hints import SFT as PEERS
from apps.common.model_files import check_model_directory
from apps.common.plan.command import answer_without_running
from apps.common.plan.work import Work
from apps.common.ranks import from_rank_0, rank_and_world
from apps.common.reporter import stoppable
from apps.common.run_dir import resolve_run_dir, steps_done
from apps.common.tokens import load_tokenizer, quiet_libraries
from apps.quickstart.model import ensure_tiny_model
from apps.sft.checks import check_model
from apps.sft.config import OWNED, SftConfig
from apps.sft.data import load_conversations, write_demonstrations
from apps.sft.registry import recipes, runnable, work_of
from apps.sft.train import Result, train
from engines.launch import ensure_group, launch, under_torchrun

RUNS = Path("runs/sft")


def command_line() -> CommandLine[SftConfig]:
    """What `configure` reads flags by."""
    return CommandLine(
        prog="sft",
        kind=SftConfig,
        recipes={name: recipe.config for name, recipe in recipes().items()},
        runs=RUNS,
        real="finetune",
        owned=OWNED,
        peers=PEERS,
        fixed=("recipe", "model", "seed", "data.task", "data.demonstrations"),
    )


def configure(argv: Sequence[str]) -> SftConfig:
    """The configuration of a command line; a given model or file turns the default recipe to "finetune"."""
    return command_line().parse(argv)


def run(config: SftConfig) -> Result:
    """Check all that can be checked, then train on as many ranks as asked for.

    Raises:
        ValueError: model, data or settings can't be used; said before any training.
        DivergenceError, engines.NonFiniteError: the run diverged; it has no export.
    """
    quiet_libraries()
    runnable(config)
    if under_torchrun():
        ensure_group(config.engine.device)  # rank 0 makes the model and the folder, the others wait for it
    run_dir = resolve_run_dir(config.run_dir, RUNS, config.recipe, config.resume)
    if config.resume:
        steps_done(run_dir, config.steps)
    model, data = _model(config, run_dir), _data(config, run_dir)
    model_config, tokenizer = check_model_directory(model), load_tokenizer(model)
    conversations = load_conversations(config.data, data, tokenizer)
    check_model(conversations, model, model_config, tokenizer)
    from_rank_0(None)  # every rank has passed its checks
    if rank_and_world()[0] == 0:
        write_config(config, run_dir)
    with stoppable(run_dir):
        job = (config, conversations, model, run_dir)
        return launch(train, job, config.processes, config.engine.device, config.threads)


def main(argv: Sequence[str]) -> None:
    """Plan or run what the command line asks for."""

    def works() -> list[Work]:
        return [work_of(recipe.config) for recipe in recipes().values()]

    answer_without_running(argv, works, lambda rest: work_of(configure(rest)))
    run(configure(argv))


def _model(config: SftConfig, run_dir: Path) -> Path:
    if config.model is not None:
        return config.model
    if rank_and_world()[0] == 0:
        ensure_tiny_model(run_dir / "model", config.seed)
    return from_rank_0(run_dir / "model")


def _data(config: SftConfig, run_dir: Path) -> Path:
    if config.data.data is not None:
        return config.data.data
    path = run_dir / "demonstrations.jsonl"
    if rank_and_world()[0] == 0 and not path.is_file():
        write_demonstrations(config.data, config.seed, path)
    return from_rank_0(path)


if __name__ == "__main__":
    cli.main(lambda: main(sys.argv[1:]))
