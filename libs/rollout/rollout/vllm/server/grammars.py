"""Structured outputs in vLLM's process: its own, by llguidance, with the grammar that the native engine has."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine.llm_engine import LLMEngine

from rollout.structured_outputs import StructuredOutputs


class RequestGrammars:
    """The grammars of an engine's running requests, by vLLM's names of them."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._running: dict[str, Any] = {}

    @property
    def ends(self) -> tuple[int | None, list[int]] | None:
        """The tokenizer's end-of-text token and its special tokens; None without a tokenizer."""
        tokenizer = self._engine.renderer.tokenizer
        if tokenizer is None:
            return None
        return tokenizer.eos_token_id, [i for i, added in tokenizer.added_tokens_decoder.items() if added.special]

    @staticmethod
    def params(wanted: Mapping[str, Any]) -> StructuredOutputsParams:
        """Return vLLM's parameters. Raise ValueError for a grammar that llguidance refuses."""
        grammar = _read(wanted).lark()
        if why := LLMatcher.validate_grammar(grammar):
            raise ValueError(f"structured_outputs can't be sampled by: {why}")
        return StructuredOutputsParams(grammar=grammar)

    def begin(self, name: str, ids: Sequence[int], wanted: Mapping[str, Any]) -> None:
        """Wait for the grammar of a new request, and have it read what a partial rollout sampled before.

        Raises ValueError, and ends the request, for a grammar that the vocabulary can't have or the tokens don't begin.
        """
        request = self._engine.engine_core.engine_core.scheduler.requests[name]
        while request.structured_output_request.grammar is None:  # compiled in a thread
            time.sleep(0.0005)
        grammar, count = request.structured_output_request.grammar, _read(wanted).num_read
        why = str(grammar) if isinstance(grammar, Exception) else grammar.ll_matcher.get_error()
        if not why and count and (len(ids) < count or not grammar.accept_tokens(name, list(ids[-count:]))):
            why = f"the prompt's last {count} tokens (num_read) do not begin such a structured output"
        if why:
            self._engine.abort_request([name], internal=True)
            raise ValueError(f"structured_outputs can't be sampled by: {why}")
        self._running[name] = grammar

    def end(self, name: str) -> str:
        """Forget a request that has ended; return why its grammar gave up, after which vLLM ends a text anywhere."""
        grammar = self._running.pop(name, None)
        return "" if grammar is None else str(grammar.ll_matcher.get_error())


def _read(wanted: Mapping[str, Any]) -> StructuredOutputs:
    return StructuredOutputs(**{**wanted, "choice": tuple(wanted.get("choice", ()))})
