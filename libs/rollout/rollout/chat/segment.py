"""Exact token streams: the tokens that a model read and those it sampled, in their order."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rollout.engine import Completion
from rollout.experts import ROUTED_EXPERTS, RoutedExperts, merged

NOT_SAMPLED = -1  # policy version of a token that no policy made here


@dataclass(frozen=True)
class Segment:
    """One token stream of an episode: prompt, sampled turns and the messages between them.

    The four sequences are of one length. `loss_mask` is true on tokens that were sampled in this very stream; there
    `log_probs` are the sampler's and `policy_versions` its weights, elsewhere 0.0 and -1. `media` is the stream's media
    (`RolloutEngine.generate`), None for text. `agent` says whose stream it is: "" for the episode's own, else a
    sub-agent's name. `routed_experts`, where the engine records them, are of every token.
    """

    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    log_probs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    media: Mapping[str, Any] | None = None
    agent: str = ""
    routed_experts: RoutedExperts | None = None

    def __post_init__(self) -> None:
        lengths = {len(self.ids), len(self.loss_mask), len(self.log_probs), len(self.policy_versions)}
        if len(lengths) != 1:
            raise ValueError(f"ids, loss_mask, log_probs and policy_versions differ in length: {sorted(lengths)}")
        if self.routed_experts is not None and len(self.routed_experts) != len(self.ids):
            raise ValueError(f"routed_experts are of {len(self.routed_experts)} tokens, ids of {len(self.ids)}")
        if not self.ids or self.loss_mask[0]:
            raise ValueError("a segment starts with at least one token that was not sampled")
        for at, (on, version) in enumerate(zip(self.loss_mask, self.policy_versions, strict=True)):
            if on == (version == NOT_SAMPLED):
                raise ValueError(f"token {at} has policy version {version}, but its loss_mask is {on}")

    @property
    def sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(self.loss_mask)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The policy versions in order, each with the number of tokens in a row that it is of."""
        return tuple((version, len(list(tokens))) for version, tokens in groupby(self.policy_versions))

    @property
    def nll(self) -> float:
        """Sum of -log p over the sampled tokens."""
        return math.fsum(-p for p, on in zip(self.log_probs, self.loss_mask, strict=True) if on)


@dataclass
class Stream:
    """A segment that still grows."""

    agent: str = ""
    media: Mapping[str, Any] | None = None
    ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    routed_experts: RoutedExperts | None = None

    def given(self, ids: Sequence[int]) -> None:
        """Append prompt tokens, which were not sampled here."""
        self.ids += ids
        self.loss_mask += [False] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.policy_versions += [NOT_SAMPLED] * len(ids)

    def sampled(self, completion: Completion) -> None:
        """Append the tokens of a sampled turn, as the engine returned them; some at its end may have been dropped."""
        self.ids += completion.ids
        self.loss_mask += [True] * len(completion.ids)
        self.log_probs += completion.log_probs
        self.policy_versions += completion.policy_versions
        experts: RoutedExperts | None = completion.extras.get(ROUTED_EXPERTS)
        if experts is not None and len(experts) > len(self.ids):
            experts = experts.resized(len(self.ids))  # others will stand where the dropped tokens were
        self.routed_experts = merged(self.routed_experts, experts)

    def segment(self) -> Segment:
        """Return the stream so far as a segment."""
        streams = (tuple(self.ids), tuple(self.loss_mask), tuple(self.log_probs), tuple(self.policy_versions))
        experts = None if self.routed_experts is None else self.routed_experts.resized(len(self.ids))
        return Segment(*streams, media=self.media, agent=self.agent, routed_experts=experts)
