"""A whole GRPO step of ours beside one of TRL's GRPOTrainer, interleaved in one run, in processor time.

    pip install trl==1.16.0 accelerate datasets
    PYTHONPATH=.:libs/seqpack:libs/dyncp:libs/chat_tools:libs/objectives:libs/engines:libs/rollout:libs/runlog \
        OMP_NUM_THREADS=1 python apps/grpo/benchmarks/step_vs_trl.py [--case NAME] [--steps N]

Both begin with the same weights and see prompts of the same tokens; every answer has the same length (TRL's are kept
from ending, ours have no stop token), rewards differ within a group, so that no row is without a gradient. Both sample
in float32, train once on what they sampled (no KL) and log metrics. TRL's trainer runs as it is: a callback at the end
of each of its steps does one of ours. Times are processor seconds a step, the median after a first step of each.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig as TrlConfig
from trl import GRPOTrainer

from apps.grpo.config import DataConfig, GrpoConfig
from apps.grpo.sampling.source import rollout_settings
from apps.grpo.step import GrpoTrainer
from apps.quickstart.model import tiny_config
from apps.quickstart.tokenizer import PAD, TURN_END, build_tokenizer
from engines import EngineConfig, build_engine
from objectives import GRPO
from rollout import Chat, NativeEngine, Sampling, Task, TaskRow
from schedules.runtime.interrupts import Runner
from schedules.sampling.session import RolloutSession
from schedules.sync import sync_step


@dataclass(frozen=True)
class Case:
    """A step: `prompts` prompts with `group` responses of `new_tokens` tokens each."""

    name: str
    prompts: int
    group: int
    new_tokens: int
    hidden: int = 64
    layers: int = 4


CASES = (
    Case("64 x 8, short (the quickstart's)", 64, 8, 8),
    Case("8 x 8, 64 tokens", 8, 8, 64),
    Case("2 x 8, 128 tokens", 2, 8, 128),
    Case("1 x 2, long answers", 1, 2, 512),
    Case("4 x 4, 5.6M parameters", 4, 4, 32, hidden=256, layers=8),
)


def reward_of(text: str) -> float:
    """Return a reward that differs between responses."""
    return sum(map(ord, text)) % 97 / 97


@dataclass(frozen=True)
class Sums:
    """Tasks whose prompts have a few tokens."""

    name: str = "sums"
    skipped: Mapping[str, int] = field(default_factory=dict)

    def held_out(self) -> list[TaskRow]:
        """Return no tasks."""
        return []

    def cursor(self) -> dict[str, Any]:
        """Return nothing: a step's tasks follow from its number."""
        return {}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Do nothing: there is no state."""

    def tasks(self, step: int, count: int) -> list[TaskRow]:
        """Return the step's prompts."""
        return [TaskRow(f"{step}/{i}", {"text": f"{i % 90 + 10}+{(7 * step + i) % 90 + 10}="}) for i in range(count)]

    def environment(self, row: TaskRow) -> Task:
        """Return a task of one turn."""
        return Task(
            messages=({"role": "user", "content": row.data["text"]},), reward=lambda reply, _: reward_of(reply.text)
        )


class Ours:
    """Our step, run once a call."""

    def __init__(self, case: Case, model: Path, runner: Runner) -> None:
        tokenizer = build_tokenizer()
        self.config = GrpoConfig(
            recipe="benchmark",
            data=DataConfig(),
            steps=1000,
            prompts_per_step=case.prompts,
            group_size=case.group,
            max_turns=1,
            max_episode_tokens=1024,
            engine=EngineConfig(device="cpu", lr=1e-4),
            sampling=Sampling(max_new_tokens=case.new_tokens),
            objective=GRPO(),
        )
        self.chat = Chat(tokenizer, TURN_END, stop_tokens=())
        self.trainer = GrpoTrainer(self.config, build_engine(replace(self.config.engine, model=str(model))))
        sampler = NativeEngine(
            transformers.Qwen3_5ForCausalLM.from_pretrained(model), pad_token_id=tokenizer.pad_token_id, admit="rounds"
        )
        self.session = RolloutSession(rollout_settings(self.config), Sums(), self.chat, sampler, runner)
        self.done = 0

    def prompt(self, row: TaskRow) -> str:
        """Return the text whose tokens our sampler sees."""
        return str(self.chat.tokenizer.decode(self.chat.open([{"role": "user", "content": row.data["text"]}])))

    def step(self) -> int:
        """Run one step; return the number of sampled tokens."""
        result = sync_step(self.session, self.trainer, self.done)
        self.done += 1
        assert result.metrics["rollout/failed_episodes"] == 0
        return int(result.metrics["rollout/sampled_tokens"])


