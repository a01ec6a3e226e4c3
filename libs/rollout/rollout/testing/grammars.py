"""For tests of structured outputs: a small vocabulary, and log-probs by trying each of its tokens."""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import regex
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rollout.engine import Completion, Sampling
from rollout.structured_outputs import StructuredOutputs

TEXTS = [
    *'abcdeflnrstuxyz0123456789{}[]":,. -',
    "tr",
    "ru",
    "true",
    "false",
    "null",
    '{"',
    '":',
    '"}',
    "ab",
    "abc",
    "12",
    "},",
]
"""Texts of the tokens by their ids."""
END, OTHER_END = len(TEXTS), len(TEXTS) + 1
VOCAB = len(TEXTS) + 7
"""Rows of a model's head: more than the tokenizer has tokens, as of real models."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", 12, None]}},
    "required": ["a"],
    "additionalProperties": False,
}
May = Callable[[str], tuple[bool, bool]]
"""Function that says of a text whether it begins an allowed one, and whether it is one."""


def letters() -> PreTrainedTokenizerFast:
    """Return a tokenizer of single letters, as many as all texts here need, and longer texts, beginnings of others."""
    backend = Tokenizer(models.BPE(vocab={text.replace(" ", "\u0120"): i for i, text in enumerate(TEXTS)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in ("<end>", "<other>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def text_of(ids: Sequence[int]) -> str:
    """Return the text of tokens, none of them special."""
    return "".join(TEXTS[i] for i in ids)


def beginnings(texts: Sequence[str]) -> May:
    """Return what may be said where all allowed texts are known, by looking at each."""
    return lambda text: (any(whole.startswith(text) for whole in texts), text in texts)


def matching(pattern: str) -> May:
    """Return what may be said of the matches of an expression, by the regex package's partial matches."""
    found = regex.compile(pattern)
    return lambda text: (found.fullmatch(text, partial=True) is not None, re.fullmatch(pattern, text) is not None)


def objects() -> list[str]:
    """Return all instances of SCHEMA without white space, their keys in its order."""
    values = [f'"b":{json.dumps(b)}' for b in ("x", 12, None)]
    return [f'{{"a":{a}{"," + b if b else ""}}}' for a, b in product(("true", "false"), ["", *values])]


def nested(text: str) -> tuple[bool, bool]:
    """Return the same of `a`s, a `c`, and as many `b`s."""
    shape = re.fullmatch("(a*)(c?)(b*)", text)
    if shape is None:
        return False, False
    a, c, b = shape.groups()
    return (bool(c) and len(b) <= len(a)) or not b, bool(c) and len(a) == len(b)


KINDS: Mapping[str, tuple[StructuredOutputs, May]] = {
    "regex": (StructuredOutputs(regex=r"[abc]{2,5}(x|yz)*-?\d{1,3}"), matching(r"[abc]{2,5}(x|yz)*-?[0-9]{1,3}")),
    "choice": (StructuredOutputs(choice=("ab", "abc", "abcd", "true 1")), beginnings(["ab", "abc", "abcd", "true 1"])),
    "gbnf": (StructuredOutputs(grammar='root ::= "a" root "b" | "c"'), nested),
    "lark": (StructuredOutputs(grammar='start: "a" start "b" | "c"'), nested),
    "json": (StructuredOutputs(json=json.dumps(SCHEMA), disable_any_whitespace=True), beginnings(objects())),
}
"""A constraint of each kind, with what it allows."""


def sampling_of(wanted: StructuredOutputs, **changes: Any) -> Sampling:
    """Return a sampling that ends as the tokenizer's texts do."""
    settings: dict[str, Any] = {"max_new_tokens": 60, "stop_token_ids": (END, OTHER_END)}
    return Sampling(**{**settings, "structured_outputs": wanted, **changes})


def reference(logits: Tensor, text: str, may: May, sampling: Sampling) -> list[float]:
    """Return log-probs of the next token in float64, each of the vocabulary tried: may the text go on with it?"""
    allowed = [may(text + token)[0] for token in TEXTS] + [may(text)[1]] + [False] * (VOCAB - len(TEXTS) - 1)
    heated = [x / sampling.temperature for x in logits.double().tolist()]
    weights = [math.exp(x - max(heated)) * ok for x, ok in zip(heated, allowed, strict=True)]
    weights = [w if w >= sampling.min_p * max(weights) else 0.0 for w in weights]
    return [math.log(w / sum(weights)) if w else -math.inf for w in weights]


@torch.no_grad()
def forced_differences(
    model: Any, prompt: Sequence[int], done: Completion, may: May, sampling: Sampling, first: int = 0
) -> list[float]:
    """Return the distance of each log-prob, from token `first` on, from the enumeration over a plain forward pass; inf
    for a token that is not allowed, and at the end of a text that is not whole."""
    rows = model(input_ids=torch.tensor([[*prompt, *done.ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    apart = [
        abs(reference(rows[at], text_of(done.ids[:at]), may, sampling)[done.ids[at]] - done.log_probs[at])
        for at in range(first, len(done.ids))
    ]
    if done.stop_reason == "stop" and not (done.ids[-1] == END and may(text_of(done.ids[:-1]))[1]):
        apart.append(math.inf)
    return apart
