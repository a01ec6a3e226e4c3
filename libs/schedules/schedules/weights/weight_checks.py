"""Weight checks: whether a sampler has the weights that it was given, by short responses to prompts of the step.

1. Some of the step's prompts are sampled again right after a weight sync, `CHECK_TOKENS` tokens each.
2. The trainer scores these tokens by its present weights.
3. The mean distance of log-probs must lie within what arithmetic in the sampler's dtype explains (`SamplerBound`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from rollout import Chat, Completion, Episode, RolloutEngine, Sampling
from rollout.chat.segment import Segment
from rollout.episodes.batch import TYPES
from rollout.episodes.media_codec import plain_media, read_media
from rollout.episodes.rows import LISTED, MEDIA
from rollout.episodes.runner import together
from rollout.episodes.summary import AnyEpisode, EpisodeSummary, SegmentSummary
from rollout.errors import EpisodeFailed
from rollout.experts import ROUTED_EXPERTS, RoutedExperts
from schedules.protocols import DraftingEngine, ReplicatedEngine, TimedEngine, Trainer
from schedules.runtime.collectives import gather_lists
from schedules.weights.sampler_bound import SamplerBound, read_bound
from seqpack.batches.batch import make_batch

Media = Mapping[str, Any] | None
"""Media of a prompt, as `RolloutEngine.generate` takes them."""
CHECK_PROMPTS = 8
"""Prompts of the step that are sampled again after a weight sync."""
CHECK_TOKENS = 4
"""Tokens of a response to one of them, at most."""


class WeightsNotTakenError(RuntimeError):
    """Log-probs of a sampler that the trainer's weights do not explain."""


def has_check_prompts(episodes: Sequence[AnyEpisode]) -> bool:
    """Return whether `check_prompts` finds any."""
    return bool(_first_episodes(episodes))


def check_prompts(episodes: Sequence[AnyEpisode]) -> tuple[list[list[int]], list[Media]]:
    """Return the first prompts of some of the groups, on every rank, and the media of each, None of one of text.

    Collective where episodes lie on several ranks: the few prompts, and nothing else of a row, go to all.
    """
    chosen = _first_episodes(episodes)
    held = {n: one if isinstance(one, Episode) else one.held for n, one in enumerate(chosen)}
    own = [(number, _prompt(episode.segments[0])) for number, episode in held.items() if episode is not None]
    if not any(isinstance(one, EpisodeSummary) for one in chosen):
        return [ids for _, (ids, _) in own], [media for _, (_, media) in own]
    found = sorted(gather_lists([(number, ids, encode_media([media])) for number, (ids, media) in own]))
    return [ids for _, ids, _ in found], [decode_media(media)[0] if media else None for _, _, media in found]


def encode_media(media: Sequence[Media]) -> list[dict[str, Any] | None]:
    """Return the media as JSON holds them, on the way to another process; nothing where all prompts are text."""
    return [None if one is None else plain_media(one) for one in media] if any(media) else []


def decode_media(plain: Sequence[Mapping[str, Any] | None]) -> list[Media]:
    """Return the media that `encode_media` wrote."""
    return [None if one is None else read_media(one) for one in plain]


def _prompt(segment: Segment) -> tuple[list[int], Media]:
    return list(segment.ids[: segment.loss_mask.index(True)]), segment.media or None


def _first_episodes(episodes: Sequence[AnyEpisode]) -> list[AnyEpisode]:
    """Return an episode of some groups, whose first prompt can be sampled again."""
    firsts = {episode.group: episode for episode in episodes if episode.segments}
    return [one for one in firsts.values() if one.segments[0].sampled and _images_in_prompt(one.segments[0])][
        :CHECK_PROMPTS
    ]


def _images_in_prompt(segment: Segment | SegmentSummary) -> bool:
    """Return whether all its images stand before the first token that was sampled."""
    if isinstance(segment, Segment):
        seen = 0 if segment.media is None else len(segment.media[TYPES])
    else:
        seen = next((c.shape[0] for c in segment.columns if c.name in (f"{MEDIA}{TYPES}", f"{LISTED}{TYPES}")), 0)
    return seen <= segment.spans[0][1]


