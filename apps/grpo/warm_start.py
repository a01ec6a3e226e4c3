"""Supervised steps before GRPO, on a recipe's demonstrations, through the sft app's own loop."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from apps.common.run.config_file import as_plain
from apps.common.run.divergence import name_sampler_errors
from apps.common.run.export import save_export
from apps.common.run.idle_steps import IdleSteps
from apps.common.run.reporter import Reporter
from apps.grpo.config import GrpoConfig, WarmStart
from apps.grpo.tasks.prompt_tasks import Conversation
from apps.sft.loop import fit, idle_reason
from apps.sft.reading.samples import Sample, batch_of, sample_of, stop_tokens_of
from chat_tools import Renderer
from engines import EngineConfig, TrainEngine, build_engine
from engines.loading import LoadedModel
from engines.storage.disks import find_disks, share_files
from objectives import SFT
from schedules.protocols import Trainer
from schedules.runtime.collectives import broadcast_result, rank_and_world
from schedules.sampling.session import Evaluation, HeldOutMetric, RolloutSession

FINISHED = "finished.json"


@dataclass(frozen=True)
class WarmStartResult:
    """The number of steps of a warm start, and its model's held-out accuracy."""

    steps: int
    accuracy: float


def warm_model(folder: Path) -> Path | None:
    """Return the model of a finished warm start in `folder`; None where there is none, or it was killed."""
    finished = broadcast_result((folder / FINISHED).is_file())
    return folder / "export" if finished else None


def warm_start_metrics(config: GrpoConfig, run_dir: Path) -> dict[str, float]:
    """Return steps and accuracy of the run's warm start, and the accuracy it was to reach; nothing without one.

    An `until_accuracy` of 1 asks for all its steps.
    """
    path = run_dir / "warm-start" / FINISHED
    if not config.warm_start.steps or not path.is_file():
        return {}
    result = {f"warm_start/{name}": float(value) for name, value in json.loads(path.read_text("utf-8")).items()}
    wanted = config.warm_start.until_accuracy
    return result | ({"warm_start/wanted": wanted} if wanted < 1 else {})


def warm_start_engine(config: GrpoConfig) -> EngineConfig:
    """Return the run's engine with the warm start's learning rate, which is constant after its warmup."""
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
    session_of: Callable[[TrainEngine], tuple[RolloutSession, Trainer]],
    opened: LoadedModel | None = None,
) -> Path:
    """Train on demonstrations until the held-out accuracy is reached; return the export's directory in `folder`.

    `session_of` makes the session that samples with the engine between its steps. `opened`: the model, where its
    directory has been opened already.

    It starts anew where an earlier one was killed: FINISHED is written when all else is on disk.
    """
    warm = config.warm_start
    if rank_and_world()[0] == 0:
        shutil.rmtree(folder, ignore_errors=True)
    engine = build_engine(replace(warm_start_engine(config), model=str(model)), opened)
    session, trainer = session_of(engine)
    renderer, image_processor = Renderer(tokenizer, stop_tokens_of(model, tokenizer)), session.chat.image_processor

    @lru_cache(maxsize=1 << 16 if image_processor is None else 0)  # pictures are large, and seldom shown twice
    def sample_at(written: str) -> Sample:
        messages, tools = json.loads(written)
        return sample_of(renderer, messages, tools, image_processor)

    def batch_at(step: int) -> TensorDict:  # demonstrations of small tasks come again
        return batch_of([sample_at(json.dumps([c.messages, c.tools])) for c in demonstrations(config, step)])

    accuracy, done = 0.0, 0
    metric: HeldOutMetric | None = None
    idle = IdleSteps(config.allow_idle_steps)
    log = Reporter(folder, as_plain(warm), warm.steps, "warm start")
    with log:
        for done, metrics in fit(engine, batch_at, SFT(), warm.steps):
            row: dict[str, Any] = {f"train/{name}": value for name, value in metrics.items()}
            shown: dict[str, float | int | str] = {"loss": metrics["loss"]} if "loss" in metrics else {}
            reason = idle_reason(metrics)
            row |= idle.row(reason)
            if done % warm.eval_every == 0 or done == warm.steps:
                with name_sampler_errors(done):
                    session.sync(trainer)
                    evaluation = look_at(session, warm, done == warm.steps)
                metric = metric or evaluation.metric
                accuracy = row[f"eval/{metric}"] = shown["held-out"] = evaluation.accuracy
            log.step(done, row, shown)
            if idle.too_many:
                raise idle.error(done, reason, folder)
            if accuracy >= warm.until_accuracy:
                break
        log.note(f"warm start: {done} steps, {_told(accuracy, metric)}")
    export = save_export(engine, tokenizer, folder / "export")
    share_files(export, find_disks(folder))  # every rank reads it
    if rank_and_world()[0] == 0:
        (folder / FINISHED).write_text(json.dumps(asdict(WarmStartResult(done, accuracy))) + "\n", encoding="utf-8")
    return broadcast_result(export)  # once the first rank has written all of it: its tokenizer, say


def look_at(session: RolloutSession, warm: WarmStart, last: bool) -> Evaluation:
    """Return responses to a quarter of the held-out prompts; to all of them at the last step, or where a quarter came
    to half of the accuracy that ends the warm start."""
    if not last:
        quarter = session.evaluate(-(-warm.eval_prompts // 4))
        if quarter.accuracy < warm.until_accuracy / 2:
            return quarter
    return session.evaluate(warm.eval_prompts)


def _told(accuracy: float, metric: HeldOutMetric | None) -> str:
    """Return what a held-out evaluation came to, in words."""
    score = f"a held-out score of {accuracy:.4g}"
    return score if metric == "score" else f"{accuracy:.1%} of the held-out problems right"
