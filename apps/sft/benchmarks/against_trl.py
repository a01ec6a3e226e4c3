"""This app's steps against TRL's SFTTrainer: the same model, rows, order, optimizer and budget, in one run on a CPU.

    python -m apps.sft.benchmarks.against_trl [STEPS]        (trl, datasets and accelerate on the path)

Both take the rows that this app tokenised, in its order, with its mask; one thread, float32, a constant rate, clipping
at 1. Time is the process's own (CPU seconds), so that a busy machine matters little. The losses are printed side by
side: the curves are to be equal.
"""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import SFTConfig as TrlConfig
from trl import SFTTrainer

from apps.common.tokens import load_tokenizer, quiet_libraries
from apps.quickstart.model import save_tiny_model
from apps.sft.config import DataConfig, SftConfig
from apps.sft.course import course_of
from apps.sft.data import load_conversations, write_demonstrations
from apps.sft.fit import fit
from apps.sft.reading.sources import Source
from apps.sft.samples import Sample, batch_of
from engines import EngineConfig, build_engine
from objectives import SFT

ENGINE = EngineConfig(device="cpu", lr=3e-3)


@dataclass(frozen=True)
class Curve:
    """The loss of each step, and CPU seconds a step."""

    losses: list[float]
    seconds: list[float]


def ours(model: Path, steps: list[list[Sample]]) -> Iterator[tuple[float, float]]:
    """Loss and CPU seconds of each step by this app's loop."""
    engine = build_engine(replace(ENGINE, model=str(model)))
    batches = [batch_of(rows) for rows in steps]
    clock = time.process_time()
    for _, metrics in fit(engine, batches.__getitem__, SFT(), len(steps), ahead=True):
        yield metrics["loss"], time.process_time() - clock
        clock = time.process_time()


class InOrder(SFTTrainer):
    """Rows as they come."""

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> SequentialSampler:
        del args, kwargs
        return SequentialSampler(self.train_dataset)


class Clock(TrainerCallback):
    """CPU seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.begun = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Start."""
        del args, kwargs
        self.begun = time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Stop."""
        del args, kwargs
        self.seconds.append(time.process_time() - self.begun)


def trl(model: Path, steps: list[list[Sample]], folder: Path, tokenizer: Any) -> Curve:
    """The same by TRL."""
    rows = [
        {"input_ids": row["input_ids"].tolist(), "completion_mask": row["loss_mask"].int().tolist()}
        for step in steps
        for row in step
    ]
    config = TrlConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        max_steps=len(steps),
        per_device_train_batch_size=len(steps[0]),
        learning_rate=ENGINE.lr,
        lr_scheduler_type="constant",
        adam_beta1=ENGINE.betas[0],
        adam_beta2=ENGINE.betas[1],
        adam_epsilon=ENGINE.eps,
        weight_decay=ENGINE.weight_decay,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        completion_only_loss=True,
        max_length=None,
        logging_steps=1,
        logging_strategy="steps",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    clock = Clock()
    trainer = InOrder(loaded, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    trainer.add_callback(clock)
    trainer.train()
    return Curve([row["loss"] for row in trainer.state.log_history if "loss" in row], clock.seconds)


def main(count: int) -> None:
    """Print the table."""
    quiet_libraries()
    torch.set_num_threads(1)
    with TemporaryDirectory() as made:
        folder = Path(made)
        model = save_tiny_model(folder / "model", 0)
        tokenizer = load_tokenizer(model)
        data = DataConfig(max_tokens=256, demonstrations=4096)
        source = Source(write_demonstrations(data, 0, folder / "rows.jsonl"))
        rows = load_conversations(data, [source], tokenizer, None, folder / "tokens")
        course = course_of(SftConfig(steps=count, data=data), rows)
        steps = [[rows.train[i] for i in course.rows(step)] for step in range(count)]
        tokens = sum(len(row["input_ids"]) for step in steps for row in step)
        found = list(zip(*ours(model, steps), strict=True))
        dist.destroy_process_group()
        left = Curve(list(found[0]), list(found[1]))
        right = trl(model, steps, folder / "trl", tokenizer)
    print("| step | ours | TRL |\n| --- | --- | --- |")
    for step in range(0, count, max(1, count // 10)):
        print(f"| {step + 1} | {left.losses[step]:.4f} | {right.losses[step]:.4f} |")
    worst = max(abs(a - b) for a, b in zip(left.losses, right.losses, strict=True))
    speeds = [tokens / count / sorted(curve.seconds)[count // 2] for curve in (left, right)]
    print(f"largest difference of a loss: {worst:.1e}; {tokens // count} tokens a step")
    print(
        f"tokens a CPU second (median step): ours {speeds[0]:,.0f}, TRL {speeds[1]:,.0f}: {speeds[0] / speeds[1]:.1f}x"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
