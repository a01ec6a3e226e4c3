"""The delimiters of an assistant turn in a template, and the tokens that end one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from chat_tools.known_formats.grammar import Channels
from chat_tools.rendering.replaced_messages import common_prefix
from chat_tools.rendering.template import ChatTemplate, Message, content_like, rendering_errors, unused

_TAG = r"<[^<>\s]{1,60}>"  # cut in two, it would be read as something else, whether it is one token or not


class TurnDelimiters(NamedTuple):
    """The delimiters of a turn: before it the generation prompt; after it, in the last place, `closing`.

    `opening` is all between a question's words and the turn, the prompt included. `stops` are the tokens that may end a
    turn. `ends` are the texts, one token or many, with which the template ends one, `closings` the token of each that
    ends it: a stop token of the model where it holds one, else its last. `prompt_cuts` are the lengths at which a
    beginning of the prompt may end (history may keep less of it than what the model is prompted with), the longest
    first.
    """

    prompt: str
    closing: str
    opening: str = ""
    stops: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    prompt_cuts: tuple[int, ...] = ()
    ends: tuple[str, ...] = ()

    def first_stop(self, text: str, start: int, end: int) -> tuple[int, int] | None:
        """Return the place of the first token in `text[start:end]` that ends a turn."""
        if not self.stops:
            return None
        match = _any_of(self.stops).search(text, start, end)
        return match.span() if match else None

    def end_of(self, text: str) -> str:
        """Return the whole end of a turn with which a text ends: one of the template's, else a stop token, else ""."""
        ends = [end for end in (*self.ends, *self.stops) if text.endswith(end)]
        return max(ends, key=len, default="")


@lru_cache(maxsize=64)
def _any_of(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)))


def find_turn_delimiters(template: ChatTemplate, like: Message) -> TurnDelimiters:
    """Find the delimiters by differences of short conversations' renderings, with content of the kind of `like`'s.

    The result is cached as long as the tokenizer lives and its template, the tools and the options stay the same.
    """
    return delimiters_and_tokens(template, like)[0]


def checked_ends(template: ChatTemplate, like: Message) -> dict[Any, Any]:
    """Return what was proven of the ends of turns (`rendering.turn_end`), cached as the delimiters are."""
    return delimiters_and_tokens(template, like)[1]


def delimiters_and_tokens(template: ChatTemplate, like: Message) -> _Known:
    """Return the delimiters, what was proven of the ends of turns, and the `added_tokens`, all cached alike."""
    tokenizer = template.tokenizer
    is_list = isinstance(like.get("content"), list)
    key = (is_list, template.source, template.key, template.stops, template.vocabulary)
    known = _FRAMES.setdefault(tokenizer, {})
    if key not in known:  # a turn of calls alone has no content to tell the kind that the template takes
        other: Message = {"content": "" if is_list else []}
        stops = stop_tokens(template)
        if len(known) >= _MOST_FRAMES:
            known.clear()
        delimiters = _find_turn_delimiters(template, like, stops) or _find_turn_delimiters(template, other, stops)
        known[key] = delimiters or TurnDelimiters("", "", stops=stops), {}, added_tokens(tokenizer)
    return known[key]


_Known = tuple[TurnDelimiters, dict[Any, Any], frozenset[str]]
_FRAMES: WeakKeyDictionary[Any, dict[Any, _Known]] = WeakKeyDictionary()
_MOST_FRAMES = 64  # of a tokenizer: rows with tools of their own would fill the memory


