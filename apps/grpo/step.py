"""The update of one GRPO step on a page: compare within groups, then train."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from tensordict import TensorDict
from torch import Tensor

from apps.common.local_rows import add_log_probs, local_batches, outline_view, reason_of
from apps.common.run.idle_reason import SIGNAL
from apps.grpo.config import GrpoConfig
from apps.grpo.shaping import estimated, shape
from apps.grpo.teachers import Teachers
from engines import SharedParameters, TrainEngine, Unsupported, shared_parameters
from engines.adapters.adapter_export import adapter_layout, adapter_pieces
from engines.protocol import Batch
from objectives.advantages import first_rows, per_sequence, per_token
from objectives.choices import HIGH_COVARIANCE
from objectives.covariance_losses import high_covariance
from objectives.off_policy import mismatch_meter
from rollout import to_batch
from rollout.episodes.row_batch import row_outline
from rollout.episodes.summary import AnyEpisode, EpisodeSummary
from rollout.seeds import derive_seed
from rollout.sync import Adapter
from schedules.protocols import TrainResult, WeightExport
from schedules.rows.shared import fetch_all, summaries_of
from seqpack import index_select, view_batch

NOTHING = {"train/updates": 0.0, "train/trained_tokens": 0.0, SIGNAL: 0.0}
"""Metrics of a step without a trained token."""


@dataclass(frozen=True)
class GrpoTrainer:
    """Trainer of a run (`schedules.Trainer`): GRPO's update by a train engine."""

    config: GrpoConfig
    engine: TrainEngine
    teachers: Teachers | None = None
    measures_sampler: ClassVar[bool] = True
    trains_rows: ClassVar[bool] = True
    """Of `schedules.protocols.ScoringTrainer` and `RowTrainer`."""

    def train(self, step: int, episodes: Sequence[AnyEpisode]) -> TrainResult:
        """Train on the episodes of step number `step`, from 0; collective. Where none of their tokens is trained, the
        metrics are NOTHING. A rank gets no rows but those that it trains, unless there is a `whole_batch_reason`."""
        if all(episode.score is None for episode in episodes):
            return TrainResult(dict(NOTHING), [0.0] * len(episodes))
        summaries = None if whole_batch_reason(self.config) else summaries_of(episodes)
        batch = to_batch(fetch_all(episodes)) if summaries is None else row_outline(summaries)
        if self.teachers is None:
            shape(batch, episodes, self.config, self.engine)
            batch["advantages"] = advantages_of(batch, self.config, step)
        else:  # every answer is learnt from, whatever its reward
            batch["advantages"] = per_token(torch.ones(len(batch)), batch["loss_mask"])
            self.teachers.score(batch, episodes, self.engine)
        metrics = train_on(batch, self.config, self.engine, summaries)
        difference = metrics.get("log_prob_difference") if metrics.get("train/computed_sequences", 1) else None
        return TrainResult(metrics, episode_advantages(batch, len(episodes)), difference)

    def log_probs(self, batch: TensorDict) -> Sequence[Tensor]:
        """Return the log-probs of a batch by the present weights: float32 [length] for each row."""
        rows: Sequence[Tensor] = self.engine.forward(batch)["log_probs"].unbind()
        return rows

    def export_weights(self, module_names: bool) -> WeightExport:
        """Return the present weights, or those of the adapter alone: a sampler begins with the base."""
        layout = adapter_layout(self.engine, module_names)
        if layout is None:
            sharded = self.config.cluster.schedule.weight_sync == "shards"
            shards = self.engine.export_shards(live=module_names) if sharded else None
            return WeightExport(self.engine.export_weights(live=module_names), shards=shards)
        adapter = Adapter(layout.rank, layout.scale, layout.layers)
        return WeightExport(adapter_pieces(self.engine, module_names), adapter)

    def shared_weights(self) -> SharedParameters:
        """Return the engine's own tensors for a sampler of this process. RuntimeError: they were moved to the host."""
        shared = shared_parameters(self.engine)
        if isinstance(shared, Unsupported):
            raise RuntimeError(f"weights can't be shared with the sampler any more: {shared.reason}")
        return shared

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """Keep the engine in host memory while this is open; a reference model beside it is there already.

        Collective, as moving it is. It comes back where sampling fails too.
        """
        try:
            self.engine.offload()
            yield
        finally:
            self.engine.onload()


def advantages_of(batch: TensorDict, config: GrpoConfig, step: int) -> Tensor:
    """Return, jagged (B, j), how much better each response is than its group's; a control run shuffles them."""
    advantages = estimated(batch, config)
    if config.control_run == "shuffled-advantages":
        generator = torch.Generator().manual_seed(derive_seed(config.seed, "shuffle", step))
        scores = per_sequence(advantages, batch["loss_mask"])
        _, row_of, of_row = first_rows(batch["episode"])
        dealt = scores[row_of][torch.randperm(len(row_of), generator=generator)]
        return per_token(dealt[of_row], batch["loss_mask"])
    return advantages


