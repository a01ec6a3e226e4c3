"""Scores of many sequences by one engine: some at a time, asked again where a server failed, and not for ever."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollout.engine import RolloutEngine
from rollout.errors import EpisodeFailed, ServerError
from rollout.token_scores import TokenScores

AT_ONCE = 64
"""Sequences that are scored together."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds before a request is sent again; each pause is twice the last."""


class ScoringError(RuntimeError):
    """Scores that did not come: the engine is gone, or has scored nothing for too long."""


@dataclass(eq=False)
class _Progress:
    """The time of the last score, and what failed since."""

    at: float
    failure: str = "no answer"


async def score_all(
    engine: RolloutEngine, rows: Sequence[Sequence[int]], k: int, *, name: str, seconds: float, at_once: int = AT_ONCE
) -> list[TokenScores]:
    """Return the scores of each row, in order; see `RolloutEngine.score`.

    A request that a server broke off or failed at is sent again. `name`: of the engine, for errors. `seconds`: within
    which a row must be scored, whichever.

    Raises:
        ScoringError: none was, or the engine is gone; the text has the last failure.
        ValueError: what the engine refuses.
    """
    clock = asyncio.get_running_loop().time
    found, places = [TokenScores.empty(len(ids), k) for ids in rows], iter(range(len(rows)))
    progress = _Progress(clock())

    async def work() -> None:
        for place in places:
            if len(rows[place]) > 1:  # a first token has no score
                found[place] = await _scored(engine, rows[place], k, progress)
            progress.at = clock()

    workers = [asyncio.create_task(work()) for _ in range(min(at_once, len(rows)))]
    waiting = {*workers}
    try:
        while waiting:
            left = progress.at + seconds - clock()
            if left <= 0:
                raise ScoringError(
                    f"{name} has scored nothing for {seconds:g} s ({progress.failure}): start it again, or look why it "
                    "hangs, and resume the run"
                )
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
    except RuntimeError as error:
        raise error if isinstance(error, ScoringError) else ScoringError(f"{name}: {error}") from error
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return found


async def _scored(engine: RolloutEngine, ids: Sequence[int], k: int, progress: _Progress) -> TokenScores:
    """Ask until there is an answer."""
    for pause in _pauses():
        try:
            return await engine.score(ids, k)
        except ServerError as error:
            progress.failure = str(error)
        except EpisodeFailed as error:
            if not error.retryable:
                raise ScoringError(str(error)) from error
            progress.failure = str(error)
        await asyncio.sleep(pause)
    raise AssertionError("pauses never end")


def _pauses() -> Iterator[float]:
    pause = FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE)
