"""For tests of environments and apps: an engine that says what it is told to, with no model behind it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rollout.engine import Completion, PauseMode, Sampling
from rollout.sync import Piece


class ScriptedEngine:
    """A RolloutEngine whose turns are written beforehand: `reply(prompt_ids, turn)` gives the ids of each answer.

    `turn` counts this engine's calls. An answer that ends in one of the request's stop tokens has stop_reason "stop",
    any other is cut to max_new_tokens and has "length". Log-probs are -0.5 for every token.
    """

    def __init__(self, reply: Callable[[list[int], int], Sequence[int]], version: int = 0) -> None:
        self._reply = reply
        self._version = version
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []

    @property
    def version(self) -> int:
        """The number of the weights in use."""
        return self._version

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, media: Mapping[str, Any] | None = None
    ) -> Completion:
        """The next answer of the script."""
        del media
        ids = tuple(self._reply(list(prompt_ids), len(self.prompts)))[: sampling.max_new_tokens]
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        stopped = bool(ids) and ids[-1] in sampling.stop_token_ids
        return Completion(ids, (-0.5,) * len(ids), "stop" if stopped else "length", (self._version,) * len(ids))

    async def update_weights(self, version: int, pieces: Iterable[Piece]) -> None:
        """Take the number and read the pieces to their end."""
        for _ in pieces:
            pass
        self._version = version

    async def pause(self, mode: PauseMode = "finish") -> None:
        """Nothing runs between calls."""

    async def resume(self) -> None:
        """Nothing was held back."""
