"""One side of a paired seed: the warm start that both sides share, our run, or TRL's (`paired_seeds` starts them).

python -m apps.grpo.benchmarks.paired_sides TASK SEED {warm,ours,trl} FOLDER [--steps N]

FOLDER/warm is the model that both sides begin with. Held-out accuracy is that of the grpo app's evaluation, greedy, for
either side's weights. A side's result is one line of JSON in FOLDER/SIDE.json.
"""

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
import transformers

from apps.common.cli.refusals import Refusals
from apps.common.data.tokenizer import load_tokenizer
from apps.common.run.ranks import init_rank
from apps.common.tasks import Tasks
from apps.grpo.build import RunBuilder
from apps.grpo.commands.evaluate_model import evaluate_model
from apps.grpo.config import GrpoConfig, WarmStart
from apps.grpo.main import run
from apps.grpo.preflight import prepare
from apps.grpo.registry import registered
from runlog import read_metrics
from schedules.runtime.interrupts import Runner

Side = Literal["warm", "ours", "trl"]
RECIPES = {"quickstart": "quickstart", "tool": "quickstart-tool", "image": "quickstart-image"}
STEPS = {"quickstart": 120, "tool": 50, "image": 120}
"""Steps of both sides; the image recipe's 240 take TRL more than ten minutes."""
HELD_OUT = {"quickstart": 530, "tool": 530, "image": 512}
"""Held-out problems: all sums of two digits that there are, and as many pictures."""


@dataclass(frozen=True)
class Trained:
    """What a side did, before its weights are evaluated."""

    seconds: float
    """Wall-clock time from the warm model on disk to the trained one, without the imports."""
    cpu_seconds: float
    model: Path
    steps_seconds: float = 0.0
    """Of `seconds`, those of the steps: without our checks, evaluations and report, and without the setup of either."""


def settings(task: str, seed: int, steps: int) -> GrpoConfig:
    """Return the recipe at so many steps, all of whose evaluations and checkpoints are at its end."""
    config = registered(RECIPES[task], ()).config
    engine = config.engine
    if engine.total_steps is not None:
        engine = replace(engine, total_steps=steps, warmup_steps=min(engine.warmup_steps, steps - 1))
    return replace(config, seed=seed, steps=steps, eval_every=steps, save_every=steps, engine=engine)


def tasks_of(config: GrpoConfig, model: Path) -> Tasks:
    """Return the tasks of a configuration, as a run gets them."""
    refusals = Refusals()
    prepared = prepare(config, registered(config.recipe, ()), model, refusals)
    refusals.tell()
    assert prepared.tasks is not None, "it was refused else"
    return prepared.tasks


def warm(config: GrpoConfig, folder: Path) -> Trained:
    """Make the tiny model and train it on the recipe's demonstrations, as a run does."""
    recipe, begun = registered(config.recipe, ()), time.perf_counter()
    assert recipe.make_model is not None, "the quickstarts make their models"
    made = recipe.make_model(folder / "made", config.seed)
    init_rank(config.threads, config.seed)
    run_dir = folder / "warming"
    with Runner() as runner:
        tasks, tokenizer = tasks_of(config, made), load_tokenizer(made)
        start = RunBuilder(config, tasks, tokenizer, made, run_dir, 0, None, None, runner)
        model = start.warmed(recipe.demonstrations).model
    shutil.copytree(model, folder / "warm", dirs_exist_ok=True)
    return Trained(time.perf_counter() - begun, time.process_time(), folder / "warm")


def ours(config: GrpoConfig, folder: Path) -> Trained:
    """Run the grpo app from the warm model, with all that it does: checks, two evaluations, checkpoint, report."""
    begun, cpu = time.perf_counter(), time.process_time()
    nothing = WarmStart(steps=0)
    result = run(replace(config, model=folder / "warm", warm_start=nothing, run_dir=folder / "ours"))
    spent = time.perf_counter() - begun, time.process_time() - cpu
    steps = sum(row.get("time/step_s", 0.0) for row in read_metrics(result.run_dir))
    return Trained(*spent, result.run_dir / "export", steps)


def trl(config: GrpoConfig, folder: Path) -> Trained:
    """Train with TRL's GRPOTrainer from the warm model."""
    from apps.grpo.benchmarks.paired_trl import check_prompts, trainer_of  # TRL is not among the project's packages

    init_rank(config.threads, config.seed)
    tasks = tasks_of(config, folder / "warm")
    begun, cpu = time.perf_counter(), time.process_time()
    trainer = trainer_of(config, tasks, folder / "warm", folder / "trl")
    stepping = time.perf_counter()
    trainer.train()
    steps = time.perf_counter() - stepping
    model = folder / "trl" / "export"
    shutil.copytree(folder / "warm", model, dirs_exist_ok=True)
    trainer.model.save_pretrained(model)
    trained = Trained(time.perf_counter() - begun, time.process_time() - cpu, model, steps)
    check_prompts(trainer, config, tasks, folder / "warm")
    return trained


SIDES: dict[str, Callable[[GrpoConfig, Path], Trained]] = {"warm": warm, "ours": ours, "trl": trl}


def accuracy(config: GrpoConfig, task: str, model: Path) -> float:
    """Return the share of the held-out problems that a model answers right, greedy."""
    asked = replace(config, model=model, seed=0, data=replace(config.data, eval_prompts=HELD_OUT[task]))
    return evaluate_model(asked).evaluation.accuracy


def result_of(task: str, seed: int, side: str, folder: Path, steps: int) -> dict[str, object]:
    """Do a side and return its line of results."""
    config = settings(task, seed, steps)
    trained = SIDES[side](config, folder)
    return {
        "task": task,
        "seed": seed,
        "side": side,
        "steps": steps,
        "accuracy": accuracy(config, task, trained.model),
        "held_out": HELD_OUT[task],
        "seconds": round(trained.seconds, 2),
        "steps_seconds": round(trained.steps_seconds, 2),
        "cpu_seconds": round(trained.cpu_seconds, 2),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "budget": {
            "prompts_per_step": config.prompts_per_step,
            "group_size": config.group_size,
            "sampling": asdict(config.sampling),
            "lr": config.engine.lr,
        },
    }


def main() -> None:
    """Do the side of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=RECIPES)
    parser.add_argument("seed", type=int)
    parser.add_argument("side", choices=get_args(Side))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int)
    flags = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    result = result_of(flags.task, flags.seed, flags.side, flags.folder, flags.steps or STEPS[flags.task])
    (flags.folder / f"{flags.side}.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
