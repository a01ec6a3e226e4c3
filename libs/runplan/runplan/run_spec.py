"""The input of a plan: the settings of a run, whatever it trains."""

from dataclasses import dataclass
from typing import Literal

from engines import EngineConfig
from engines.config import parse_context_parallel
from engines.parallel.configured_layout import shards_of
from runplan.layout.batches import BatchPlan, plan_batches
from runplan.layout.grid import Grid, grid_problems, make_grid
from runplan.model.model_shape import ModelShape
from runplan.model.origin import Origin
from runplan.settings import ClusterSettings


@dataclass(frozen=True)
class RunSpec:
    """One run. A step takes `rows` prompts or conversations, `group` sequences of each, of at most `longest` tokens."""

    app: Literal["grpo", "sft"]
    recipe: str
    engine: EngineConfig
    cluster: ClusterSettings
    processes: int
    steps: int
    rows: int
    longest: int
    group: int = 1
    mini_batches: int = 1
    epochs: int = 1
    reference_policy: bool = False
    """Whether a step is scored by the reference model too: a frozen one, or the base under an adapter."""
    device_teachers: tuple[str, ...] = ()
    """Teachers that score on the devices beside training, as `--teacher` names them: the native engine's and vLLM's."""
    held_out: int = 0
    """Held-out prompts of an evaluation."""
    needs_model: bool = True
    origin: Origin | None = None
    model_type: str | None = None
    """Model type of the named model, where its config can be read; the origin, if any, takes precedence."""
    own: ModelShape | None = None
    """Sizes of the model that is named, where its config can be read; they take precedence over the origin's."""
    unknown: str | None = None
    """Why the sizes of the model that is named are not known."""
    config_fields: frozenset[str] | None = None
    """Fields of the named model's config, nested ones behind dots, where it can be read."""
    eval_share: float = 0.0
    """Share of the training rows that is held out, at most `held_out` of them; 0 where held-out rows are given."""
    fake_device: bool = False
    """Whether the stand-in for torch_npu computes on device npu, which tests have run."""
    words: tuple[str, ...] = ()
    """Words of the command line that give this configuration, for the launch line; without any the recipe's name."""
    own_code: tuple[str, ...] = ()
    """Lines on code of the user's that the run names."""
    balancing_loss: bool = False
    """Whether the named model's own config asks for its router's balancing loss."""
    usable_gib: float | None = None
    """GiB of a device that a plan may fill, in place of all that it has (`pools.device_memory_gib`)."""
    installed: bool = False
    """Whether the apps are the installed `tessera-apps`, for the launch line, and not targets of a checkout."""

    @property
    def shape(self) -> ModelShape | None:
        """Sizes of the model, as far as they are known."""
        if self.own is not None or self.unknown is not None:
            return self.own
        return None if self.origin is None else self.origin.shape

    @property
    def device_memory_gib(self) -> float | None:
        """GiB of memory of a device, where it is known."""
        return self.cluster.pools.device_memory_gib if self.usable_gib is None else self.usable_gib

    @property
    def ranks(self) -> int:
        """Number of ranks that train."""
        return self.processes * self.cluster.pools.nodes

    @property
    def rollout_ranks(self) -> int:
        """Number of sampling devices: those that train, unless pools are separate or one process samples for all."""
        pools, rollout = self.cluster.pools, self.cluster.rollout
        if pools.placement == "separate":
            return self.processes * pools.rollout_nodes
        one_process = self.cluster.schedule.mode == "fully_async" and not rollout.ray_workers
        return min(self.ranks, rollout.devices) if one_process else self.ranks

    @property
    def shards(self) -> int:
        """Number of ranks that share a copy of the weights under FSDP2; ValueError where it does not divide them."""
        return shards_of(self.engine, self.ranks)

    @property
    def context_parallel(self) -> int:
        """Number of ranks that always share a sequence; 1 where it is chosen for each micro-batch."""
        size = parse_context_parallel(self.engine.context_parallel)
        return 1 if size == "dynamic" else size

    @property
    def dynamic(self) -> bool:
        """Whether the ranks that share a sequence are chosen for each micro-batch."""
        return parse_context_parallel(self.engine.context_parallel) == "dynamic"

    @property
    def grid(self) -> Grid:
        """The training ranks by axis; ValueError where the sizes do not divide."""
        shards_of(self.engine, self.ranks)
        return make_grid(self.ranks, **self._sizes)

    @property
    def grid_problems(self) -> list[str]:
        """All that keeps `grid` from being made, each with its fix."""
        problems = grid_problems(self.ranks, **self._sizes)
        try:
            shards_of(self.engine, self.ranks)
        except ValueError as error:
            problems.append(str(error))
        return problems

    def held_out_of(self, rows: int) -> int:
        """Return how many of so many training rows are held out."""
        count = max(1, round(rows * self.eval_share)) if self.eval_share else 0
        return min(count, self.held_out) if self.held_out else count

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch on the ranks that share a sequence, together."""
        return (self.ranks if self.dynamic else self.context_parallel) * self.engine.max_tokens_per_rank

    def batches(self, grid: Grid) -> BatchPlan:
        """Split a step's sequences. Raise ValueError where they do not fit."""
        dp = 1 if self.dynamic else grid.dp
        return plan_batches(self.rows * self.group, self.mini_batches, dp, self.longest, self.micro_batch_tokens)

    @property
    def _sizes(self) -> dict[str, int]:
        engine = self.engine
        return {
            "tp": engine.tensor_parallel,
            "cp": self.context_parallel,
            "pp": engine.pipeline_parallel,
            "ep": engine.expert_parallel,
            "etp": engine.expert_tensor_parallel,
        }
