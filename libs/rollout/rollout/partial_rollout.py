"""Partial rollouts for any engine: interrupted completions continue from their tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout.engine import Completion, PauseMode, RolloutEngine, Sampling
from rollout.experts import RoutedExperts, merged
from rollout.seeds import derive_seed


class ResumableEngine:
    """An engine whose `pause("abort")` interrupts completions without ending them; all else is the wrapped engine's.

    The tokens of an interrupted completion become the end of its prompt: once the engine resumes, perhaps with other
    weights, the rest is sampled after them. So every token's log-prob is that of the weights whose version it has. A
    seeded request draws the rest with another seed, which follows from the number of its tokens: the first stream of
    numbers is not used twice. A completion that is cancelled, or reaches its deadline, ends as in any engine. Presence
    and frequency penalties, which count the completion's own tokens alone, are refused.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._pauses = 0
        self._cancelled: set[str] = set()
        self.interrupted = 0
        """Answers that were interrupted so far."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, media: Mapping[str, Any] | None = None, **options: Any
    ) -> Completion:
        """Sample one completion through any number of interruptions; see `RolloutEngine.generate`.

        Raises ValueError for presence and frequency penalties besides.
        """
        if sampling.presence_penalty or sampling.frequency_penalty:
            raise ValueError(
                "presence_penalty and frequency_penalty would not count what was sampled before an interruption: "
                "take repetition_penalty, or sample without partial rollouts"
            )
        request = options.get("request_id")
        done, rest = await self._part(prompt_ids, sampling, media, options)
        while rest and request not in self._cancelled:
            self.interrupted += 1
            left = sampling.after(len(done.ids))
            if done.ids and sampling.seed is not None:
                left = replace(left, seed=derive_seed(sampling.seed, "continued", len(done.ids)))
            more, rest = await self._part([*prompt_ids, *done.ids], left, media, options)
            done = _joined(done, more)
        self._cancelled.discard(request or "")
        return done

    async def _part(
        self, prompt_ids: Sequence[int], sampling: Sampling, media: Mapping[str, Any] | None, options: dict[str, Any]
    ) -> tuple[Completion, bool]:
        """Sample until the end or an interruption; return the tokens, and whether it was interrupted."""
        before = self._pauses
        completion = await self._engine.generate(prompt_ids, sampling, media, **options)
        return completion, completion.stop_reason == "abort" and self._pauses > before

    async def pause(self, mode: PauseMode = "finish") -> None:
        """Pause sampling; "abort" interrupts running completions, which continue after `resume`."""
        self._pauses += mode == "abort"
        await self._engine.pause(mode)

    async def cancel(self, request_id: str) -> bool:
        """End a request with the tokens so far."""
        self._cancelled.add(request_id)
        was_open = await self._engine.cancel(request_id)
        if not was_open:
            self._cancelled.discard(request_id)
        return was_open

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def _joined(first: Completion, second: Completion) -> Completion:
    """Join two parts of one completion. Extras with one entry a token are concatenated, others are the second's; the
    experts of a token are its first ones."""
    extras = dict(second.extras)
    for name, value in first.extras.items():
        if isinstance(value, RoutedExperts):
            extras[name] = merged(value, extras.get(name))
        elif isinstance(value, Sequence) and not isinstance(value, str) and name in extras:
            extras[name] = [*value, *extras[name]]
    return Completion(
        first.ids + second.ids,
        first.log_probs + second.log_probs,
        second.stop_reason,
        first.policy_versions + second.policy_versions,
        extras,
    )
