"""Settings of a step's rollouts, and where a run stands."""

from dataclasses import dataclass, field
from pathlib import Path

from rollout import Sampling
from schedules.config import FilterGroups


@dataclass(frozen=True)
class RolloutSettings:
    """Prompts of a step, and the limits of their episodes."""

    prompts_per_step: int
    group_size: int
    sampling: Sampling
    """How training's responses are sampled, with the run's seed."""
    max_turns: int = 1
    max_episode_tokens: int | None = None
    """Tokens of an episode's streams, prompt and all turns together."""
    max_episode_seconds: float | None = None
    environment_processes: int | None = None
    """Processes that play environments; None: by their cost, 0: threads of the process that samples."""
    environment_memory_gib: float | None = None
    """Memory that such a process may take; None: half of the machine's."""
    environment_servers: tuple[str, ...] = ()
    """HOST:PORT of servers that play environments."""
    stall_seconds: float = 120.0
    """How long a process that samples or plays environments may say nothing."""
    ranks_per_sampler: int = 1
    """Training ranks that share one sampler: the first of each such set is dealt its tasks."""
    offload: bool = False
    """Whether the trainer leaves the device while responses are sampled."""
    sleep: bool = False
    """Whether the sampler gives its memory back while the trainer computes."""
    trainer_dtype: str = "float32"
    """What the trainer computes in: "bfloat16", "float16" or "float32"."""
    allow_untested: tuple[str, ...] = ()
    """Names that were accepted untested; "sampler" widens the bound of its log-probs ten times."""
    filter_groups: FilterGroups = field(default_factory=FilterGroups)

    num_generations_eval: int = 1
    """Answers to each held-out task: one takes the likeliest tokens, several are sampled as training's are."""

    @property
    def evaluation(self) -> Sampling:
        """How an evaluation samples."""
        return self.greedy if self.num_generations_eval == 1 else self.sampling

    @property
    def greedy(self) -> Sampling:
        """How the likeliest tokens are sampled, with the limits of the run."""
        limits = self.sampling
        return Sampling(greedy=True, max_new_tokens=limits.max_new_tokens, stop_token_ids=limits.stop_token_ids)


@dataclass(frozen=True)
class RunState:
    """Folder of a run, the steps that it makes, and those that its checkpoint holds."""

    run_dir: Path
    steps: int
    done: int = 0
    """Steps that the checkpoint holds which the run goes on from."""
    keep_checkpoints: int = 2
    """Checkpoints that are kept before the last one."""
