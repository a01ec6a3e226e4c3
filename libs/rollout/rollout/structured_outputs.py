"""Structured outputs (guided decoding): what a completion has to be, as a setting of its sampling. Imports no torch."""

import json as json_module
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

NO_TOKENIZER = (
    "structured outputs need the texts of tokens: give the tokenizer, RolloutConfig(tokenizer=...) or "
    "NativeEngine(tokenizer=...)"
)
_HEADER = '%llguidance {"no_forcing": true}'


@dataclass(frozen=True)
class StructuredOutputs:
    """Constraint of a completion, one of vLLM's kinds; without any, all texts are allowed.

    At each place the tokens that no text of the kind can go on with have probability 0, and the model's stop token has
    it until the text is whole. A completion that `max_new_tokens` cuts off is the beginning of such a text.
    """

    json: str | None = None
    """Text of a JSON schema, which the completion is an instance of."""
    regex: str | None = None
    """Regular expression that the whole completion matches (Rust's syntax: no look-around, no back references)."""
    choice: tuple[str, ...] = ()
    """Texts, of which the completion is one."""
    grammar: str | None = None
    """Grammar of the completion: EBNF (llama.cpp's GBNF, from `root`) or Lark (from `start`)."""
    json_object: bool = False
    """Whether the completion is any JSON object."""
    disable_any_whitespace: bool = False
    """Whether JSON has no white space between its tokens; else a model may go on with it for ever."""
    num_read: int = 0
    """Tokens at the prompt's end that the completion begins with: those of a partial rollout before it was resumed."""

    def __bool__(self) -> bool:
        return bool(self._kinds())

    def _kinds(self) -> list[str]:
        texts = [name for name in ("json", "regex", "grammar") if getattr(self, name) is not None]
        return texts + ["choice"] * bool(self.choice) + ["json_object"] * self.json_object

    def __post_init__(self) -> None:
        if problems := [*self.problems()]:
            raise ValueError("; ".join(problems))

    def problems(self) -> Iterator[str]:
        """Yield a text for each invalid field, beginning with the field's name."""
        kinds = self._kinds()
        if len(kinds) > 1:
            yield f"{kinds[0]}: a completion has one kind of structured output, got {', '.join(kinds)}"
        if isinstance(self.choice, str) or not all(isinstance(text, str) and text for text in self.choice):
            yield f"choice is a tuple of texts, none of them empty, got {self.choice!r}"
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value.strip("\x00 \n")):
                yield f"{name} must be a text that is not empty, got {value!r}"
        if self.json is not None and (why := _schema_problem(self.json)):
            yield f"json {why}"
        if self.disable_any_whitespace and not {"json", "json_object"} & set(kinds):
            yield "disable_any_whitespace has no effect without json or json_object: leave it out"
        if self.num_read < 0:
            yield f"num_read is a count of tokens, got {self.num_read}"

    def lark(self) -> str:
        """Return the grammar of llguidance that all samplers use. It allows every token that goes on with a text, also
        where the tokenizer would write the only text by another one (`no_forcing`), unless `grammar` begins otherwise.

        Raises ImportError without llguidance, ValueError for EBNF that is none and where nothing is constrained.
        """
        from llguidance import grammar_from, regex_to_lark  # optional

        if self.grammar is not None:
            text = grammar_from("grammar", self.grammar).removeprefix("%llguidance {}")
            return text if text.startswith("%llguidance") else f"{_HEADER}\n{text}"
        if self.regex is not None:
            return f"{_HEADER}\nstart: /{regex_to_lark(self.regex, '')}/"
        if self.choice:
            return f"{_HEADER}\nstart: {' | '.join(map(json_module.dumps, self.choice))}"
        if not self:
            raise ValueError("nothing is constrained: give json, regex, choice, grammar or json_object")
        schema: dict[str, Any] = {"type": "object"} if self.json is None else json_module.loads(self.json)
        if self.disable_any_whitespace:
            schema["x-guidance"] = {**schema.get("x-guidance", {}), "whitespace_flexible": False}
        return f"{_HEADER}\nstart: %json {json_module.dumps(schema)}"

    def plain(self) -> dict[str, Any]:
        """Return the fields that are set, for a message."""
        return {name: value for name, value in vars(self).items() if value}


def check_ends(stop_token_ids: Collection[int], end: int | None, special: Collection[int]) -> None:
    """Raise ValueError for stop tokens that would end a structured output before it is whole, or never.

    `end` is the tokenizer's end-of-text token, which alone ends one; `special` are the tokens that are in no text.
    """
    if end is None:
        raise ValueError("structured outputs end with the tokenizer's eos_token, and it has none: give it one")
    if end not in stop_token_ids:
        raise ValueError(f"structured outputs end with the tokenizer's eos_token: add {end} to stop_token_ids")
    if texts := sorted(set(stop_token_ids) - set(special) - {end}):
        raise ValueError(
            f"the stop_token_ids {', '.join(map(str, texts[:5]))} are texts, which would end a structured output too "
            "early: leave them out"
        )


def _schema_problem(text: str) -> str | None:
    try:
        schema = json_module.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        return f"must be the text of a JSON schema (json.dumps(schema)), got {text!r:.80}: {error}"
    return None if isinstance(schema, dict) else f"must be the text of a JSON schema, an object, got {text!r:.80}"
