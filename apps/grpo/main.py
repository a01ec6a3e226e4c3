"""The grpo app: `bazel run //apps/grpo -- --help`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; --threads sets what a rank uses

from apps.common import cli
from apps.common.checkpoints import last_checkpoint
from apps.common.run_dir import new_run_dir
from apps.common.tokens import load_tokenizer
from apps.grpo.config import GrpoConfig
from apps.grpo.recipes import RECIPES
from apps.grpo.tasks import make_tasks
from apps.grpo.train import Result, train
from apps.quickstart.model import save_tiny_model
from engines.launch import launch, under_torchrun

RUNS = Path("runs/grpo")


def configure(argv: Sequence[str]) -> GrpoConfig:
    """The configuration of a command line; a given model or file turns the default recipe to "math"."""
    real = any(word.split("=")[0] in ("--model", "--data") for word in argv)
    chosen = any(word.split("=")[0] in ("--recipe", "--resume") for word in argv)
    return cli.parse(GrpoConfig, RECIPES, [*argv, *(["--recipe", "math"] if real and not chosen else [])], "grpo", RUNS)


def run(config: GrpoConfig) -> Result:
    """Check all that can be checked, then train on as many ranks as asked for.

    Raises:
        ValueError: model, data or settings can't be used; said before any training.
    """
    run_dir = _run_dir(config)
    model = config.model or run_dir / "model"
    if config.model is None and not (model / "config.json").is_file() and int(os.environ.get("RANK", "0")) == 0:
        save_tiny_model(model, config.seed)
    if config.model is not None or config.data.data is not None:
        tasks = make_tasks(config.data, config.seed, load_tokenizer(model))
        if tasks.skipped:
            print(
                f"skipped {tasks.skipped} prompts of more than {config.data.max_prompt_tokens} tokens "
                "(--max-prompt-tokens)"
            )
    return launch(train, (config, model, run_dir), config.processes, config.engine.device, config.threads)


def _run_dir(config: GrpoConfig) -> Path:
    if not config.resume:
        if under_torchrun() and config.run_dir is None:
            raise ValueError("under torchrun every rank must be told the same folder: add --run-dir DIR")
        return config.run_dir or new_run_dir(RUNS, config.recipe)
    run_dir = config.run_dir or cli.newest_run(RUNS)
    assert run_dir is not None, "the command line found the run to resume"
    if last_checkpoint(run_dir) is None:
        raise ValueError(f"{run_dir} has no checkpoint to resume from; start anew without --resume")
    return run_dir


if __name__ == "__main__":
    cli.main(lambda: run(configure(sys.argv[1:])))
