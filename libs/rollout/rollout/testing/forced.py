"""For tests: an engine with scripted completions, and the log-probs that a stock model gives them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rollout.engine import Completion, OnTokens, Sampling
from rollout.testing.scripted import ScriptedEngine, stream


def stock_log_probs(model: nn.Module, ids: Sequence[int]) -> torch.Tensor:
    """Return log-probs (n,) float64 of a row's tokens, by one plain forward pass; 0 for the first token."""
    row = torch.tensor([list(ids)])
    with torch.no_grad():
        logits = model(input_ids=row, use_cache=False).logits[0, :-1].double()
    following = torch.log_softmax(logits, -1).gather(-1, row[0, 1:, None])[:, 0]
    return torch.cat([torch.zeros(1, dtype=torch.float64), following])


class ForcedEngine(ScriptedEngine):
    """Engine whose `reply(prompt_ids, turn)` returns the ids of each completion; `completions` are all of them."""

    def __init__(self, model: nn.Module, reply: Callable[[list[int], int], Sequence[int]], version: int = 0) -> None:
        super().__init__(reply, version)
        self._model = model
        self.completions: list[Completion] = []

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
        """Return the next scripted completion with its log-probs, streamed token by token."""
        said = await super().generate(prompt_ids, sampling, media, request_id=request_id, deadline=deadline)
        log_probs = stock_log_probs(self._model, [*prompt_ids, *said.ids])[len(prompt_ids) :]
        done = Completion(said.ids, tuple(log_probs.tolist()), said.stop_reason, said.policy_versions)
        await stream(done, on_tokens)
        self.completions.append(done)
        return done