class Between(transformers.TrainerCallback):  # type: ignore[misc]
    """A callback that times TRL's steps and runs one of ours after each."""

    def __init__(self, ours: Ours, expected: int) -> None:
        self.ours, self.expected = ours, expected
        self.theirs_s: list[float] = []
        self.ours_s: list[float] = []
        self.mark = 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Start the clock: sampling is part of TRL's step and comes before on_step_begin."""
        self.mark = time.process_time()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Record TRL's step, then run and record one of ours."""
        now = time.process_time()
        self.theirs_s.append(now - self.mark)
        assert self.ours.step() == self.expected
        self.mark = time.process_time()
        self.ours_s.append(self.mark - now)


def trl_trainer(case: Case, model: Path, steps: int, folder: Path, between: Between) -> GRPOTrainer:
    """Return TRL's trainer of the same step."""
    rows = [row for step in range(steps) for row in between.ours.session.tasks.tasks(step, case.prompts)]
    count = case.prompts * case.group
    lengths: list[float] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        lengths.extend(map(len, completion_ids))
        assert all(length == case.new_tokens for length in lengths), "an answer of TRL's has another length"
        return [reward_of(text) for text in completions]

    return GRPOTrainer(
        model=transformers.Qwen3_5ForCausalLM.from_pretrained(model),
        reward_funcs=reward,
        args=TrlConfig(
            output_dir=str(folder / "trl"), max_steps=steps, per_device_train_batch_size=count,
            num_generations=case.group, max_completion_length=case.new_tokens, beta=0.0, learning_rate=1e-4,
            lr_scheduler_type="constant", temperature=1.0, loss_type="grpo", report_to=[], save_strategy="no",
            logging_steps=1, use_cpu=True, bf16=False, disable_tqdm=True, gradient_checkpointing=False,
            generation_kwargs={"min_new_tokens": case.new_tokens}, seed=0,
        ),
        train_dataset=Dataset.from_list([{"prompt": between.ours.prompt(row)} for row in rows]),
        processing_class=between.ours.chat.tokenizer,
        callbacks=[between],
    )  # fmt: skip


def run(case: Case, steps: int, folder: Path) -> tuple[float, float, int]:
    """Return the median seconds of our step and of TRL's, and the number of parameters."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    pad, end = tokenizer.convert_tokens_to_ids([PAD, TURN_END])
    module = transformers.Qwen3_5ForCausalLM(tiny_config(len(tokenizer), pad, end, case.hidden, case.layers))
    model = folder / "model"
    module.save_pretrained(model)
    tokenizer.save_pretrained(model)
    with Runner() as runner:
        between = Between(Ours(case, model, runner), case.prompts * case.group * case.new_tokens)
        trl_trainer(case, model, steps + 1, folder, between).train()
    mine, other = (statistics.median(times[1:]) for times in (between.ours_s, between.theirs_s))
    return mine, other, sum(p.numel() for p in module.parameters())


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--case", help="only cases whose name holds this")
    flags = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(f"{'case':<34}{'parameters':>11}{'rows':>6}{'tokens':>8}{'ours':>10}{'TRL':>10}{'ratio':>7}")
    for case in CASES:
        if flags.case and flags.case not in case.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            mine, other, size = run(case, flags.steps, Path(folder))
        rows = case.prompts * case.group
        print(
            f"{case.name:<34}{size / 1e6:>10.2f}M{rows:>6}{rows * case.new_tokens:>8}"
            f"{mine:>8.3f} s{other:>8.3f} s{other / mine:>7.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
