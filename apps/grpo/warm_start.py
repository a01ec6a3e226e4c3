"""Supervised steps before GRPO, on a recipe's demonstrations, through the sft app's own loop."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from apps.common.run.config_file import as_plain
from apps.common.run.divergence import told_by_sampler
from apps.common.run.export import save_export
from apps.common.run.ranks import from_rank_0, rank_and_world
from apps.common.run.reporter import Reporter
from apps.grpo.config import GrpoConfig
from apps.grpo.sampling.session import Session
from apps.grpo.tasks.prompt_tasks import Conversation
from apps.sft.loop import fit
from apps.sft.reading.samples import Sample, batch_of, sample_of, stop_tokens_of
from engines import EngineConfig, TrainEngine, build_engine
from objectives import SFT

FINISHED = "finished.json"


@dataclass(frozen=True)
class WarmStarted:
    """After how many steps a warm start ended, and how well its model answers."""

    steps: int
    accuracy: float


def warm_model(folder: Path) -> Path | None:
    """Return the model of a finished warm start in `folder`; None where there is none, or a kill cut it short."""
    finished = from_rank_0((folder / FINISHED).is_file())
    return folder / "export" if finished else None


def imitating(config: GrpoConfig) -> EngineConfig:
    """Return the engine of the warm start: the run's, with the warm start's learning rate, constant after its
    warmup."""
    warm = config.warm_start
    # No sampler chose experts for a demonstration.
    return replace(
        config.engine,
        lr=warm.lr,
        learning_rates=(),
        warmup_steps=warm.warmup_steps,
        lr_schedule="constant",
        total_steps=None,
        min_lr_ratio=0.0,
        routing_replay=False,
    )


def warm_start(
    config: GrpoConfig,
    demonstrations: Callable[[GrpoConfig, int], list[Conversation]],
    model: Path,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    session_of: Callable[[TrainEngine], Session],
) -> Path:
    """Imitate until the held-out accuracy asked for is reached; a Hugging Face directory in `folder`.

    `session_of`: what asks the engine that imitates, between its steps.

    It begins anew where an earlier one was cut short: FINISHED is written when all else is on disk.
    """
    warm = config.warm_start
    if rank_and_world()[0] == 0:
        shutil.rmtree(folder, ignore_errors=True)
    engine = build_engine(replace(imitating(config), model=str(model)))
    session = session_of(engine)
    stop_tokens, pictures = stop_tokens_of(model, tokenizer), session.chat.pictures

    @lru_cache(maxsize=1 << 16 if pictures is None else 0)  # pictures are large, and seldom shown twice
    def sample_at(written: str) -> Sample:
        messages, tools = json.loads(written)
        return sample_of(tokenizer, messages, tools, stop_tokens, pictures)

    def batch_at(step: int) -> TensorDict:  # demonstrations of small tasks come again
        return batch_of([sample_at(json.dumps([c.messages, c.tools])) for c in demonstrations(config, step)])

    accuracy, done = 0.0, 0
    log = Reporter(folder, as_plain(warm), warm.steps, "warm start")
    with log:
        for done, metrics in fit(engine, batch_at, SFT(), warm.steps):
            row = {f"train/{name}": value for name, value in metrics.items()}
            shown: dict[str, float | int | str] = {"loss": metrics["loss"]}
            if done % warm.eval_every == 0 or done == warm.steps:
                with told_by_sampler(done):
                    session.sync(engine)
                    accuracy = row["eval/accuracy"] = shown["held-out"] = session.accuracy(warm.eval_prompts)
            log.step(done, row, shown)
            if accuracy >= warm.until_accuracy:
                break
        log.note(f"warm start: {done} steps, {accuracy:.1%} of the held-out problems right")
    export = save_export(engine, tokenizer, folder / "export")
    if rank_and_world()[0] == 0:
        (folder / FINISHED).write_text(json.dumps(asdict(WarmStarted(done, accuracy))) + "\n", encoding="utf-8")
    return export
