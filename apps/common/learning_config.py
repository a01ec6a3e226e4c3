"""Settings of what a run learns from besides an environment's rewards: shaping, demonstrations, and a teacher."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from string import Formatter
from typing import Literal

from apps.common.cli.flags import flag
from apps.common.named_values import named_values
from apps.common.teacher_source import teacher_sources


def refuse(problems: Iterator[str]) -> None:
    """Raise ValueError with all problems, where there are any."""
    if message := "; ".join(problems):
        raise ValueError(message)


OTHER_REWARDS = {"gdpo": "its components", "turn_grpo": "those of turns"}
"""Advantages that do not read the reward of a whole answer, and what they read."""


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
    """How many of the held-out prompts a look asks; a quarter of them until that comes to half of the accuracy."""
    batch_size: int = 64
    """Demonstrations a step."""
    lr: float = 3e-3
    """Learning rate, constant after the warmup."""
    warmup_steps: int = 20
    """Steps over which it rises from 0."""
    path = "warm_start."

    def __post_init__(self) -> None:
        refuse(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield texts of all that is wrong, each with a flag."""
        for least, names in ((0, ("steps", "warmup_steps")), (1, ("eval_every", "eval_prompts", "batch_size"))):
            for name in names:
                if getattr(self, name) < least:
                    yield f"{flag(self.path + name)} must be at least {least}, got {getattr(self, name)}"
        if not 0 <= self.until_accuracy <= 1:
            yield f"{flag(self.path + 'until_accuracy')} must lie between 0 and 1, got {self.until_accuracy}"
        if not 0 < self.lr < float("inf"):
            yield f"{flag(self.path + 'lr')} must be above 0 and finite, got {self.lr}"


@dataclass(frozen=True)
class TeacherWarmStart(WarmStart):
    """Supervised steps on a recipe's demonstrations that make a teacher."""

    path = "teachers.teacher_warm_start."


