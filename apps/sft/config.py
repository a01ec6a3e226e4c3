"""The settings of a supervised run."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from apps.common.cli.extensions import load_own_code
from apps.common.cli.flags import flag, owned_problems
from apps.common.cluster import Cluster
from apps.common.own_metrics import check_metrics
from apps.common.run.idle_steps import ALLOWED, allowed_problem
from apps.sft.reading.columns import ALONE, BadRows, Columns, Form, TrainOn, Truncation
from apps.sft.reading.sources import Source, parse_sources
from engines import EngineConfig
from engines.config import parse_context_parallel
from objectives import SFT

OWNED = {
    "engine.model": "use --model",
    "engine.temperature": "supervised training has none",
    "engine.skip_zero_gradient_rows": "conversations without a trained token are left out anyway",
}
"""Fields of the engine's settings that have no flag here, and why."""


@dataclass(frozen=True)
class DataConfig:
    """The training data: the rows of files, or demonstrations of a synthetic task."""

    data: tuple[str, ...] = ()
    """Files of rows (.jsonl, .json, .csv, .parquet, or one of them and .gz), directories, patterns, or data sets of the
    hub (OWNER/NAME:SPLIT): FILE ..., or FILE:WEIGHT ... for shares of the sequences that are trained on. Without any,
    demonstrations of --task are written to the run folder and used."""
    eval_data: Path | None = None
    """Held-out rows; without it a share of --data is held out."""
    form: Form = "auto"
    """What a row is: messages, ShareGPT, Alpaca, a prompt with its completion (texts or messages), plain text, or
    tokens (input_ids); "auto" is decided by the columns of a file's first row, and told."""
    train_on: tuple[TrainOn, ...] = ("assistant",)
    """What is trained of a conversation: the turns of these roles; or the assistant's "last" turn, the "completion" as
    TRL masks it, or "all" tokens. Marks of messages (weight, train, loss) are obeyed in any case."""
    reasoning_weight: float = 1.0
    """What the loss of the assistant's reasoning is multiplied by; 0 leaves it out."""
    end_of_turn: str | None = None
    """The token that ends a conversation's last turn, written and trained where the chat template writes none."""
    bad_rows: BadRows = "error"
    """What is done where rows of a file can't be used: all of them are told and nothing is trained, or they are left
    out and counted."""
    messages_column: str = "messages"
    """Column with a list of messages with role and content (and tool_calls)."""
    tools_column: str = "tools"
    """Column with the tools of a conversation, where the file has this column."""
    prompt_column: str = "prompt"
    """Column with what a completion goes on from."""
    completion_column: str = "completion"
    """Column with what is to be written."""
    text_column: str = "text"
    """Column with plain text, of which every token is trained."""
    eval_share: float | None = None
    """Share of --data that is held out where there is no --eval-data; by default 0.05, and at most 512 rows."""
    max_tokens: int = 4096
    """Longer rows are left out, or cut: see --truncation."""
    truncation: Truncation = "skip"
    """What is done with a longer row: left out, or tokens cut off at its left (the beginning) or its right. Counted."""
    cache_dir: Path | None = None
    """Where tokenised files are kept for later runs; the folder "tokens" beside the run folder by default."""
    data_processes: int | None = None
    """Processes that tokenise a file; by default one a CPU where it is large, else none besides this one."""
    task: Literal["arithmetic", "calculator"] = "arithmetic"
    """The synthetic task that is demonstrated where there is no --data."""
    demonstrations: int = 16384
    """How many demonstrations are written."""

    def __post_init__(self) -> None:
        if problems := [*self.problems()]:
            raise ValueError("; ".join(problems))

    def problems(self) -> Iterator[str]:
        """Yield a text for each problem, with its flag."""
        share = self.eval_share is None or 0 < self.eval_share < 1
        if not share:
            yield f"--eval-share must lie between 0 and 1, got {self.eval_share}"
        for name, least in (("max_tokens", 2), ("demonstrations", 32), ("data_processes", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                yield f"{flag(name)} must be at least {least}, got {value}"
        if not 0 <= self.reasoning_weight < math.inf:
            yield f"--reasoning-weight must be a number of at least 0, got {self.reasoning_weight}"
        alone = [value for value in self.train_on if value in ALONE]
        if not self.train_on or (alone and len(self.train_on) > 1):
            got = " ".join(self.train_on) or "nothing"
            yield f"--train-on takes roles, or one of {', '.join(ALONE)} alone, got {got}"
        try:
            parse_sources(self.data)
        except ValueError as error:
            yield str(error)
        if self.data:
            yield from self._set(("task", "demonstrations"), "is of the synthetic task; leave it out with --data")
        else:
            columns = dict.fromkeys(name for names in _COLUMNS.values() for name in names)
            yield from self._set(("eval_data", "form", "bad_rows", *columns), "goes with --data, which is not given")
        if self.eval_data is not None and share:
            yield from self._set(("eval_share",), "has no effect with --eval-data: leave one of them out")
        if self.data and self.form != "auto":
            others = dict.fromkeys(name for form, names in _COLUMNS.items() if form != self.form for name in names)
            unused = [name for name in others if name not in _COLUMNS[self.form]]
            yield from self._set(unused, f"has no effect with --form {self.form}")

    @property
    def sources(self) -> tuple[Source, ...]:
        """The files with their weights."""
        return parse_sources(self.data)

    @property
    def held_out(self) -> tuple[float, int | None]:
        """The share of the rows that is held out, and the most of them."""
        return (0.05, 512) if self.eval_share is None else (self.eval_share, None)

    @property
    def columns(self) -> Columns:
        """The columns that are read of a row, and what is trained of them."""
        return Columns(
            self.form,
            self.messages_column,
            self.tools_column,
            self.prompt_column,
            self.completion_column,
            self.text_column,
            train_on=tuple(dict.fromkeys(self.train_on)),
            reasoning_weight=self.reasoning_weight,
            end_of_turn=self.end_of_turn,
        )

    def _set(self, names: Iterable[str], why: str) -> Iterator[str]:
        """Yield a text with `why` for each field of `names` that is not at its default."""
        usual = {item.name: item.default for item in fields(self)}
        for name in names:
            if getattr(self, name) != usual[name]:
                yield f"{flag(name)} {why}"


_TURNS = ("tools_column", "reasoning_weight", "end_of_turn")
_COLUMNS = {
    "messages": ("messages_column", *_TURNS),
    "sharegpt": ("messages_column", *_TURNS),
    "alpaca": _TURNS,
    "prompt_completion": ("prompt_column", "completion_column", *_TURNS),
    "text": ("text_column",),
    "tokens": (),
}
"""The settings that each form reads."""


@dataclass(frozen=True)
class SftConfig:
    """Fine-tune a language model: on conversations (the assistant's tokens alone), completions of prompts, or text.

    With no flags: a tiny hybrid Qwen3.5 made on the spot imitates sums on a CPU, in about a minute.
    A real checkpoint on a real file: --model DIR --data FILE.
    """

    recipe: str = "quickstart"
    """Named defaults that the other flags override, one file of apps/sft/recipes each (--recipe list shows them), or a
    `apps.sft.recipe.Recipe` of your own, as FILE.py:NAME or package.module:NAME. Without it --model and --data take
    finetune."""
    recipe_options: tuple[str, ...] = ()
    """NAME=VALUE options of a function that makes the recipe."""
    model: Path | None = None
    """A local Hugging Face model directory; without it a tiny Qwen3.5 is made."""
    data: Annotated[DataConfig, tyro.conf.arg(name="")] = field(default_factory=DataConfig)
    run_dir: Path | None = None
    """Where everything is written; runs/sft/RECIPE-TIME by default."""
    resume: bool = False
    """Go on from the last checkpoint of --run-dir, or of the newest run."""
    seed: int = 0
    """Of the tiny model and the order of the conversations."""
    nproc_per_node: int = 1
    """Ranks started on this machine; under torchrun its ranks are used instead."""
    threads: int = 1
    """CPU threads a rank; tiny models run fastest on one."""
    steps: int = 200
    """Optimizer steps, where no --epochs are given."""
    epochs: float | None = None
    """How often every row of --data is read, in place of --max-steps; the last step takes the rows that are left."""
    batch_size: int = 64
    """Rows a step."""
    eval_every: int | None = None
    """Steps between evaluations of the held-out loss (also before the first and after the last); by default at least
    25, and so many that at most a tenth as many tokens are evaluated as are trained on."""
    eval_rows: int | None = None
    """How many held-out rows an evaluation reads; all of them by default."""
    export: Literal["last", "best"] = "last"
    """Which weights are exported: those of the last step, or those with the lowest held-out loss, kept in
    checkpoints/best from evaluation to evaluation."""
    save_every: int = 100
    """Steps between checkpoints (also after the last)."""
    keep_checkpoints: int = 2
    """Checkpoints that are kept before the last one; older ones are deleted."""
    stall_seconds: float = 120.0
    """A rank that says nothing for so long, as a stopped one, is told, with its stack, and ends the run, whatever
    started it."""
    allow_idle_steps: int | None = ALLOWED
    """Steps in a row that may train nothing: so many stop the run, which has a checkpoint then. None: no limit."""
    tracker: tuple[Literal["wandb", "mlflow", "trackio"], ...] = ()
    """Trackers that are told the metrics besides the run folder; WANDB_MODE, MLFLOW_TRACKING_URI, ... say where."""
    metric: tuple[str, ...] = ()
    """Metrics of your own: functions of `metrics` and `step` that return a number or several by name."""
    metric_options: tuple[str, ...] = ()
    """NAME=VALUE options of these functions; each gets those that it takes."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    objective: SFT = field(default_factory=SFT)
    cluster: Annotated[Cluster, tyro.conf.arg(name="")] = field(default_factory=Cluster)
    """Layout, pools, offload of runs over many devices; --help-cluster lists the flags."""

    def __post_init__(self) -> None:
        if problems := [*self.problems()]:
            raise ValueError("; ".join(problems))

    def problems(self) -> Iterator[str]:
        """Yield a text for each problem that is not of one of the parts, with its flag."""
        wrong = [*self.out_of_range()]
        yield from wrong
        # what is wrong together may follow from a value that is wrong alone: that is told first
        if not wrong and self.data.max_tokens > self._longest:
            yield (
                f"--max-tokens {self.data.max_tokens} does not fit --trainer.max-tokens-per-rank: raise that to "
                f"{self.data.max_tokens}, or share a sequence among ranks with --parallel.context"
            )

    def out_of_range(self) -> Iterator[str]:
        """Yield a text for each field whose value is wrong whatever the parts are."""
        counts = ("steps", "batch_size", "eval_every", "save_every", "nproc_per_node", "threads", "eval_rows")
        for name in (*counts, "keep_checkpoints"):
            value, least = getattr(self, name), 0 if name == "keep_checkpoints" else 1
            if value is not None and value < least:
                yield f"{flag(name)} must be at least {least}, got {value}"
        yield from allowed_problem(self.allow_idle_steps)
        if not 0 < self.stall_seconds < math.inf:
            yield f"--stall-seconds must be above 0 and finite, got {self.stall_seconds}"
        if self.epochs is not None:
            if not 0 < self.epochs < math.inf:
                yield f"--epochs must be a number above 0, got {self.epochs}"
            if self.steps > 0 and self.steps != SftConfig.steps:
                yield "--max-steps has no effect with --epochs: leave one of them out"
        yield from owned_problems(self, OWNED)
        try:
            check_metrics(self.metric, self.metric_options, ("metrics", "step"))
        except ValueError as error:
            yield str(error)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Import the user's code in the process that is sent this."""
        self.__dict__.update(state)
        load_own_code(self)

    @property
    def _longest(self) -> int:
        """The tokens of the longest sequence that the ranks can hold."""
        size = parse_context_parallel(self.engine.context_parallel)
        ranks = self.nproc_per_node * self.cluster.pools.nodes if size == "dynamic" else size
        return self.engine.max_tokens_per_rank * ranks
