"""Every setting of a GRPO run, one frozen dataclass a concern."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro

from apps.common.cli.extensions import load_own_code
from apps.common.cli.flags import flag, leaves, owned_problems
from apps.common.cluster import Cluster
from apps.common.data.presets import PresetName
from apps.common.data.template_options import template_options
from apps.common.learning_config import RewardShaping as RewardShaping
from apps.common.learning_config import TeacherConfig as TeacherConfig
from apps.common.learning_config import TeacherWarmStart as TeacherWarmStart
from apps.common.learning_config import WarmStart as WarmStart
from apps.common.learning_config import refuse
from apps.common.own_metrics import check_metrics
from apps.common.run.idle_steps import ALLOWED, allowed_problem
from apps.common.tool_formats import format_of
from engines import EngineConfig
from objectives import GRPO, Distillation
from objectives.choices import check_advantage_options, check_group_size
from rollout import Sampling, StructuredOutputs
from schedules.config import FilterGroups, Mode

Control = Literal["none", "shuffled-advantages"]
COUNTS = (
    "steps",
    "prompts_per_step",
    "group_size",
    "num_generations_eval",
    "epochs",
    "mini_batches",
    "max_turns",
    "max_episode_tokens",
    "eval_every",
    "save_every",
    "nproc_per_node",
    "threads",
)
_WHOLE_VOCABULARY = "the trainer scores the whole vocabulary, so answers are sampled from all of it"
_MODEL_ALONE = "the trainer scores what the model says without penalties, so answers are sampled from that"
OWNED = {
    "engine.model": "use --model",
    "engine.temperature": "use --sampling.temperature",
    "sampling.seed": "use --seed",
    "sampling.greedy": "answers of one group must differ",
    **dict.fromkeys(("sampling.top_k", "sampling.top_p", "sampling.min_p"), _WHOLE_VOCABULARY),
    **{f"sampling.structured_outputs.{each.name}": _WHOLE_VOCABULARY for each in fields(StructuredOutputs)},
    **{f"sampling.{name}_penalty": _MODEL_ALONE for name in ("presence", "frequency", "repetition")},
}
"""Fields of the libraries' settings that have no flag here, and why."""


