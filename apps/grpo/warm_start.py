"""Supervised steps before GRPO, on demonstrations of the made task, through the sft app's own loop."""

from dataclasses import dataclass, replace
from pathlib import Path

from tensordict import TensorDict
from transformers import PreTrainedTokenizerBase

from apps.common.config_file import as_plain
from apps.common.export import save_export
from apps.common.reporter import Reporter
from apps.grpo.config import GrpoConfig
from apps.grpo.session import Session
from apps.grpo.tasks import made_problems
from apps.quickstart.demonstrations import demonstration
from apps.sft.fit import fit
from apps.sft.samples import batch_of, sample_of
from engines import build_engine
from objectives import SFT
from rollout import calculator


@dataclass(frozen=True)
class WarmStarted:
    """Where the warm model was saved, after how many steps, and how well it answers."""

    model: Path
    steps: int
    accuracy: float


def warm_start(
    config: GrpoConfig, model: Path, tokenizer: PreTrainedTokenizerBase, run_dir: Path, session: Session
) -> WarmStarted:
    """Imitate until the held-out accuracy asked for is reached, then save a Hugging Face directory in `run_dir`."""
    warm = config.warm_start
    engine = build_engine(
        replace(config.engine, model=str(model), lr=warm.lr, lr_schedule="constant", warmup_steps=warm.warmup_steps)
    )
    problems_at = made_problems(config.data, config.seed + 1)
    tools = [calculator().schema] if config.data.task == "calculator" else None

    def batch_at(step: int) -> TensorDict:
        conversations = [demonstration(problem, config.data.task) for problem in problems_at(step, warm.batch_size)]
        return batch_of([sample_of(tokenizer, messages, tools) for messages in conversations])

    accuracy, done = 0.0, 0
    log = Reporter(run_dir, as_plain(warm), warm.steps, "warm start")
    with log:
        for done, metrics in fit(engine, batch_at, SFT(), warm.steps):
            row = {f"train/{name}": value for name, value in metrics.items()}
            shown: dict[str, float | int | str] = {"loss": metrics["loss"]}
            if done % warm.eval_every == 0 or done == warm.steps:
                session.sync(engine, done)
                accuracy = row["eval/accuracy"] = shown["held-out"] = session.accuracy(warm.eval_prompts)
            log.step(done, row, shown)
            if accuracy >= warm.until_accuracy:
                break
        log.note(f"warm start: {done} steps, {accuracy:.1%} of the held-out problems right")
    return WarmStarted(save_export(engine, tokenizer, run_dir / "export"), done, accuracy)
