"""How many tokens an episode may still sample, whoever speaks in it."""

import asyncio


class TokenBudget:
    """The sampled tokens of an episode, shared by its conversations: never more than `total` (None: no bound).

    A request takes what it may use at most, and gives back what it did not. Used on one event loop. ValueError for a
    total below 1.
    """

    def __init__(self, total: int | None = None) -> None:
        if total is not None and total < 1:
            raise ValueError(f"a budget has at least 1 token or None, got {total}")
        self.total = total
        self.spent = 0
        self._taken = 0
        self._waiting: list[asyncio.Future[None]] = []

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left, nor will be."""
        return self.total is not None and self.spent >= self.total

    def up_to(self, wanted: int) -> int:
        """Return how many of `wanted` tokens could be had now."""
        return wanted if self.total is None else max(0, min(wanted, self.total - self.spent - self._taken))

    async def take(self, wanted: int) -> int:
        """Take up to `wanted` tokens; 0 where all are spent. Waits while all that are left are taken by others."""
        while (granted := self.up_to(wanted)) < 1 and self._taken:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting
        self._taken += granted
        return granted

    def settle(self, granted: int, used: int) -> None:
        """Give back what was taken; `used` of it was sampled."""
        self._taken -= granted
        self.spent += used
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
