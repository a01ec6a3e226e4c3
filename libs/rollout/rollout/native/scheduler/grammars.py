"""Structured outputs of the native engine: grammars as masks of the tokens that may come next, by llguidance."""

import functools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rollout.extras import missing_extra_message
from rollout.native.scheduler.request import SequenceRequest
from rollout.sampling import Sampling
from rollout.structured_outputs import NO_TOKENIZER, StructuredOutputs, check_ends

if TYPE_CHECKING:  # optional
    import llguidance

MAX_GRAMMARS = 256
"""Compiled grammars that are kept; the least recently used one goes first."""


class Grammars:
    """Compiler of structured outputs for one vocabulary; any thread may call it.

    llguidance is imported, and reads the vocabulary, for the first of them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._known: OrderedDict[StructuredOutputs, llguidance.LLMatcher] = OrderedDict()

    @property
    def problem(self) -> str | None:
        """Why there are no structured outputs; None where there are."""
        if self._tokenizer is None:
            return NO_TOKENIZER
        return (
            None if find_spec("llguidance") else missing_extra_message("structured outputs need llguidance", "guided")
        )

    @functools.cached_property
    def _vocabulary(self) -> "llguidance.LLTokenizer":
        if not isinstance(self._tokenizer, PreTrainedTokenizerFast):
            raise ValueError(f"structured outputs need a fast tokenizer, got a {type(self._tokenizer).__name__}")
        from llguidance.hf import from_tokenizer  # optional

        return from_tokenizer(self._tokenizer, max(self._vocab_size, len(self._tokenizer)))

    def matcher(self, prompt: Sequence[int], sampling: Sampling) -> "llguidance.LLMatcher | None":
        """Return a matcher at a completion's beginning, after what a partial rollout has read; None: any text may come.

        Raises ValueError without a tokenizer or llguidance, for a tokenizer that is not fast, for a grammar that
        llguidance refuses, and for stop tokens that would cut texts off.
        """
        wanted = sampling.structured_outputs
        if not wanted:
            return None
        if self._tokenizer is None or self.problem is not None:
            raise ValueError(self.problem)
        check_ends(sampling.stop_token_ids, self._tokenizer.eos_token_id, special_ids(self._tokenizer))
        matcher = self._compiled(replace(wanted, num_read=0)).deep_copy()
        read = list(prompt[max(0, len(prompt) - wanted.num_read) :]) if wanted.num_read else []
        if len(read) < wanted.num_read or not matcher.consume_tokens(read):
            raise ValueError(
                f"the prompt's last {wanted.num_read} tokens (num_read) do not begin such a structured output"
            )
        return matcher

    def _compiled(self, wanted: StructuredOutputs) -> "llguidance.LLMatcher":
        with self._lock:
            known = self._known.get(wanted)
            if known is None:
                known = self._known[wanted] = self._compile(wanted)
                if len(self._known) > MAX_GRAMMARS:
                    self._known.popitem(last=False)
            self._known.move_to_end(wanted)
            return known

    def _compile(self, wanted: StructuredOutputs) -> "llguidance.LLMatcher":
        vocabulary = self._vocabulary
        from llguidance import LLMatcher  # optional

        matcher = LLMatcher(vocabulary, wanted.lark(), log_level=0)
        if matcher.is_error():
            raise ValueError(f"structured_outputs can't be sampled by: {matcher.get_error()}")
        return matcher


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of a tokenizer's special tokens, which are in no text."""
    return frozenset(token for token, added in tokenizer.added_tokens_decoder.items() if added.special)


def apply_grammars(logits: Tensor, requests: Sequence[SequenceRequest | None]) -> Tensor:
    """Return logits (n, V) with -inf for the tokens that a row's grammar does not allow; other rows' are the same bits.

    A matcher that finds its grammar too complex allows the end alone; its error is for the caller to look for.
    """
    rows = [(i, r.matcher) for i, r in enumerate(requests) if r is not None and r.matcher is not None]
    if not rows:
        return logits
    masks = [torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8) for _, matcher in rows]
    bits = torch.stack(masks).to(logits.device)
    allowed = (bits[:, :, None] >> torch.arange(8, device=logits.device, dtype=torch.uint8)) & 1
    places = torch.tensor([i for i, _ in rows], device=logits.device)
    masked = logits[places].masked_fill(allowed.flatten(1)[:, : logits.shape[-1]] == 0, -torch.inf)
    return logits.index_copy(0, places, masked)
