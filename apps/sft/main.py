"""The sft app: `bazel run //apps/sft -- --help`."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; --threads sets what a rank uses

from apps.common.cli import CommandLine, main
from apps.common.hints import SFT as PEERS
from apps.common.prompts import read_rows
from apps.common.run_dir import resolve_run_dir
from apps.common.tokens import load_tokenizer, quiet_libraries
from apps.quickstart.model import ensure_tiny_model
from apps.sft.config import OWNED, SftConfig
from apps.sft.data import load_conversations, write_demonstrations
from apps.sft.recipes import RECIPES
from apps.sft.train import Result, train
from engines.launch import launch

RUNS = Path("runs/sft")


def configure(argv: Sequence[str]) -> SftConfig:
    """The configuration of a command line; a given model or file turns the default recipe to "finetune"."""
    line = CommandLine("sft", SftConfig, RECIPES, RUNS, real="finetune", owned=OWNED, peers=PEERS)
    return line.parse(argv)


def run(config: SftConfig) -> Result:
    """Check all that can be checked, then train on as many ranks as asked for.

    Raises:
        ValueError: model, data or settings can't be used; said before any training.
    """
    quiet_libraries()
    run_dir = resolve_run_dir(config.run_dir, RUNS, config.recipe, config.resume)
    for path in (config.data.data, config.data.eval_data):
        if path is not None:
            read_rows(path)  # before anything is written
    model = config.model or ensure_tiny_model(run_dir / "model", config.seed)
    data = config.data.data or run_dir / "demonstrations.jsonl"
    if not data.is_file():
        write_demonstrations(config.data, config.seed, data)
    if config.processes > 1:
        load_conversations(config.data, data, load_tokenizer(model))  # a user's error is said once, by this process
    return launch(train, (config, model, data, run_dir), config.processes, config.engine.device, config.threads)


if __name__ == "__main__":
    main(lambda: run(configure(sys.argv[1:])))