@dataclass(frozen=True)
class RewardShaping:
    """What is added to rewards before answers are compared, and which answers are left out."""

    overlong_buffer: int = 0
    """The reward of an answer falls by up to 1 over the last so many of --sampling.max-new-tokens (DAPO); 0: it does
    not."""
    overlong_filter: bool = False
    """Learn nothing from the tokens of answers that were cut off; their rewards count in their groups (DAPO)."""
    length_reward: float = 0.0
    """Weight of a reward from 0.5 for the shortest answer of a group to -0.5 for the longest; one without a reward gets
    0 at most (Kimi k1.5)."""
    reward_weights: tuple[str, ...] = ()
    """NAME=WEIGHT of reward components, 1 for those that are not named: their weighted sum is the reward that answers
    are compared by, or with --advantage gdpo that of the advantages of each."""
    kl_in_reward: float = 0.0
    """Coefficient of the KL divergence from the model that the run starts from, taken from the reward of an answer, or
    of each token (--advantage reinforce_plus_plus)."""

    def __post_init__(self) -> None:
        refuse(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield texts of all that is wrong, each with a flag."""
        for name in ("overlong_buffer", "length_reward", "kl_in_reward"):
            if not 0 <= getattr(self, name) < float("inf"):
                yield f"{flag('shaping.' + name)} must be at least 0 and finite, got {getattr(self, name)}"
        try:
            weights = self.component_weights.items()
        except ValueError as error:
            yield str(error)
            return
        for name, weight in weights:
            if not isinstance(weight, int | float) or not abs(weight) < float("inf"):
                yield f"--reward-weights: the weight of {name} must be a finite number, got {weight!r}"

    def apart(self, advantage: str) -> str | None:
        """Return the flag by which other rewards are compared than those of whole answers, None without one."""
        weighed = "--reward-weights" if self.reward_weights else None
        return f"--advantage {advantage}" if advantage in OTHER_REWARDS else weighed

    def of_the_reward(self, advantage: str) -> Iterator[str]:
        """Yield texts of what changes the rewards of whole answers, where an advantage reads others."""
        weights = ("reward_weights",) if advantage == "turn_grpo" else ()
        for name in ("overlong_buffer", "length_reward", "kl_in_reward", *weights):
            if advantage in OTHER_REWARDS and getattr(self, name):
                reads = f"--advantage {advantage} reads {OTHER_REWARDS[advantage]}"
                yield f"{flag('shaping.' + name)} changes the reward, and {reads}"

    @property
    def component_weights(self) -> dict[str, float]:
        """The weights by the names of the components."""
        return named_values(flag("shaping.reward_weights"), self.reward_weights, "correct=2")


_IN_PROCESS = "or name the teacher's directory as it is, for a teacher in the process of training"


@dataclass(frozen=True)
class TeacherConfig:
    """On-policy distillation: the policy learns a teacher's distribution at its answers' tokens, not from rewards."""

    teacher: tuple[str, ...] = ()
    """A teacher's model directory, with the model's tokenizer: DIR in the process of training, native:DIR or vllm:DIR
    in that engine beside it; http://HOST:PORT, a server of vLLM; or self, the policy as it is. Of several environments
    NAME=DIR for each."""
    teacher_top_k: int = 32
    """Number of tokens at each place that teacher and policy are compared on; all others count as one event."""
    teacher_tokens: Literal["teacher", "policy"] = "teacher"
    """Whose likeliest tokens these are."""
    teacher_prompt_template: str | None = None
    """What the teacher reads in place of a prompt's last message, such as "{prompt} Its solution: {solution}": {prompt}
    is that message, others are columns of --data (self-distillation: --teacher self)."""
    teacher_answer_seconds: float = 600.0
    """Seconds without a score after which a teacher that is asked (http, vllm, native) counts as lost, and the run
    ends; until then a server that fails is asked again."""
    teacher_gpu_memory_utilization: float = 0.0
    """Share of a device's memory that vllm:DIR takes beside training; 0 on a CPU alone."""
    teacher_warm_start: TeacherWarmStart = field(default_factory=TeacherWarmStart)
    """In place of --teacher: supervised steps on a recipe's demonstrations that make one."""

    def __post_init__(self) -> None:
        refuse(self.problems())

    @property
    def any(self) -> bool:
        """Whether there is a teacher."""
        return bool(self.teacher or self.teacher_warm_start.steps)

    @property
    def frozen(self) -> bool:
        """Whether there is one with weights of its own in the process of training."""
        if self.teacher_warm_start.steps:
            return True
        return any(source.kind == "engine" for source in teacher_sources(self.teacher).values())

    @property
    def on_devices(self) -> tuple[str, ...]:
        """Those that score on the run's devices beside training, as they are named."""
        sources = teacher_sources(self.teacher).values()
        return tuple(str(source) for source in sources if source.kind in ("native", "vllm"))

    def problems(self) -> Iterator[str]:
        """Yield texts of all that is wrong, each with a flag."""
        if self.teacher and self.teacher_warm_start.steps:
            yield "--teacher and --teacher-warm-start.steps: one of them makes the teacher, leave the other at 0"
        if self.teacher_top_k < 1:
            yield f"--teacher-top-k must be at least 1, got {self.teacher_top_k}"
        if self.teacher_tokens not in ("teacher", "policy"):
            yield f"--teacher-tokens must be one of teacher, policy, got {self.teacher_tokens!r}"
        try:
            yield from self._of_kinds()
        except ValueError as error:  # of the names
            yield str(error)
        if self.teacher_prompt_template is not None:
            yield from _template_problems(self.teacher_prompt_template)

    def _of_kinds(self) -> Iterator[str]:
        """Yield what goes with no teacher of these."""
        sources = [*teacher_sources(self.teacher).values()]
        kinds, asked = {source.kind for source in sources}, [source for source in sources if source.uses_rollout]
        for source in sources:
            if source.kind != "server" and "://" in source.place:
                yield f"--teacher {source} is no directory and no server: name DIR, http://HOST:PORT or https://HOST:PORT"
        if "self" in kinds and self.teacher_prompt_template is None:
            yield "--teacher self learns nothing from itself: tell it more by --teacher-prompt-template"
        if asked and self.teacher_tokens == "policy":
            yield f"--teacher-tokens policy: {asked[0]} tells its own likeliest alone: set teacher, {_IN_PROCESS}"
        if not 0 < self.teacher_answer_seconds < float("inf"):
            yield f"--teacher-answer-seconds must be above 0 and finite, got {self.teacher_answer_seconds}"
        elif not asked and self.teacher_answer_seconds != TeacherConfig.teacher_answer_seconds:
            yield "--teacher-answer-seconds is of --teacher http://HOST:PORT, vllm:DIR and native:DIR: leave it out"
        if not 0 <= self.teacher_gpu_memory_utilization < 1:
            yield f"--teacher-gpu-memory-utilization must lie in [0, 1), got {self.teacher_gpu_memory_utilization}"
        elif self.teacher_gpu_memory_utilization and "vllm" not in kinds:
            yield "--teacher-gpu-memory-utilization is of --teacher vllm:DIR: leave it out"

    def beside(self, temperature: float, vision: str) -> Iterator[str]:
        """Yield what a run can't have beside a teacher that a rollout engine scores for."""
        asked = [source for source in teacher_sources(self.teacher).values() if source.uses_rollout]
        if asked and temperature != 1:
            yield f"--teacher {asked[0]} scores at temperature 1: set --sampling.temperature 1, {_IN_PROCESS}"
        if asked and vision != "off":
            yield f"--teacher {asked[0]} is shown no images: leave --trainer.vision at off"


def _template_problems(template: str) -> Iterator[str]:
    """Yield what is wrong with a template, as far as no data are needed."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        yield f"--teacher-prompt-template: {error} (a brace that is no name is written twice)"
        return
    names = [name for _, name, _, _ in parts if name is not None]
    if bad := next((name for name in names if not name.isidentifier()), None):
        yield f"--teacher-prompt-template: {{{bad}}} is no name of a column"
    if "prompt" not in names:
        yield "--teacher-prompt-template lacks {prompt}: the teacher must read the question, too"
