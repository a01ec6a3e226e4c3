"""Games as text: the seed of an episode's game, and the move in a reply."""

import re

from rollout.environments.environment import EpisodeContext
from rollout.seeds import derive_seed

BRACKETED = re.compile(r"\[([^\[\]]*)\]")


def game_seed(context: EpisodeContext) -> int:
    """Return the seed of a game: the task's own (`data["seed"]`), else one that follows from the task's id.

    It is the same for all episodes of a group, which so play the same game, and at every visit of the task.
    """
    seed = context.data.get("seed")
    return derive_seed(0, "game", context.task_id) if seed is None else int(seed)


def last_move(text: str) -> str | None:
    """Return the text in the last square brackets of a reply; None where there are none."""
    moves = BRACKETED.findall(text)
    return moves[-1].strip() if moves else None
