"""The delimiters of an assistant turn in a template, and the tokens that end one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from chat_tools.parsing.formats import FORMATS
from chat_tools.parsing.grammar import Channels
from chat_tools.rendering.replaced_messages import common_prefix
from chat_tools.rendering.template import ChatTemplate, Message, content_like, rendering_errors, unused

_TAG = r"<[^<>\s]{1,60}>"  # cut in two, it would be read as something else, whether it is one token or not


class TurnDelimiters(NamedTuple):
    """The delimiters of a turn: before it the generation prompt; after it, in the last place, `closing`.

    `opening` is all between a question's words and the turn, the prompt included. `stops` are the tokens that may end a
    turn, `closings` those with which the template itself ends one. `prompt_cuts` are the lengths at which a beginning
    of the prompt may end (history may keep less of it than what the model is prompted with), the longest first.
    """

    prompt: str
    closing: str
    opening: str = ""
    stops: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    prompt_cuts: tuple[int, ...] = ()

    def first_stop(self, text: str, start: int, end: int) -> tuple[int, int] | None:
        """Return the place of the first token in `text[start:end]` that ends a turn."""
        if not self.stops:
            return None
        match = _any_of(self.stops).search(text, start, end)
        return match.span() if match else None


@lru_cache(maxsize=64)
def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)))


def find_turn_delimiters(template: ChatTemplate, like: Message) -> TurnDelimiters:
    """Find the delimiters by differences of short conversations' renderings, with content of the kind of `like`'s.

    The result is cached as long as the tokenizer lives and its template, the tools and the options stay the same.
    """
    tokenizer = template.tokenizer
    is_list = isinstance(like.get("content"), list)
    ends = (getattr(tokenizer, "bos_token", None), getattr(tokenizer, "eos_token", None), template.stops)
    key = (is_list, template.source, repr(template.tools), repr(template.options), ends)
    known = _FRAMES.setdefault(tokenizer, {})
    if key not in known:  # a turn of calls alone has no content to tell the kind that the template takes
        other: Message = {"content": "" if is_list else []}
        if len(known) >= _MOST_FRAMES:
            known.clear()
        delimiters = _find_turn_delimiters(template, like) or _find_turn_delimiters(template, other)
        known[key] = delimiters or TurnDelimiters("", "", stops=stop_tokens(template))
    return known[key]


_FRAMES: WeakKeyDictionary[Any, dict[Any, TurnDelimiters]] = WeakKeyDictionary()
_MOST_FRAMES = 64  # of a tokenizer: rows with tools of their own would fill the memory


def _find_turn_delimiters(template: ChatTemplate, like: Message) -> TurnDelimiters | None:
    mark = unused([])
    question = {"role": "user", "content": content_like(like, unused([mark]))}
    answer = {"role": "assistant", "content": content_like(like, mark)}
    tokens = added_tokens(template.tokenizer)
    stops = stop_tokens(template)
    try:
        plain = template.text([question])
        prompted = template.text([question], add_generation_prompt=True)
        closing = template.text([question, answer]).partition(mark)[2]
    except rendering_errors():
        return None
    at = token_start(prompted, common_prefix(plain, prompted), tokens)  # the shorter one may have an end of its own
    prompt = prompted[at:]
    cuts = [n for n in range(len(prompt), 0, -1) if token_start(prompt, n, tokens) == n]
    run = _leading_tokens(closing, tokens)
    closings = [_closing(run, stops)] if run else []
    if run:  # earlier turns may end in another way
        try:
            earlier = template.text([question, answer, question]).partition(mark)[2]
        except rendering_errors():
            earlier = closing
        first = _leading_tokens(earlier, tokens)
        if first and not earlier.startswith("".join(run)):
            closings.append(_closing(first[:1], stops))
    before = plain.partition(unused([mark]))[0].rstrip()  # GLM-4.5's next question begins with what ends a turn
    closings = [token for token in closings if not before.endswith(token)]
    every = sorted({*stops, *closings}, key=len, reverse=True)
    opening = prompted.partition(unused([mark]))[2]
    return TurnDelimiters(prompt, closing, opening, tuple(every), tuple(dict.fromkeys(closings)), tuple(cuts))


def _closing(run: Sequence[str], stops: Sequence[str]) -> str:
    """Choose the token that ends a turn among those right after it: a known one, else the last."""
    return next((token for token in run if token in stops), run[-1])


def stop_tokens(template: ChatTemplate) -> tuple[str, ...]:
    """Return the tokens at which sampling stops: those of the caller, else the known ones of the tokenizer.

    By default these are the end-of-sequence token, and those that end a turn in the known formats of calls, as far as
    the tokenizer has them.
    """
    if template.stops is not None:
        return template.stops
    tokens = added_tokens(template.tokenizer)
    known = [end for fmt in FORMATS.values() for end in fmt.ends]
    known += [end for fmt in FORMATS.values() if isinstance(fmt.body, Channels) for end in fmt.body.ends]
    eos = getattr(template.tokenizer, "eos_token", None)
    return tuple(dict.fromkeys([*([eos] if eos else []), *(t for t in known if t in tokens)]))


def added_tokens(tokenizer: Any) -> frozenset[str]:
    """Return the added tokens, special or not: no text is tokenised across them."""
    added = getattr(tokenizer, "get_added_vocab", None)
    specials = getattr(tokenizer, "all_special_tokens", ())
    return frozenset(filter(None, [*(added() if added is not None else ()), *specials]))


def token_start(text: str, at: int, tokens: Iterable[str]) -> int:
    """Return `at`, or the beginning of the added token or tag that `at` would split."""
    begin = max(0, at - 80)
    for match in _token_pattern(frozenset(tokens)).finditer(text, begin):
        if match.start() >= at:
            break
        if match.end() > at:
            return match.start()
    return at


_PATTERNS: dict[frozenset[str], re.Pattern[str]] = {}


def _token_pattern(tokens: frozenset[str]) -> re.Pattern[str]:
    """Return a pattern of the tokens and of tags. Cached by the set of tokens."""
    if tokens not in _PATTERNS:
        _PATTERNS[tokens] = re.compile("|".join([*map(re.escape, sorted(tokens, key=len, reverse=True)), _TAG]))
    return _PATTERNS[tokens]


def _leading_tokens(text: str, tokens: Iterable[str]) -> Sequence[str]:
    """Return the added tokens with which a text begins, nothing between them."""
    longest_first = sorted(tokens, key=len, reverse=True)
    leading: list[str] = []
    at = 0
    while token := next((t for t in longest_first if text.startswith(t, at)), ""):
        leading.append(token)
        at += len(token)
    return leading