@dataclass(frozen=True)
class DataConfig:
    """What is asked: a recipe's synthetic task, or a file of prompts with reference answers."""

    data: Path | None = None
    """Training prompts: a file (.jsonl, .json, .csv, .parquet, or one of them and .gz), a directory, or a data set of
    the hub (OWNER/NAME:SPLIT); without it the recipe's own task is used."""
    eval_data: Path | None = None
    """Held-out prompts; without it a share of --data is held out."""
    prompt_column: str = "question"
    """Column with a text, or a list of messages; dots reach into nested objects."""
    answer_column: str = "answer"
    """Column with the reference: a text, a number, or a solution that marks its answer by #### or \\boxed{}."""
    eval_share: float = 0.05
    """Share of --data that is held out where there is no --eval-data; at most --eval-prompts rows."""
    max_prompt_tokens: int = 1024
    """Longer prompts are skipped and counted."""
    digits: int = 2
    """Digits of the numbers that a quickstart's synthetic task adds."""
    eval_prompts: int = 256
    """How many held-out prompts an evaluation asks."""

    def __post_init__(self) -> None:
        refuse(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield texts of all that is wrong, each with a flag."""
        if self.eval_data is not None and self.data is None:
            yield "--eval-data goes with --data"
        if not 0 < self.eval_share < 1:
            yield f"--eval-share must lie between 0 and 1, got {self.eval_share}"
        elif self.eval_data is not None and self.eval_share != DataConfig.eval_share:
            yield "--eval-share has no effect with --eval-data: leave one of them out"
        for name in ("digits", "eval_prompts", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                yield f"{flag(name)} must be at least 1, got {getattr(self, name)}"


@dataclass(frozen=True)
class PluginConfig:
    """What a user brings, by name: FILE.py:NAME or package.module:name (`apps.common.plugins`)."""

    environment: tuple[str, ...] = ()
    """Environments that are played in place of a recipe's tasks; several in one run are told apart by a column."""
    environment_options: tuple[str, ...] = ()
    """NAME=VALUE options of environments, by the arguments of what makes them; each gets those that it takes."""
    task_source: str | None = None
    """Where tasks come from: what makes a rollout.TaskSource of `seed`, `held_out` and options, as many as it names.
    --environment plays its tasks, or else what its own `environment(row)` returns."""
    task_source_options: tuple[str, ...] = ()
    """NAME=VALUE options of the task source."""
    tasks: Path | None = None
    """Rows for the environments, .jsonl or .parquet; without it their tasks are numbered."""
    environment_column: str = "environment"
    """Says which of several environments a row of --tasks is for, by the last part of its name."""
    environment_shares: tuple[str, ...] = ()
    """NAME=SHARE of a step's prompts for each of several environments; by default as many as each has rows. One with 0
    is evaluated and never trained: all of its rows are held out."""
    reward: str | None = None
    """Score of the answers to --data: a function of some of reply, reference, row, results, end. Answers that a limit
    cut off earn 0 and are not shown to it, unless it names `end` ("done", "limit", "length", "max_turns", "max_tokens",
    "deadline")."""
    reward_options: tuple[str, ...] = ()
    """NAME=VALUE options of the reward: its other arguments."""
    tool: tuple[str, ...] = ()
    """Tools that may be called on the way to an answer to --data: rollout.Tool objects, functions that make one,
    functions with typed arguments, "mcp:COMMAND" for all tools of an MCP server, "shell" or "python" for a session in
    the sandbox that lasts an episode (both share its files)."""
    tool_options: tuple[str, ...] = ()
    """NAME=VALUE options of functions that make tools; each gets those that it takes."""
    system_prompt: str | None = None
    """Put before every conversation."""
    template_options: tuple[str, ...] = ()
    """NAME=VALUE options of the chat template, such as enable_thinking=false."""
    tool_format: str | None = None
    """How the model writes tool calls (`chat_tools.formats()`), or a chat_tools.Format of your own; by default what its
    chat template shows."""
    tool_format_options: tuple[str, ...] = ()
    """NAME=VALUE options of a function that makes the format."""
    preset: PresetName | None = None
    """Columns and system prompt of a well-known data set's files (`apps.common.data.presets`)."""

    def __post_init__(self) -> None:
        refuse(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield texts of all that is wrong, each with a flag."""
        if self.environment or self.task_source is not None:
            for name in ("reward", "tool", "preset"):
                if getattr(self, name):
                    yield f"--{name} goes with --data: an environment has tasks, rewards and tools of its own"
        if self.task_source is not None and self.tasks is not None:
            yield "--tasks has no effect with --task-source: leave one of them out"
        for name in ("environment", "task_source", "reward", "tool", "tool_format"):
            options = getattr(self, f"{name}_options")
            if options and not getattr(self, name):
                yield f"{flag(f'plugins.{name}_options')} has no effect without {flag(f'plugins.{name}')}"
        if not self.environment:
            for name in ("tasks", "environment_column", "environment_shares"):
                if getattr(self, name) != getattr(PluginConfig, name):
                    yield f"{flag(name)} goes with --environment"
        if len(self.environment) == 1 and self.environment_shares:
            yield "--environment-shares has no effect with one environment: leave it out"
        if self.system_prompt is not None and not self.system_prompt.strip():
            yield "--system-prompt is empty: leave it out"
        try:
            template_options(self.template_options)
        except ValueError as error:
            yield str(error)
        if self.tool_format is not None:
            try:
                format_of(self.tool_format, self.tool_format_options)
            except ValueError as error:
                text = str(error)
                yield text if text.startswith("--tool-format") else f"--tool-format: {text}"


@dataclass(frozen=True)
class GrpoConfig:
    """Train a language model with group relative policy optimisation (GRPO).

    With no flags: a tiny hybrid Qwen3.5 made on the spot learns two-digit sums on a CPU in a few minutes.
    A real checkpoint on a real file: --model DIR --data FILE.
    """

    recipe: str = "quickstart"
    """Named defaults that the other flags override, with their tasks: one file of apps/grpo/recipes each, or a
    `apps.grpo.recipe.Recipe` of your own, as FILE.py:NAME or package.module:NAME. Without it --model, --data and
    --preset take math, --environment and --task-source environment."""
    recipe_options: tuple[str, ...] = ()
    """NAME=VALUE options of a function that makes the recipe."""
    model: Path | None = None
    """A local Hugging Face model directory; without it the recipe's tiny Qwen3.5 is made."""
    data: Annotated[DataConfig, tyro.conf.arg(name="")] = field(default_factory=DataConfig)
    plugins: Annotated[PluginConfig, tyro.conf.arg(name="")] = field(default_factory=PluginConfig)
    run_dir: Path | None = None
    """Where everything is written; runs/grpo/RECIPE-TIME by default."""
    resume: bool = False
    """Go on from the last checkpoint of --run-dir, or of the newest run."""
    seed: int = 0
    """Of the tiny model, the prompts, and the sampling."""
    nproc_per_node: int = 1
    """Ranks started on this machine; under torchrun its ranks are used instead."""
    threads: int = 1
    """CPU threads a rank; tiny models run fastest on one."""

    steps: int = 200
    """GRPO steps."""
    prompts_per_step: int = 64
    """Prompts a step."""
    group_size: int = 8
    """Answers sampled for each prompt."""
    filter_groups: FilterGroups = field(default_factory=FilterGroups)
    epochs: int = 1
    """Number of times that each step's batch is trained on."""
    mini_batches: int = 1
    """Optimizer steps an epoch."""
    advantage: str = "grpo"
    """An answer against its group: the estimator's name in `objectives.advantages.ESTIMATORS`, or a function of
    `rewards`, `groups`, `response_length` or `batch`, as FILE.py:NAME or package.module:NAME."""
    advantage_options: tuple[str, ...] = ()
    """NAME=VALUE options of the advantage, by the function's signature."""
    control_run: Control = "none"
    """A control run: shuffled advantages must teach nothing."""
    max_turns: int = 4
    """Assistant turns an episode may take."""
    max_episode_tokens: int = 4096
    """Prompt and all turns together: of each token stream, and of all that is sampled in the episode's streams."""
    max_episode_seconds: float | None = None
    """An episode that takes longer ends where it is, whatever hangs in it; without it none is hurried."""
    environment_processes: int | None = None
    """Processes that play environments on each sampler's machine, apart from it; None: as many as their CPU time asks
    for. 0 plays them in threads of the process that samples, as are those marked instant."""
    environment_memory_gib: float | None = None
    """Memory of a process of environments with all that it starts, before it is replaced; None: half the machine's."""
    environment_servers: tuple[str, ...] = ()
    """HOST:PORT of machines that play environments (`python -m rollout.environments.processes.serve`)."""
    stall_seconds: float = 120.0
    """A process that samples (fully_async, Ray) or plays environments and says nothing for so long, as a stopped one,
    is told, with its stack, and replaced; a rank that does ends the run, whatever started it."""
    eval_every: int = 50
    """GRPO steps between held-out evaluations (also before the first and after the last)."""
    num_generations_eval: int = 1
    """Answers to each held-out prompt: 1 takes the likeliest tokens, more are sampled as in training (mean@k, pass@k,
    maj@k)."""
    export: Literal["last", "best"] = "last"
    """Export the weights after the last step, or those of the best evaluation, which are kept in checkpoints/best."""
    save_every: int = 100
    """GRPO steps between checkpoints (also after the last)."""
    keep_checkpoints: int = 2
    """Checkpoints that are kept before the last one; older ones are deleted."""
    allow_idle_steps: int | None = ALLOWED
    """Steps in a row that may train nothing: so many stop the run, which has a checkpoint then. None: no limit."""
    tracker: tuple[Literal["wandb", "mlflow", "trackio"], ...] = ()
    """Trackers that are told the metrics besides the run folder; WANDB_MODE, MLFLOW_TRACKING_URI, ... say where."""
    metric: tuple[str, ...] = ()
    """Metrics of your own: functions of `episodes`, `advantages`, `tasks`, `metrics` and `step`, as many as each names,
    that return a number or several by name."""
    metric_options: tuple[str, ...] = ()
    """NAME=VALUE options of these functions; each gets those that it takes."""
    log_groups: int = 1
    """Number of groups a step that are kept for the report, drawn at random, with all their episodes."""
    log_failures: int = 4
    """Held-out tasks an evaluation that are kept for the report, drawn at random from those that failed, or earned
    nothing, or less than the best."""

    warm_start: WarmStart = field(default_factory=WarmStart)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: Sampling = field(default_factory=Sampling)
    objective: GRPO = field(default_factory=GRPO)
    shaping: Annotated[RewardShaping, tyro.conf.arg(name="")] = field(default_factory=RewardShaping)
    teachers: Annotated[TeacherConfig, tyro.conf.arg(name="")] = field(default_factory=TeacherConfig)
    distillation: Distillation = field(default_factory=Distillation)
    cluster: Annotated[Cluster, tyro.conf.arg(name="")] = field(default_factory=Cluster)
    """Layout, pools, rollout, schedule, media and offload of runs over many devices; --help-cluster lists the flags."""

    def __post_init__(self) -> None:
        refuse(self.problems())

    def problems(self) -> Iterator[str]:
        """Yield texts of all that is wrong beside the parts, each with a flag."""
        # what is wrong together may follow from a value that is wrong alone: that is told first
        parts = (self._distilled(), self._groups(), self._updates(), self._lengths(), self._windows())
        yield from [*self.out_of_range()] or chain.from_iterable(parts)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Import the user's code in the process that is sent this: what follows may be of its classes."""
        self.__dict__.update(state)
        load_own_code(self)

    @property
    def needs_reference(self) -> bool:
        """Whether tokens are scored by the model that the run starts from."""
        return self.objective.kl_coef > 0 or self.shaping.kl_in_reward > 0

    @property
    def corrected_objective(self) -> GRPO:
        """`objective` as it holds: where no off-policy weights are named, with those that the schedule asks for."""
        if self.objective.off_policy is not None:
            return self.objective
        return replace(self.objective, off_policy=self.cluster.schedule.correction)

    def out_of_range(self) -> Iterator[str]:
        """Yield texts of fields that can't have their value, whatever the others have."""
        yield from owned_problems(self, OWNED)
        for name in COUNTS:
            if getattr(self, name) < 1:
                yield f"{flag(name)} must be at least 1, got {getattr(self, name)}"
        for name in ("keep_checkpoints", "log_groups", "log_failures"):
            if getattr(self, name) < 0:
                yield f"{flag(name)} must be at least 0, got {getattr(self, name)}"
        yield from allowed_problem(self.allow_idle_steps)
        if self.filter_groups.enable and self.cluster.schedule.mode not in get_args(Mode):
            yield "--filter-groups.enable has no effect with a schedule of your own: leave it out"
        learns = self.shaping.apart(self.advantage)
        if learns and self.filter_groups.enable and self.filter_groups.metric == "reward":
            yield f"--filter-groups.metric reward leaves out groups that {learns} learns from: set it to any"
        yield from self.shaping.of_the_reward(self.advantage)
        if self.control_run not in get_args(Control):
            yield f"--control-run must be one of {', '.join(get_args(Control))}, got {self.control_run!r}"
        if self.environment_processes is not None and self.environment_processes < 0:
            yield f"--environment-processes must be at least 0, got {self.environment_processes}"
        if wrong := [name for name in self.environment_servers if not name.rpartition(":")[2].isdecimal()]:
            yield f"--environment-servers are HOST:PORT, got {wrong[0]}"
        elif self.environment_servers and not self.environment_processes:
            yield "--environment-servers needs --environment-processes above 0: how many they play in, in all"
        elif self.environment_servers and self.environment_memory_gib is not None:
            yield "--environment-memory-gib is of this machine: give --memory-gib to each server"
        if self.environment_memory_gib is not None and not self.environment_memory_gib > 0:
            yield f"--environment-memory-gib must be more than 0, got {self.environment_memory_gib}"
        if not 0 < self.stall_seconds < float("inf"):
            yield f"--stall-seconds must be above 0 and finite, got {self.stall_seconds}"
        if self.max_episode_seconds is not None and not self.max_episode_seconds > 0:
            yield f"--max-episode-seconds must be more than 0, got {self.max_episode_seconds}"

    def _distilled(self) -> Iterator[str]:
        """Yield what has no effect with a teacher, or without one."""
        taught = self.teachers.any
        idle: tuple[str, ...] = ("distillation.", "teachers.")
        if taught:
            idle = ("advantage", "objective.", "control_run", "filter_groups.", "shaping.")
        for path, value, default in leaves(self):
            if path.startswith(idle) and value != default:
                yield f"{flag(path)} has no effect {'with' if taught else 'without'} --teacher: leave it out"
        yield from self.teachers.beside(self.sampling.temperature, self.engine.vision)
        if self.teachers.teacher_prompt_template is not None:
            if self.max_turns > 1:
                yield "--teacher-prompt-template is of answers of one turn: set --max-turns 1"
            if self.engine.vision != "off":
                yield "--teacher-prompt-template is of prompts of text: leave --trainer.vision at off"

    def _groups(self) -> Iterator[str]:
        """Yield what the advantage can't be of."""
        try:
            check_group_size(self.advantage, 2 if self.teachers.any else self.group_size)
            check_advantage_options(self.advantage, self.advantage_options)
        except ValueError as error:
            named = "--" in str(error) or str(error).startswith("advantage_options")
            yield str(error) if named else f"--advantage: {error}"
        try:
            check_metrics(self.metric, self.metric_options)
        except ValueError as error:
            yield str(error)

    def _updates(self) -> Iterator[str]:
        """Yield what the answers of a step can't be cut into."""
        if self.mini_batches > self.prompts_per_step * self.group_size:
            yield (
                f"--mini-batches {self.mini_batches} are more than the {self.prompts_per_step * self.group_size} "
                "answers of a step (--prompts-per-step times --group-size)"
            )
        if self.shaping.overlong_buffer > self.sampling.max_new_tokens:
            yield f"--overlong-buffer must be at most --sampling.max-new-tokens, got {self.shaping.overlong_buffer}"
        if self.shaping.overlong_buffer and self.max_turns > 1:
            yield "--overlong-buffer counts the tokens of an answer of one turn: set --max-turns 1"
        if self.epochs * self.mini_batches == 1:
            if self.objective.policy_loss == "kl_cov":
                yield "--loss kl_cov is the policy gradient with one update a batch: raise --epochs or --mini-batches"
            for name in ("clip_low", "clip_high", "dual_clip"):
                if getattr(self.objective, name) != getattr(GRPO, name):
                    yield (
                        f"{flag('objective.' + name)} has no effect with one update a batch, where the ratio to the "
                        "old policy is 1: leave it out, or raise --epochs or --mini-batches"
                    )

    def _lengths(self) -> Iterator[str]:
        """Yield what leaves a prompt no room."""
        if self.sampling.max_new_tokens >= self.max_episode_tokens:
            yield (
                f"--sampling.max-new-tokens {self.sampling.max_new_tokens} must be below --max-episode-tokens "
                f"{self.max_episode_tokens}, which counts the prompt too"
            )

    def _windows(self) -> Iterator[str]:
        """Yield what is not at the end of a window of fully_async."""
        window = self.cluster.schedule.parameter_sync_step
        for name in ("eval_every", "save_every"):
            if self.cluster.schedule.mode == "fully_async" and getattr(self, name) % window:
                yield (
                    f"{flag(name)} {getattr(self, name)} must be a multiple of --schedule.parameter-sync-step "
                    f"{window}: held-out answers and checkpoints are of weights that the sampler has"
                )
