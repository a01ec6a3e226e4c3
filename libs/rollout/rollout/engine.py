"""The protocol of generation engines: requests, completions and weight sync."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, runtime_checkable

from rollout.sampling import Sampling as Sampling
from rollout.sync.manifest import Manifest
from rollout.sync.pieces import Bucket, Piece
from seqpack.capability import Supported, Unsupported

if TYPE_CHECKING:  # it checks tokens as requests are checked
    from rollout.token_scores import TokenScores

StopReason = Literal["stop", "length", "abort", "deadline"]
_STOP_REASONS = get_args(StopReason)
PauseMode = Literal["finish", "abort"]
OnTokens = Callable[[Sequence[int], Sequence[float]], None]
"""Function of the ids of newly sampled tokens, and their log-probs."""


@dataclass(frozen=True)
class Completion:
    """The tokens sampled after one prompt; all sequences have one entry a token, in order.

    `ids` include the stop token that ended them. `log_probs` are those of the distribution that was sampled from:
    after penalties, at the temperature used and renormalised over what min-p, top-k and top-p left (for greedy: the
    model's own after penalties, at temperature 1). `policy_versions` are the versions of the weights that sampled
    each token. A completion that was cut off ("length", "abort", "deadline") holds what was sampled until then,
    perhaps nothing. `extras` is what an engine adds, one entry a token where it is a sequence; "routed_experts" is
    a `rollout.experts.RoutedExperts` of the prompt's tokens and of `ids`. The last token was sampled and not read,
    so its experts are unknown.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    stop_reason: StopReason
    policy_versions: tuple[int, ...]
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.log_probs) == len(self.policy_versions):
            lengths = sorted({len(self.ids), len(self.log_probs), len(self.policy_versions)})
            raise ValueError(f"ids, log_probs and policy_versions differ in length: {lengths}")
        if self.stop_reason not in _STOP_REASONS:
            raise ValueError(f"stop_reason is one of {', '.join(_STOP_REASONS)}, got {self.stop_reason!r}")


@dataclass(frozen=True)
class Load:
    """How busy an engine is, in requests: those that decode, and those that wait for a slot in the batch."""

    running: int
    waiting: int

    def __post_init__(self) -> None:
        if min(self.running, self.waiting) < 0:
            raise ValueError(f"running and waiting are counts, got {self.running} and {self.waiting}")


@runtime_checkable
class RolloutEngine(Protocol):
    """A generator of tokens whose weights can be replaced while it runs."""

    @property
    def version(self) -> int:
        """The version of the weights in use."""
        ...

    def supports(self, feature: str) -> Supported | Unsupported:
        """Return whether this engine has a feature (`rollout.capability`). Raise ValueError for an unknown name."""
        ...

    def load(self) -> Load:
        """Return how many requests run and wait at this moment. Never blocks; any thread may call it."""
        ...

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
        """Sample one completion; concurrent calls are batched.

        At `deadline`, in seconds of `time.monotonic()`, the completion returns with the tokens so far and stop_reason
        "deadline". `request_id` names the request for `cancel`. Cancelling the asyncio task that waits here frees the
        request's slot in the batch.

        `on_tokens` gets the tokens while they are sampled: it is called on this event loop with the ids and log-probs
        of those that came since the last call, in order. All calls come before this one returns, and together they give
        the completion's `ids` and `log_probs`. It must not block; what it raises ends the request and is raised here.

        Raises:
            ValueError: an empty prompt, an id outside the vocabulary (named), a request longer than the engine holds, a
                request_id that is in use, media that the engine does not take.
        """
        ...

    async def score(self, ids: Sequence[int], k: int = 0) -> "TokenScores":
        """Return the model's log-probs of these tokens and, at the place of each, of the `k` likeliest and of the rest.

        Raises:
            ValueError: as `generate` does; a k that the vocabulary, or the server, does not have.
        """
        ...

    async def cancel(self, request_id: str) -> bool:
        """End a request: its `generate` returns the tokens so far with stop_reason "abort", and its slot is free.

        Returns False where no such request is waiting or running.
        """
        ...

    async def pause(self, mode: PauseMode = "finish") -> None:
        """Start no new work and return when the running work is finished (or aborted with the tokens so far)."""
        ...

    async def resume(self) -> None:
        """Resume work, waiting requests first, and drop the old weights that a `commit` kept."""
        ...

    async def prepare(self, manifest: Manifest) -> None:
        """Begin a weight sync. Raise ValueError for a version that is not new, or tensors that do not fit the model."""
        ...

    async def receive(self, bucket: Bucket) -> int:
        """Stage a bucket beside the weights in use; return the number of missing elements (0: all are checked).

        Raises ValueError for what the manifest does not promise, or what is not finite.
        """
        ...

    async def commit(self, version: int) -> None:
        """Use the staged weights from the next token on. Raise ValueError, and keep the old ones, where any is missing.

        The old weights are kept, so that `abort` can restore them, until `resume` or the next `prepare`.
        """
        ...

    async def abort(self) -> None:
        """Drop what is staged, or restore the old weights after a commit; without either, do nothing."""
        ...

    async def update_weights(self, version: int, pieces: Iterable[Piece]) -> None:
        """Replace all weights by those of a stream in this process, or raise ValueError and keep the old ones."""
        ...


def check_request(prompt_ids: Sequence[int], sampling: Sampling, vocab_size: int | None, max_length: int) -> None:
    """Raise ValueError for a request that a model of that vocabulary (None: unknown here) and length cannot continue.

    Raises:
        ValueError: an empty prompt, an id outside the vocabulary, or prompt and completion together too long.
    """
    if not len(prompt_ids):
        raise ValueError("an empty prompt cannot be continued; give at least one token")
    if sampling.stop:
        raise ValueError(
            f"an engine has no text, so stop={sampling.stop!r} has no effect here: give stop_token_ids, or sample in a "
            "conversation (run_episode, run_group), or by rollout.chat.stop_texts.generate_until"
        )
    for what, ids in (("prompt", prompt_ids), ("sampling.stop_token_ids", sampling.stop_token_ids)):
        end = sys.maxsize if vocab_size is None else vocab_size
        if len(ids) and not (min(ids) >= 0 and max(ids) < end):
            at, wrong = next((i, t) for i, t in enumerate(ids) if not 0 <= t < end)
            known = "" if vocab_size is None else f" of {vocab_size}"
            raise ValueError(
                f"{what} holds the id {wrong} (position {at}), outside the model's vocabulary{known}: "
                "was it made by another model's tokenizer?"
            )
    if len(prompt_ids) + sampling.max_new_tokens > max_length:
        raise ValueError(
            f"prompt of {len(prompt_ids)} tokens + max_new_tokens={sampling.max_new_tokens} is over "
            f"max_length={max_length}; shorten one or raise max_length"
        )
