"""The grpo app: `bazel run //apps/grpo -- --help`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; --threads sets what a rank uses

from apps.common import cli
from apps.common.prompts import read_prompts
from apps.common.run_dir import resolve_run_dir
from apps.common.tokens import load_tokenizer, quiet_libraries
from apps.grpo.config import GrpoConfig
from apps.grpo.recipes import RECIPES
from apps.grpo.tasks import make_tasks
from apps.grpo.train import Result, train
from apps.quickstart.model import ensure_tiny_model
from engines.launch import launch

RUNS = Path("runs/grpo")


def configure(argv: Sequence[str]) -> GrpoConfig:
    """The configuration of a command line; a given model or file turns the default recipe to "math"."""
    return cli.parse(GrpoConfig, RECIPES, cli.with_real_recipe(argv, "math"), "grpo", RUNS)


def run(config: GrpoConfig) -> Result:
    """Check all that can be checked, then train on as many ranks as asked for.

    Raises:
        ValueError: model, data or settings can't be used; said before any training.
    """
    quiet_libraries()
    run_dir = resolve_run_dir(config.run_dir, RUNS, config.recipe, config.resume)
    for path in (config.data.data, config.data.eval_data):
        if path is not None:
            read_prompts(path, config.data.prompt_column, config.data.answer_column)  # before anything is written
    model = config.model or ensure_tiny_model(run_dir / "model", config.seed)
    tasks = make_tasks(config.data, config.seed, load_tokenizer(model))
    if tasks.skipped:
        limit = f"{config.data.max_prompt_tokens} tokens (--max-prompt-tokens)"
        sys.stdout.write(f"skipped {tasks.skipped} prompts of more than {limit}\n")
    return launch(train, (config, model, run_dir), config.processes, config.engine.device, config.threads)


if __name__ == "__main__":
    cli.main(lambda: run(configure(sys.argv[1:])))