def _find_turn_delimiters(template: ChatTemplate, like: Message, stops: tuple[str, ...]) -> TurnDelimiters | None:
    mark = unused([])
    asked = unused([mark])
    question = {"role": "user", "content": content_like(like, asked)}
    answer = {"role": "assistant", "content": content_like(like, mark)}
    tokens = added_tokens(template.tokenizer)
    try:
        plain = template.text([question])
        prompted = template.text([question], add_generation_prompt=True)
        answered = template.text([question, answer])
    except rendering_errors():
        return None
    if asked not in plain or mark not in answered:
        return None  # the list of parts is printed as Python does
    closing = answered.rpartition(mark)[2]
    at = token_start(prompted, common_prefix(plain, prompted), tokens)  # the shorter one may have an end of its own
    prompt = prompted[at:]
    cuts = [n for n in range(len(prompt), 0, -1) if token_start(prompt, n, tokens) == n]
    try:  # earlier turns may end in another way
        earlier = template.text([question, answer, question]).rpartition(mark)[2].partition(asked)[0]
    except rendering_errors():
        earlier = None
    before = plain.partition(asked)[0].rstrip()
    ends = [end for end in _written_ends(closing, earlier, stops, tokens) if not before.endswith(end)]
    closings = tuple(dict.fromkeys(_closing(_tokens_in(end, tokens), stops) for end in ends))
    every = sorted({*stops, *closings}, key=len, reverse=True)
    opening = prompted.partition(asked)[2]
    return TurnDelimiters(prompt, closing, opening, tuple(every), closings, tuple(cuts), tuple(ends))


def _written_ends(last: str, earlier: str | None, stops: Sequence[str], tokens: frozenset[str]) -> list[str]:
    """Return the texts with which a template ends turns, from what follows the words of a last and an earlier turn.

    What both begin with ends the turn, up to a stop token. (GLM-4.5's next question begins with what ends a turn: the
    caller leaves that out.) Where they begin differently and the last turn ends in one token, an earlier one ends in
    one in its place. `earlier` is None where the template takes no message after an answer.
    """
    run = _leading_tokens(last, tokens)
    if earlier is None:
        shared = _up_to_stop("".join(run), stops)
    else:
        shared = _up_to_stop(last[: token_start(earlier, common_prefix(last, earlier), tokens)].rstrip(), stops)
    if _tokens_in(shared, tokens):
        return [shared]
    if not run:
        return []
    replaced = _leading_tokens(earlier or "", tokens)[:1] if len(run) == 1 else []
    return list(dict.fromkeys([_up_to_stop("".join(run), stops), *replaced]))


def _up_to_stop(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the end of its first stop token, or the whole."""
    match = _any_of(tuple(sorted(stops, key=len, reverse=True))).search(text) if stops else None
    return text[: match.end()] if match else text


def _closing(run: Sequence[str], stops: Sequence[str]) -> str:
    """Choose the token that ends a turn among those of its end: a known one, else the last."""
    return next((token for token in run if token in stops), run[-1])


def stop_tokens(template: ChatTemplate) -> tuple[str, ...]:
    """Return the tokens at which sampling stops: those of the caller, else what is known of the tokenizer.

    By default these are the end-of-sequence token, and those that end a turn in the one format of calls in which the
    template is found to write a call.
    """
    if template.stops is not None:
        return template.stops
    from chat_tools.rendering.format_detection import written_format  # it finds the turns of a call with this module

    tokens = added_tokens(template.tokenizer)
    fmt = written_format(template)
    ends = () if fmt is None else (*fmt.ends, *(fmt.body.ends if isinstance(fmt.body, Channels) else ()))
    eos = getattr(template.tokenizer, "eos_token", None)
    return tuple(dict.fromkeys([*([eos] if eos else []), *(t for t in ends if t in tokens)]))


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


def _tokens_in(text: str, tokens: frozenset[str]) -> list[str]:
    """Return the added tokens in a text, in order."""
    return [match[0] for match in _token_pattern(tokens).finditer(text) if match[0] in tokens]


@lru_cache(maxsize=1024)
def last_token(text: str, tokens: frozenset[str]) -> str:
    """Return the added token or tag with which a text ends, else its last character."""
    last = max((match[0] for match in _token_pattern(tokens).finditer(text) if match.end() == len(text)), default="")
    return last or text[-1:]
