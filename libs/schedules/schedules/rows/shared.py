"""Episodes of all ranks. Rows stay where they were sampled, summaries go to all, and a row goes where it is needed.

1. `gather_episodes` gives every rank the summaries of all episodes: rewards, groups, lengths, spans, metrics.
2. What a step decides follows from summaries, on every rank alike: filters, advantages, who trains which row.
3. `fetch_rows` brings each row once, as tensors, to each rank that names it; `fetch_episodes` whole episodes, with
   their conversations, for what is shown or written.

In a run of one rank the episodes are whole, and nothing travels. Plans are pure (`seqpack.comm.row_plan`).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import cast

from torch import Tensor

from rollout import Episode
from rollout.episodes.row_batch import row_places
from rollout.episodes.rows import flatten_episode, read_episode
from rollout.episodes.summary import (
    AnyEpisode,
    EpisodeSummary,
    decode_summaries,
    encode_summaries,
    summarize,
)
from schedules.protocols import RowTrainer, Trainer, TrainResult
from schedules.runtime.collectives import rank_and_world
from seqpack.comm.collectives import gather_bytes
from seqpack.comm.row_exchange import exchange_rows, unflatten_row
from seqpack.comm.row_plan import RowPlan


def gather_episodes(mine: Sequence[Episode]) -> list[AnyEpisode]:
    """Return the episodes of all ranks in order of rank: summaries, or in a run of one rank the episodes themselves.

    Collective. Each rank keeps its own episodes in their summaries, until nobody has these any more.
    """
    rank, world = rank_and_world()
    if world == 1:
        return list(mine)
    own = [summarize(episode, rank) for episode in mine]
    every: list[AnyEpisode] = []
    for holder, data in enumerate(gather_bytes(encode_summaries(own))):
        every += own if holder == rank else decode_summaries(data)
    return every


def summaries_of(episodes: Sequence[AnyEpisode]) -> list[EpisodeSummary] | None:
    """Return the episodes where they are summaries; None of whole ones, in a run of one rank."""
    if any(isinstance(episode, Episode) for episode in episodes):
        return None
    return cast(list[EpisodeSummary], list(episodes))


def fetch_rows(episodes: Sequence[EpisodeSummary], wanted: Sequence[Collection[int]]) -> dict[int, dict[str, Tensor]]:
    """Return the rows that this rank wants, by number (`row_places`), as tensors (`rollout.episodes.rows`).

    Collective. `wanted`: of each rank, the same on all of them.
    """
    places = row_places(episodes)
    segments = [episodes[place].segments[number] for place, number in places]

    def own(row: int) -> Tensor:
        place, number = places[row]
        return episodes[place].rows[number]

    plan = RowPlan.of([episodes[place].holder for place, _ in places], [s.nbytes for s in segments], wanted)
    return {row: unflatten_row(flat, segments[row].columns) for row, flat in exchange_rows(plan, own).items()}


def fetch_episodes(episodes: Sequence[AnyEpisode], wanted: Sequence[Collection[int]]) -> dict[int, Episode]:
    """Return the episodes that this rank wants, whole, by their places in `episodes`; collective, see `fetch_rows`."""
    summaries, rank = summaries_of(episodes), rank_and_world()[0]
    if summaries is None:
        whole = cast(Sequence[Episode], episodes)
        return {place: whole[place] for place in sorted(wanted[rank])}

    away = [[place for place in places if summaries[place].holder != at] for at, places in enumerate(wanted)]
    plan = RowPlan.of([one.holder for one in summaries], [one.nbytes for one in summaries], away)
    arrived = exchange_rows(plan, lambda place: flatten_episode(summaries[place]))
    found = {place: read_episode(summaries[place], flat) for place, flat in arrived.items()}
    for place in set(wanted[rank]) - found.keys():  # those that lie here
        found[place] = replace(_held(summaries[place]), group=summaries[place].group)
    return dict(sorted(found.items()))


def fetch_all(episodes: Sequence[AnyEpisode]) -> list[Episode]:
    """Return all of these episodes whole on every rank; collective. What travels grows with the ranks."""
    world = rank_and_world()[1]
    return list(fetch_episodes(episodes, [range(len(episodes))] * world).values())


def on_first_rank(episodes: Sequence[AnyEpisode], places: Iterable[int] | None = None) -> dict[int, Episode]:
    """Return these of the episodes (all) whole on rank 0, by their places, and none on the others; collective."""
    chosen = list(range(len(episodes)) if places is None else places)
    return fetch_episodes(episodes, [chosen, *([()] * (rank_and_world()[1] - 1))])


def train_step(trainer: Trainer, step: int, episodes: Sequence[AnyEpisode]) -> TrainResult:
    """Train on the episodes of a step; collective. A trainer that is no `RowTrainer` gets all of them on every rank."""
    if isinstance(trainer, RowTrainer):
        return trainer.train(step, episodes)
    return trainer.train(step, fetch_all(episodes))


def held_here(episodes: Sequence[AnyEpisode]) -> list[Episode]:
    """Return those of the episodes that this rank has, whole. Not collective."""
    held = (episode if isinstance(episode, Episode) else episode.held for episode in episodes)
    return [episode for episode in held if episode is not None]


def _held(summary: EpisodeSummary) -> Episode:
    assert summary.held is not None, f"episode {summary.id} lies on rank {summary.holder}"
    return summary.held
