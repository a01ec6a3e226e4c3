"""How many tokens an episode may still sample, in all its conversations together."""

import asyncio


class TokenBudget:
    """The sampled tokens of an episode, shared by its conversations: never more than `total` (None: no bound).

    A request takes the most that it may use and gives back the rest. Used on one event loop. Raises ValueError for a
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
        """Whether all tokens are sampled, and no request can give any back."""
        return self.total is not None and self.spent >= self.total

    def up_to(self, wanted: int) -> int:
        """Return how many of `wanted` tokens are free now."""
        return wanted if self.total is None else max(0, min(wanted, self.total - self.spent - self._taken))

    async def take(self, wanted: int) -> int:
        """Take up to `wanted` tokens, waiting while others hold all that are left. Return 0 where all are spent."""
        while (reserved := self.up_to(wanted)) < 1 and self._taken:
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting
        self._taken += reserved
        return reserved

    def settle(self, reserved: int, used: int) -> None:
        """Give back the `reserved` tokens of a request, of which `used` were sampled."""
        self._taken -= reserved
        self.spent += used
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
