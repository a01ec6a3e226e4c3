"""The definition of a tool-call format: markers, nesting, the codec of the arguments, and its writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Call = tuple[str, Mapping[str, Any]]
"""A call to write: the tool's name and its arguments as values."""
EXAMPLE_CALLS: tuple[Call, ...] = (("weather", {"city": "Paris", "days": 3}),)
Pair = tuple[str, str]


class Tagged(NamedTuple):
    """Arguments as tagged values: NAME `name_end`, then `key[0]` KEY `key[1]` `value[0]` VALUE `value[1]` repeated.

    With `newlines`, one newline after the opening and one before the closing tag of a value belong to the tags. With
    `guess`, a value whose type nobody declares is read as JSON if it is JSON. `attribute` names an attribute of the
    key's tag, behind the key's closing quote, and `kinds` its values: the first says that the value is text as it
    stands, the others that it is JSON. Where `calls` open with a quote and `name_end` has none, further attributes may
    follow the name. With `entities`, `&quot;` and `&amp;` in a name or key stand for the characters. `short` in
    the place of `name_end` ends the call too. A value between the pair `raw` holds anything but its closing. With
    `objects`, `{"name": ..., "arguments": {...}}` may stand for a call in the wrapper.
    """

    name_end: str
    key: Pair
    value: Pair
    newlines: bool = False
    guess: bool = False
    attribute: str = ""
    kinds: tuple[str, ...] = ("true", "false")
    entities: bool = False
    short: str = ""
    raw: Pair = ("", "")
    objects: bool = False


class Elements(NamedTuple):
    """Arguments as elements: NAME `name_end`, then `<KEY>VALUE</KEY>` repeated, each tag with `prefix` before it.

    A VALUE may be elements itself: those of an object by their names, those of a list called `item`.
    """

    prefix: str
    name_end: str = '">'
    item: str = "item"


class Json(NamedTuple):
    """`{"name": ..., "arguments": {...}}`, alone or in a list (`objects`); or a header and the arguments' object.

    `header` is a pattern of all that stands between the opening marker and the object, with a group `name` and perhaps
    `id`; its repetitions are possessive, so that it takes linear time. `after` may follow the object. `quotes` are
    further string delimiters, without escapes; keys are bare then. With `keyed`, an object is `{NAME: {...}}`. `lead`
    is text before the list of an answer that begins with it (`Format.opening`). With `lines`, further objects may
    follow, without a list.
    """

    objects: bool = True
    header: str = ""
    after: str = ""
    quotes: tuple[str, ...] = ()
    keyed: bool = False
    lead: str = ""
    lines: bool = False


class Pythonic(NamedTuple):
    """A list of Python calls with keyword arguments: `[f(a=1), g(b="x")]`; without `brackets` a line each, no list.

    With `objects`, `{"name": ..., "arguments": {...}}` may stand for a call.
    """

    brackets: bool = True
    objects: bool = False


class Channels(NamedTuple):
    """Messages with headers: `start` and `channel` open a header, `message` ends it, one of `ends` ends the text.

    The channel named `reasoning` is reasoning; where the pattern `recipient` finds a `name`, the message is a call.
    """

    start: str
    channel: str
    message: str
    ends: tuple[str, ...]
    reasoning: str
    recipient: str


class Recipients(NamedTuple):
    """Messages with recipients: `mark` NAME `message` TEXT.

    One for `reasoning` is reasoning, one for `content` content; one for a tool is a call if its text begins with the
    format's section, which is one nowhere else.
    """

    mark: str
    message: str
    reasoning: str
    content: str


class Format(NamedTuple):
    """A format of assistant turns.

    `calls` are the markers of one call (no closing one: the body ends itself), `section` a wrapper around calls,
    `reasoning` the markers of thinking, `ends` the tokens that end a turn. Calls stand inside the section only, or with
    `bare` at the beginning of a line too; `opening` is what begins a call without a marker if it begins the answer.

    `aliases` are other names of it: the peers' parsers, the models, the templates. `writer` writes calls as a model
    trained on the format does (`known_formats.writing`); by it the format has an example, a round-trip test, a page and
    seeds for the fuzzer. `sign` is a text that stands in its chat templates alone, where the first marker does
    not. `recipients` are the headers of messages, where a turn is made of some and calls are written with tags.
    `call_ends_reasoning` says whether a call's opening token ends thinking that is not closed, as in the model's own
    engine. `prompt_end` is the marker with which each prompt ends, so that a turn goes on behind it, and what stands
    behind the marker before content; before anything but that and a call's header it is text.
    """

    name: str
    calls: tuple[Pair, ...]
    body: Tagged | Elements | Json | Pythonic | Channels
    section: Pair | None = None
    reasoning: tuple[Pair, ...] = (("<think>", "</think>"),)
    ends: tuple[str, ...] = ()
    bare: bool = False
    opening: str = ""
    aliases: tuple[str, ...] = ()
    writer: Callable[[Format, Sequence[Call]], str] | None = None
    sign: str = ""
    recipients: Recipients | None = None
    call_ends_reasoning: bool = False
    prompt_end: Pair = ("", "")

    def write(self, calls: Sequence[Call]) -> str:
        """Return calls as a model writes them, with their wrapper. ValueError for a format without a writer."""
        if self.writer is None:
            raise ValueError(f"the format {self.name!r} has no writer: give it one of chat_tools.known_formats.writing")
        return self.writer(self, calls)

    @property
    def example(self) -> str:
        """A call as a model writes it."""
        return self.write(EXAMPLE_CALLS)
