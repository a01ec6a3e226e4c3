"""Every setting of a supervised run."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Literal

import tyro

from apps.common.flags import check_owned, flag
from apps.common.plan.cluster import Cluster
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
    """What is imitated: a file of conversations, or demonstrations of a synthetic task."""

    data: Path | None = None
    """Conversations, .jsonl or .parquet; without it demonstrations of --task are written to the run folder and used."""
    eval_data: Path | None = None
    """Held-out conversations; without it a share of --data is held out."""
    messages_column: str = "messages"
    """Holds a list of messages with role and content (and tool_calls)."""
    tools_column: str = "tools"
    """Holds the tools of a conversation, where the file has this column."""
    eval_share: float = 0.05
    """Share of --data that is held out where there is no --eval-data."""
    max_tokens: int = 4096
    """Longer conversations are skipped and counted."""
    task: Literal["arithmetic", "calculator"] = "arithmetic"
    """The synthetic task that is demonstrated where there is no --data."""
    demonstrations: int = 16384
    """How many demonstrations are written."""

    def __post_init__(self) -> None:
        if not 0 < self.eval_share < 1:
            raise ValueError(f"--eval-share must lie between 0 and 1, got {self.eval_share}")
        if self.max_tokens < 2 or self.demonstrations < 32:
            raise ValueError("--max-tokens must be at least 2 and --demonstrations at least 32")
        unused: tuple[str, ...] = ("eval_data", "messages_column", "tools_column")
        instead = "goes with --data, which is not given"
        if self.data is not None:
            unused, instead = ("task", "demonstrations"), "is of the synthetic task; leave it out with --data"
        usual = {item.name: item.default for item in fields(self)}
        for name in unused:
            if getattr(self, name) != usual[name]:
                raise ValueError(f"{flag(name)} {instead}")
        if self.eval_data is not None and self.eval_share != usual["eval_share"]:
            raise ValueError("--eval-share has no effect with --eval-data: leave one of them out")


@dataclass(frozen=True)
class SftConfig:
    """Fine-tune a language model on conversations, on the assistant's tokens alone.

    With no flags: a tiny hybrid Qwen3.5 made on the spot imitates sums on a CPU, in about a minute.
    A real checkpoint on a real file: --model DIR --data FILE.
    """

    recipe: str = "quickstart"
    """Named defaults that the other flags override, one file of apps/sft/recipes each; --recipe list shows them."""
    model: Path | None = None
    """A local Hugging Face model directory; without it a tiny Qwen3.5 is made."""
    data: Annotated[DataConfig, tyro.conf.arg(name="")] = field(default_factory=DataConfig)
    run_dir: Path | None = None
    """Where everything is written; runs/sft/RECIPE-TIME by default."""
    resume: bool = False
    """Go on from the last checkpoint of --run-dir, or of the newest run."""
    seed: int = 0
    """Of the model made and the order of the conversations."""
    processes: int = 1
    """Ranks started on this machine; under torchrun its ranks are used instead."""
    threads: int = 1
    """CPU threads a rank; tiny models run fastest on one."""
    steps: int = 200
    """Optimizer steps."""
    batch_size: int = 64
    """Conversations a step."""
    eval_every: int = 25
    """Steps between evaluations of the held-out loss (also after the last)."""
    eval_conversations: int = 256
    """How many held-out conversations an evaluation reads."""
    save_every: int = 100
    """Steps between checkpoints (also after the last)."""
    keep_checkpoints: int = 2
    """Checkpoints that are kept before the last one; older ones are deleted."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    objective: SFT = field(default_factory=SFT)
    cluster: Cluster = field(default_factory=Cluster)
    """Layout, pools, offload of runs over many devices; --help-cluster lists the flags."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "eval_every", "eval_conversations", "save_every", "processes", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{flag(name)} must be at least 1, got {getattr(self, name)}")
        if self.keep_checkpoints < 0:
            raise ValueError(f"--keep-checkpoints must be at least 0, got {self.keep_checkpoints}")
        check_owned(self, OWNED)
        if self.data.max_tokens > self._longest:
            raise ValueError(
                f"--max-tokens {self.data.max_tokens} does not fit --engine.max-tokens-per-rank: raise that to "
                f"{self.data.max_tokens}, or share a sequence among ranks with --engine.context-parallel"
            )

    @property
    def _longest(self) -> int:
        """Tokens of the longest sequence that the ranks can hold."""
        size = parse_context_parallel(self.engine.context_parallel)
        ranks = self.processes * self.cluster.pools.nodes if size == "dynamic" else size
        return self.engine.max_tokens_per_rank * ranks
