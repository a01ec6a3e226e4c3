"""Every setting of a GRPO run, one frozen dataclass a concern."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

import tyro

from apps.common.flags import check_owned, flag
from apps.common.plan.cluster import Cluster
from engines import EngineConfig
from objectives import GRPO
from objectives.advantages import ESTIMATORS
from rollout import Sampling

Control = Literal["none", "shuffled-advantages"]
COUNTS = (
    "steps",
    "prompts",
    "group_size",
    "epochs",
    "mini_batches",
    "max_turns",
    "max_episode_tokens",
    "eval_every",
    "save_every",
    "processes",
    "threads",
)
_WHOLE_VOCABULARY = "the trainer scores the whole vocabulary, so answers are sampled from all of it"
_NO_REFERENCE = "a KL penalty needs a reference policy, which this app doesn't hold yet"
OWNED = {
    "engine.model": "use --model",
    "engine.temperature": "use --sampling.temperature",
    "sampling.seed": "use --seed",
    "sampling.greedy": "answers of one group must differ",
    "sampling.top_k": _WHOLE_VOCABULARY,
    "sampling.top_p": _WHOLE_VOCABULARY,
}
"""Fields of the libraries' settings that have no flag here, and why."""
NOT_YET = {"objective.kl_coef": _NO_REFERENCE, "objective.kl_estimator": _NO_REFERENCE}
"""Fields that have no flag either, but recipes that can only be planned set them; a run is refused."""


@dataclass(frozen=True)
class DataConfig:
    """What is asked: a recipe's synthetic task, or a file of prompts with reference answers."""

    data: Path | None = None
    """Training prompts, .jsonl or .parquet; without it the recipe's own task is used."""
    eval_data: Path | None = None
    """Held-out prompts; without it a share of --data is held out."""
    prompt_column: str = "question"
    """Holds a text, or a list of messages; dots reach into nested objects."""
    answer_column: str = "answer"
    """Holds the reference: a text, a number, or a solution that marks its answer by #### or \\boxed{}."""
    eval_share: float = 0.05
    """Share of --data that is held out where there is no --eval-data."""
    max_prompt_tokens: int = 1024
    """Longer prompts are skipped and counted."""
    digits: int = 2
    """Digits of the numbers that a quickstart's synthetic task adds."""
    eval_prompts: int = 256
    """How many held-out prompts an evaluation asks."""

    def __post_init__(self) -> None:
        if self.eval_data is not None and self.data is None:
            raise ValueError("--eval-data goes with --data")
        if self.eval_data is not None and self.eval_share != DataConfig.eval_share:
            raise ValueError("--eval-share has no effect with --eval-data: leave one of them out")
        if not 0 < self.eval_share < 1:
            raise ValueError(f"--eval-share must lie between 0 and 1, got {self.eval_share}")
        if self.digits < 1 or self.eval_prompts < 1 or self.max_prompt_tokens < 1:
            raise ValueError("--digits, --eval-prompts and --max-prompt-tokens must be at least 1")


@dataclass(frozen=True)
class WarmStart:
    """Supervised steps on a recipe's demonstrations before GRPO, through the code of the sft app."""

    steps: int = 0
    """At most so many; 0 starts from the model as it is."""
    until_accuracy: float = 1.0
    """Stop as soon as held-out greedy accuracy reaches this."""
    eval_every: int = 20
    """Steps between looks at that accuracy."""
    eval_prompts: int = 128
    """How many of the held-out prompts a look asks."""
    batch_size: int = 64
    """Demonstrations a step."""
    lr: float = 3e-3
    """Learning rate, constant after the warmup."""
    warmup_steps: int = 20
    """Steps over which it rises from 0."""

    def __post_init__(self) -> None:
        if min(self.steps, self.warmup_steps) < 0 or min(self.eval_every, self.eval_prompts, self.batch_size) < 1:
            raise ValueError("--warm-start.steps and its warmup-steps must be at least 0, its other counts at least 1")
        if not 0 <= self.until_accuracy <= 1:
            raise ValueError(f"--warm-start.until-accuracy must lie between 0 and 1, got {self.until_accuracy}")
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"--warm-start.lr must be above 0 and finite, got {self.lr}")


