"""For tests of environments and apps: an engine with scripted completions, without a model."""

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rollout.engine import Completion, Load, OnTokens, PauseMode, Sampling
from rollout.sync.manifest import Manifest
from rollout.sync.pieces import Bucket, Piece
from rollout.token_scores import TokenScores
from seqpack.capability import Supported, Unsupported


async def stream(done: Completion, on_tokens: OnTokens | None) -> None:
    """Pass a completion to `on_tokens` token by token, a turn of the event loop each."""
    if on_tokens is None:
        return
    for token, log_prob in zip(done.ids, done.log_probs, strict=True):
        on_tokens((token,), (log_prob,))
        await asyncio.sleep(0)


class ScriptedEngine:
    """A RolloutEngine with scripted turns: `reply(prompt_ids, turn)` returns the ids of each completion.

    `turn` counts this engine's calls. A completion that ends in one of the request's stop tokens has stop_reason
    "stop", any other is cut to max_new_tokens and has "length". Log-probs are -0.5 for every token.
    """

    def __init__(self, reply: Callable[[list[int], int], Sequence[int]], version: int = 0) -> None:
        self._reply = reply
        self._version = self._before = self._coming = version
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []

    @property
    def version(self) -> int:
        """The version of the weights in use."""
        return self._version

    def supports(self, feature: str) -> Supported | Unsupported:
        """Return Unsupported: it is no engine for runs."""
        return Unsupported(f"a scripted engine has no {feature}")

    def load(self) -> Load:
        """Return zeros: nothing runs between calls."""
        return Load(0, 0)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        media: Mapping[str, Any] | None = None,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Return the next scripted completion, streamed token by token; an empty one past its deadline."""
        del media, request_id
        turn = len(self.prompts)
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        if deadline is not None and time.monotonic() >= deadline:
            return Completion((), (), "deadline", ())
        ids = tuple(self._reply(list(prompt_ids), turn))[: sampling.max_new_tokens]
        stopped = bool(ids) and ids[-1] in sampling.stop_token_ids
        done = Completion(ids, (-0.5,) * len(ids), "stop" if stopped else "length", (self._version,) * len(ids))
        await stream(done, on_tokens)
        return done

    async def score(self, ids: Sequence[int], k: int = 0) -> TokenScores:
        """Return scores as of a model of no preference."""
        return TokenScores.empty(len(ids), k)

    async def cancel(self, request_id: str) -> bool:
        """Return False: no request ever waits."""
        del request_id
        return False

    async def prepare(self, manifest: Manifest) -> None:
        """Store the version that is coming."""
        self._coming = manifest.version

    async def receive(self, bucket: Bucket) -> int:
        """Return 0, as after the last bucket."""
        del bucket
        return 0

    async def commit(self, version: int) -> None:
        """Set the version."""
        self._before, self._version = self._version, version

    async def abort(self) -> None:
        """Restore the version before."""
        self._version = self._before

    async def update_weights(self, version: int, pieces: Iterable[Piece]) -> None:
        """Read the pieces to their end and set the version."""
        for _ in pieces:
            pass
        self._version = version

    async def pause(self, mode: PauseMode = "finish") -> None:
        """Return at once: nothing runs between calls."""

    async def resume(self) -> None:
        """Forget the version before."""
        self._before = self._version