def episode_advantages(batch: TensorDict, count: int) -> list[float]:
    """Return the advantage of each of `count` episodes, that of its first row; 0 where it has none."""
    scores = per_sequence(batch["advantages"], batch["loss_mask"])
    of_episode = [0.0] * count
    episodes, row_of, _ = first_rows(batch["episode"])
    for episode, row in zip(episodes.tolist(), row_of.tolist(), strict=True):
        of_episode[episode] = float(scores[row])
    return of_episode


def whole_batch_reason(config: GrpoConfig) -> str | None:
    """Return why every rank needs the tokens of all rows; None where it trains with its own alone."""
    return reason_of(config.teachers.any, config.shaping.kl_in_reward, config.objective.policy_loss, config.advantage)


def correction_line(config: GrpoConfig) -> str | None:
    """Return what a run says once of off-policy weights that nobody asked for by name; None where there are none."""
    chosen = config.corrected_objective.off_policy
    if config.teachers.any or config.objective.off_policy is not None or chosen == "none":
        return None
    return f"off-policy weights: {chosen}, as answers are sampled ahead of training (else name --objective.off-policy)"


def train_on(
    batch: TensorDict, config: GrpoConfig, engine: TrainEngine, summaries: Sequence[EpisodeSummary] | None = None
) -> dict[str, float]:
    """Make the optimizer steps of one batch, `epochs` times `mini_batches`; the means of their metrics.

    All rows of an episode are in one mini-batch; there are fewer than asked for where episodes are, or where no token
    of one is trained. `summaries`: of the episodes whose outline `batch` is; rows come to the ranks that train them.
    """
    view = view_batch(batch) if summaries is None else outline_view(batch)
    rows_trained = view.row_sums(view.trained) > 0
    if not rows_trained.any():
        return dict(NOTHING)
    _, _, episode_of = first_rows(batch["episode"])
    parts = [(episode_of % config.mini_batches == part).nonzero()[:, 0].tolist() for part in range(config.mini_batches)]
    parts = [part for part in parts if rows_trained[part].any()]
    objective = config.distillation if config.teachers.any else config.corrected_objective
    compared = config.epochs * config.mini_batches > 1, bool(config.objective.kl_coef)
    if summaries is None:
        add_log_probs(batch, batch, engine, *compared)
        if config.objective.policy_loss in ("clip_cov", "kl_cov"):
            _choose_tokens(batch, config, engine)
        updates: list[Batch] = [index_select(batch, part) if len(parts) > 1 else batch for part in parts]
    else:
        updates = [*local_batches(batch, summaries, parts, engine, objective, compared)]
    results = [engine.train_batch(update, objective) for _ in range(config.epochs) for update in updates]
    checks = {name for result in results for name in result if name.startswith("proof/")}  # of some updates alone
    proof = {name: max(result[name] for result in results if name in result) for name in sorted(checks)}
    means = {name: sum(result[name] for result in results) / len(results) for name in results[0] if name not in checks}
    means["mismatch/abs/max"] = max(result["mismatch/abs/max"] for result in results)
    means = mismatch_meter(means)
    difference = {
        "log_prob_difference": _mean_difference(results, means.pop("mismatch/abs")),
        "log_prob_difference_max": means.pop("mismatch/abs/max"),
    }
    named = {f"train/{name}": value for name, value in means.items()}
    named[SIGNAL] = float((view.flat("advantages")[view.trained] != 0).float().mean())
    return named | difference | proof | {"train/updates": float(len(results))}


def _choose_tokens(batch: TensorDict, config: GrpoConfig, engine: TrainEngine) -> None:
    """Add the tokens of high covariance to a batch: those of the policy that its updates start from. Collective."""
    known = "old_log_probs" in batch.keys()  # noqa: SIM118
    share, of_loss = config.objective.covariance_share, config.objective.policy_loss
    seed = derive_seed(config.seed, "covariance", int(batch["policy_version"].values().max()))  # alike on every rank
    batch[HIGH_COVARIANCE] = high_covariance(
        batch["advantages"],
        batch["old_log_probs"] if known else engine.forward(batch)["log_probs"],
        batch["loss_mask"],
        2e-4 if share is None else share,
        (1.0, 5.0) if of_loss == "clip_cov" else None,
        torch.Generator().manual_seed(seed),
    )


def _mean_difference(results: Sequence[Mapping[str, float]], of_none: float) -> float:
    """Return the mean over the updates that computed a sequence: others have seen no difference."""
    differences = [result["mismatch/abs"] for result in results if result.get("computed_sequences", 1)]
    return sum(differences) / len(differences) if differences else of_none