async def sample_checks(
    engine: RolloutEngine,
    chat: Chat,
    sampling: Sampling,
    bound: SamplerBound,
    prompts: Sequence[Sequence[int]],
    media: Sequence[Media] = (),
) -> dict[str, Any]:
    """Return what a sampler says of its weights, as JSON: its responses to the prompts (of each replica of the model
    that it has), the bound of its log-probs, and what its last weight sync cost."""
    completions = await check_completions(engine, chat, sampling, prompts, media)
    return {
        "answers": [encode_completion(one) for one in completions],
        "bound": asdict(bound),
        "metrics": transfer_metrics(engine),
    }


async def check_completions(
    engine: RolloutEngine,
    chat: Chat,
    sampling: Sampling,
    prompts: Sequence[Sequence[int]],
    media: Sequence[Media] = (),
) -> list[Completion]:
    """Return a short response to each prompt, sampled as training's responses are; `media`: of each, none of text. Of
    several replicas of the model all responses of the first, then those of the second, and so on."""
    short = replace(
        sampling,
        max_new_tokens=min(CHECK_TOKENS, sampling.max_new_tokens),
        stop_token_ids=(*sampling.stop_token_ids, *chat.stop_ids),
        seed=0,
    )
    requests = list(zip(prompts, media or [None] * len(prompts), strict=True))
    if not _has_replicas(engine):
        return await together([engine.generate(prompt, short, shown) for prompt, shown in requests])
    replicated: Any = engine

    async def of_replica(number: int) -> list[Completion]:
        generate = partial(replicated.generate, copy=number)
        try:
            return await together([generate(prompt, short, shown) for prompt, shown in requests])
        except EpisodeFailed:
            if number in replicated.copies:
                raise
            return []  # it died meanwhile, and answers nobody any more

    return [one for completions in await together(map(of_replica, replicated.copies)) for one in completions]


def _has_replicas(engine: RolloutEngine) -> bool:
    return isinstance(engine, ReplicatedEngine) and len(engine.copies) + len(engine.lost_copies) > 1


def compare_checks(
    trainer: Trainer,
    prompts: Sequence[Sequence[int]],
    checks: Sequence[dict[str, Any]],
    version: int,
    media: Sequence[Media] = (),
) -> dict[str, float]:
    """Compare what each sampler, and each replica of its model, said (`sample_checks`) with the trainer's present
    weights, which all have as `version`; collective.

    The metrics are those of the sampler that is furthest off. Weights that are stale by one small step are within
    bfloat16 of the new ones; those that stay so are soon found.

    Raises:
        WeightsNotTakenError: one is further off than arithmetic in its dtype explains, or answers by another version.
    """
    if not checks:
        return {}
    parts = [
        {**one, "answers": one["answers"][first : first + len(prompts)]}
        for one in checks
        for first in range(0, len(one["answers"]), len(prompts))
    ]
    completions = [[decode_completion(answer) for answer in one["answers"]] for one in parts]
    columns = media_columns(media or [None] * len(prompts))
    rows = [_row(*request) for mine in completions for request in zip(prompts, mine, columns, strict=True)]
    scores = trainer.log_probs(make_batch(rows))
    metrics: list[dict[str, float]] = []
    for number, (one, mine) in enumerate(zip(parts, completions, strict=True)):
        span = slice(number * len(prompts), (number + 1) * len(prompts))
        who = "the sampler" if len(parts) == 1 else f"sampler {number} of {len(parts)}"
        distance = _distances(rows[span], scores[span])
        metrics.append(_check(distance, mine, read_bound(one["bound"]), version, who) | one["metrics"])
    names = dict.fromkeys(name for row in metrics for name in row)
    return {name: max(row[name] for row in metrics if name in row) for name in names}