@dataclass(frozen=True)
class GrpoConfig:
    """Train a language model with group relative policy optimisation (GRPO).

    With no flags: a tiny hybrid Qwen3.5 made on the spot learns two-digit sums on a CPU in a few minutes.
    A real checkpoint on a real file: --model DIR --data FILE.
    """

    recipe: str = "quickstart"
    """Named defaults that the other flags override, with their tasks: one file of apps/grpo/recipes each."""
    model: Path | None = None
    """A local Hugging Face model directory; without it the recipe's tiny Qwen3.5 is made."""
    data: Annotated[DataConfig, tyro.conf.arg(name="")] = field(default_factory=DataConfig)
    run_dir: Path | None = None
    """Where everything is written; runs/grpo/RECIPE-TIME by default."""
    resume: bool = False
    """Go on from the last checkpoint of --run-dir, or of the newest run."""
    seed: int = 0
    """Of the model made, the prompts, and the sampling."""
    processes: int = 1
    """Ranks started on this machine; under torchrun its ranks are used instead."""
    threads: int = 1
    """CPU threads a rank; tiny models run fastest on one."""

    steps: int = 200
    """GRPO steps."""
    prompts: int = 64
    """Prompts a step."""
    group_size: int = 8
    """Answers sampled for each prompt."""
    epochs: int = 1
    """Times each step's batch is trained on."""
    mini_batches: int = 1
    """Optimizer steps an epoch."""
    advantage: str = "grpo"
    """An answer against its group: the estimator's name in `objectives.advantages.ESTIMATORS`."""
    control: Control = "none"
    """A control run: shuffled advantages must teach nothing."""
    max_turns: int = 4
    """Assistant turns an episode may take."""
    max_episode_tokens: int = 4096
    """Prompt and all turns together."""
    eval_every: int = 50
    """GRPO steps between held-out evaluations (also before the first and after the last)."""
    save_every: int = 100
    """GRPO steps between checkpoints (also after the last)."""
    keep_checkpoints: int = 2
    """Checkpoints that are kept before the last one; older ones are deleted."""
    keep_episodes: int = 4
    """Episodes a step that are kept for the report."""

    warm_start: WarmStart = field(default_factory=WarmStart)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: Sampling = field(default_factory=Sampling)
    objective: GRPO = field(default_factory=GRPO)
    cluster: Cluster = field(default_factory=Cluster)
    """Layout, pools, rollout, schedule, media and offload of runs over many devices; --help-cluster lists the flags."""

    def __post_init__(self) -> None:
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise ValueError(f"{flag(name)} must be at least 1, got {getattr(self, name)}")
        if self.keep_checkpoints < 0 or self.keep_episodes < 0:
            raise ValueError("--keep-checkpoints and --keep-episodes must be at least 0")
        check_owned(self, OWNED)
        if self.control not in get_args(Control):
            raise ValueError(f"--control must be one of {', '.join(get_args(Control))}, got {self.control!r}")
        ESTIMATORS.named(self.advantage).check_group_size(self.group_size)
        self._check_updates()
        self._check_lengths()

    def _check_updates(self) -> None:
        if self.mini_batches > self.prompts * self.group_size:
            raise ValueError(
                f"--mini-batches {self.mini_batches} are more than the {self.prompts * self.group_size} answers of a "
                "step (--prompts times --group-size)"
            )
        if self.epochs * self.mini_batches == 1:
            for name in ("clip_low", "clip_high", "dual_clip"):
                if getattr(self.objective, name) != getattr(GRPO, name):
                    raise ValueError(
                        f"{flag('objective.' + name)} has no effect with one update a batch, where the ratio to the "
                        "old policy is 1: leave it out, or raise --epochs or --mini-batches"
                    )

    def _check_lengths(self) -> None:
        if self.sampling.max_new_tokens >= self.max_episode_tokens:
            raise ValueError(
                f"--sampling.max-new-tokens {self.sampling.max_new_tokens} must be below --max-episode-tokens "
                f"{self.max_episode_tokens}, which counts the prompt too"
            )