def _distances(rows: Sequence[dict[str, Any]], scores: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the distance of each sampled token's log-prob from the trainer's."""
    return torch.cat(
        [
            (log_probs[row["loss_mask"]] - row["rollout_log_probs"][row["loss_mask"]]).abs()
            for log_probs, row in zip(scores, rows, strict=True)
        ]
    )


def _check(
    distance: torch.Tensor, completions: Sequence[Completion], bound: SamplerBound, version: int, who: str
) -> dict[str, float]:
    mean = distance.mean().item()
    versions = {v for completion in completions for v in completion.policy_versions}
    if not (mean <= bound.mean and versions == {version}):
        named = ", ".join(map(str, sorted(versions)))
        raise WeightsNotTakenError(
            f"after version {version} was handed over, the log-probs of {who}, of version {named}, are {mean:.3g} from "
            f"the trainer's on average ({bound.mean:g} is what {bound.reason} explains): it does not sample "
            "from the trainer's weights"
        )
    return {"weights/check/abs": mean, "weights/check/abs/max": distance.max().item()}


def encode_completion(completion: Completion) -> list[Any]:
    """Return a completion as JSON holds it, with the experts that its tokens went to."""
    experts = completion.extras.get(ROUTED_EXPERTS)
    fields = [completion.ids, completion.log_probs, completion.stop_reason, completion.policy_versions]
    return [*fields, None if experts is None else experts.plain()]


def decode_completion(plain: Sequence[Any]) -> Completion:
    """Return the completion that `encode_completion` wrote."""
    ids, log_probs, stop_reason, versions, experts = plain
    extras = {} if experts is None else {ROUTED_EXPERTS: RoutedExperts.read(experts)}
    return Completion(tuple(ids), tuple(log_probs), stop_reason, tuple(versions), extras)


def transfer_metrics(engine: RolloutEngine) -> dict[str, float]:
    """Return what a sampler measured of its last weight sync, and of drafts since; nothing where it measures none."""
    accepted = engine.take_accepted() if isinstance(engine, DraftingEngine) else None
    drafts = {} if accepted is None else {"rollout/accepted_tokens": accepted}
    transfer = engine.transfer if isinstance(engine, TimedEngine) else None
    if transfer is None:
        return drafts
    lost = engine.lost_copies if isinstance(engine, ReplicatedEngine) and _has_replicas(engine) else None
    return (
        drafts
        | ({} if lost is None else {"rollout/lost_replicas": float(len(lost))})
        | {
            "weights/pause_ms": 1000 * transfer.paused_s,
            "weights/staging_ms": 1000 * transfer.staged_s,
            "weights/link_share": transfer.link_share,
        }
    )


def media_columns(media: Sequence[Media]) -> list[dict[str, Any]]:
    """Return each prompt's media as columns of a batch: all rows have the same keys, those of text with no entries."""
    empty = {key: torch.as_tensor(value)[:0] for one in media for key, value in (one or {}).items()}
    return [{key: torch.as_tensor((one or {}).get(key, none)) for key, none in empty.items()} for one in media]


def _row(prompt: Sequence[int], completion: Completion, media: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a batch as the trainer scores it."""
    ids = torch.tensor([*prompt, *completion.ids], dtype=torch.int64)
    mask = torch.arange(len(ids)) >= len(prompt)
    log_probs = torch.zeros(len(ids))
    log_probs[mask] = torch.tensor(completion.log_probs)
    experts = completion.extras.get(ROUTED_EXPERTS)
    replay = {} if experts is None else {ROUTED_EXPERTS: experts.resized(len(ids)).tensor()}
    columns = dict(media)
    if TYPES in columns:
        types = columns[TYPES].to(torch.int64)
        columns[TYPES] = torch.cat([types, types.new_zeros(len(ids) - len(types))])  # the rest is text
    return (
        replay
        | columns
        | {
            "input_ids": ids,
            "position_ids": torch.arange(len(ids)),
            "loss_mask": mask,
            "rollout_log_probs": log_probs,
            "reward": 0.0,
            "group": 0,
        }
    )
