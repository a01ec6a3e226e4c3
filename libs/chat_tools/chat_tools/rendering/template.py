"""A tokenizer's chat template as a pure function of messages, also for lists that the template alone would refuse."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from chat_tools.parsing.arguments import tool_dict
from chat_tools.rendering.cached_template import (
    cached_source,
    plain_data,
    plain_messages,
    rendered_plain,
    texts_alone,
)

Message = Mapping[str, Any]

# Private-use characters: rare enough that no text begins or ends with them; `unused` makes sure of it.
_FIRST, _LAST = "\ue0a1", "\ue0b2"
# Arguments of transformers' apply_chat_template that say what becomes of the text, or choose another template.
_TOKENISING = frozenset(
    (
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
        "chat_template",
    )
)
# Its other arguments: where an option has such a name, it is called itself.
_APPLYING = frozenset(
    (
        "conversation",
        "tokenize",
        "return_dict",
        "return_assistant_tokens_mask",
        "continue_final_message",
    )
)
_GENERATION = re.compile(r"\{%-?\s*generation\b")
_MOST_SHAPES = 4096  # of conversations whose text is proven, of one template
_TOOLS: dict[str, tuple[Any, str]] = {}
_MOST_TOOLS = 64
_Text = tuple[str, list[tuple[int, int]] | None]  # and the blocks that the template marks
# By tokenizer and template: the shapes of which the faster rendering is proven; None where it differed once.
_PROVEN: WeakKeyDictionary[Any, dict[Any, set[Any] | None]] = WeakKeyDictionary()


def template_errors() -> tuple[type[Exception], ...]:
    """Return the errors that a chat template raises itself; no others are ever caught."""
    jinja2 = sys.modules.get("jinja2")  # not loaded: no template has run
    return (jinja2.TemplateError,) if jinja2 is not None else ()


def rendering_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a trial rendering: the template's own, and Python's for joining text to another type.

    DeepSeek-V3's template joins text to the arguments of a call, which are a dict where they are not JSON text.
    """
    return (*template_errors(), TypeError)


def unused(texts: Sequence[str]) -> str:
    """Return a short text whose first and last characters are in none of the texts."""
    first, last = _FIRST, _LAST
    while any(first in text or last in text for text in texts):
        first, last = chr(ord(first) + 1), chr(ord(last) + 1)
    return f"{first}x{last}"


class StopTokens(tuple[str, ...]):
    """Stop tokens as texts, each of which was found to be one token of the tokenizer in use."""

    __slots__ = ()


def tokens_as_text(stops: Iterable[str | int], tokenizer: Any) -> StopTokens:
    """Return stop tokens, given by text or id, as texts; ValueError for one that is no single token.

    Those that this function returned are not checked again.
    """
    if isinstance(stops, StopTokens):
        return stops
    texts: list[str] = []
    for stop in stops:
        if isinstance(stop, str):
            if len(tokenizer(stop, add_special_tokens=False)["input_ids"]) != 1:
                raise ValueError(f"the stop token {stop!r} is not one token of this tokenizer: give one of its tokens")
            texts.append(stop)
        else:
            text = tokenizer.convert_ids_to_tokens(stop) if stop < len(tokenizer) else None
            if text is None:
                raise ValueError(
                    f"the stop token {stop} is no id of this tokenizer: the generation config is another model's"
                )
            texts.append(tokenizer.decode([stop], skip_special_tokens=False))
    return StopTokens(dict.fromkeys(texts))


def content_like(message: Message, text: str) -> Any:
    """Return `text` as content of the same kind as the message's: a string, or a list of parts."""
    return [{"type": "text", "text": text}] if isinstance(message.get("content"), list) else text


@lru_cache(maxsize=64)
def _has_generation_marks(source: str) -> bool:
    return _GENERATION.search(source) is not None


@lru_cache(maxsize=64)
def _methods_are_stock(kind: type) -> bool:
    """Return whether a tokenizer's class renders and tokenises by transformers' own methods."""
    methods = (getattr(kind, name, None) for name in ("apply_chat_template", "get_chat_template", "__call__"))
    return all(getattr(method, "__module__", "").startswith("transformers.tokenization_utils") for method in methods)


def stock_backend(tokenizer: Any) -> Any:
    """Return the backend that gives what a call of the tokenizer gives; None where the call does more than that."""
    if not _calls_backend(tokenizer.__class__):
        return None
    backend = tokenizer.backend_tokenizer
    plain = backend.truncation is None and backend.padding is None
    return backend if plain and backend.encode_special_tokens == tokenizer.split_special_tokens else None


@lru_cache(maxsize=64)
def _calls_backend(kind: type) -> bool:
    encodes = getattr(getattr(kind, "_encode_plus", None), "__module__", "")
    return _methods_are_stock(kind) and encodes == "transformers.tokenization_utils_tokenizers"


class Cut(NamedTuple):
    """A text with a stand-in user message in it, and its place."""

    text: str
    start: int
    end: int


class ChatTemplate:
    """A chat template with fixed tools and options (such as `enable_thinking`).

    `stops` are the tokens that stop the model, None where only the tokenizer is known.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Any] | None,
        options: Mapping[str, Any],
        stops: tuple[str, ...] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        self.tools = [tool_dict(tool) for tool in tools] if tools else None
        self.options = dict(options)

    @cached_property
    def source(self) -> str:
        """The Jinja text."""
        if self.tokenizes_text and type(self.tokenizer.chat_template) is str:
            return str(self.tokenizer.chat_template)
        get = getattr(self.tokenizer, "get_chat_template", None)
        if get is not None:
            return str(get(None, self.tools))
        source = getattr(self.tokenizer, "chat_template", None)
        if not isinstance(source, str):
            raise ValueError("the tokenizer has no chat_template: set tokenizer.chat_template to the model's own")
        return source

    @cached_property
    def has_generation_marks(self) -> bool:
        """The template's marking: True where it marks the assistant's text itself."""
        return _has_generation_marks(self.source)

    @cached_property
    def tokenizes_text(self) -> bool:
        """The tokenisation: True where `apply_chat_template` gives exactly the tokens of its text without `tokenize`.

        This holds where the methods are transformers' own, and no option of the call changes them.
        """
        return _methods_are_stock(self.tokenizer.__class__) and not _TOKENISING.intersection(self.options)

    @cached_property
    def _faster_source(self) -> str | None:
        """The same template for `rendering.cached_template`; None where `apply_chat_template` has to be asked."""
        stock = self.tokenizes_text and not _APPLYING.intersection(self.options)
        return cached_source(self.source) if stock else None

    @cached_property
    def key(self) -> tuple[str, str]:
        """The tools and the options, to know them again."""
        return self._plain_tools[1], repr(self.options)

    @cached_property
    def vocabulary(self) -> tuple[Any, Any, int]:
        """The tokenizer's first and last token and its size, to know that no token came since."""
        size = len(self.tokenizer) if hasattr(type(self.tokenizer), "__len__") else 0
        return getattr(self.tokenizer, "bos_token", None), getattr(self.tokenizer, "eos_token", None), size

    @cached_property
    def _plain_tools(self) -> tuple[Any, str]:
        """The tools as the template sees them, and as a text: those of the last rows are kept."""
        if not self.tools:
            return self.tools, repr(self.tools)
        known = repr(self.tools)
        if known not in _TOOLS:
            if len(_TOOLS) >= _MOST_TOOLS:
                _TOOLS.clear()
            _TOOLS[known] = (plain_data() or list)(self.tools), known
        return _TOOLS[known]

    @cached_property
    def _given(self) -> dict[str, Any] | None:
        """What the template is given beside the messages, as plain data; None where transformers has no such function.

        The names of special tokens are looked up once for all renderings of a conversation.
        """
        plain = plain_data()
        if plain is None:
            return None
        options = {**self.tokenizer.special_tokens_map, **self.options}
        options = options if texts_alone(options) else plain(options)
        return {"documents": None, **options, "tools": self._plain_tools[0]}

    def plain(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages as the template sees them, for several renderings of them; as they are if it cannot."""
        return messages if self._faster_source is None else plain_messages(messages) or messages

    def apply(self, messages: Sequence[Message], add_generation_prompt: bool = False, **options: Any) -> Any:
        """Call the tokenizer's own `apply_chat_template`."""
        return self.tokenizer.apply_chat_template(
            [dict(m) for m in messages],
            tools=self.tools,
            add_generation_prompt=add_generation_prompt,
            **self.options,
            **options,
        )

    def text_and_blocks(self, messages: Sequence[Message], add_generation_prompt: bool) -> _Text:
        """Render to text, with the characters `start:end` of each block that the template marks, None without any.

        It is the text of `apply_chat_template`, by the faster rendering where that is proven for the shape: each pair
        of neighbours (roles, kinds of content, keys) was rendered both ways before, in some conversation.
        """
        source = self._faster_source
        if source is None:
            return self._official(messages, add_generation_prompt)
        known = _PROVEN.setdefault(self.tokenizer, {})
        key = (self.source, self.tools is None, add_generation_prompt, *self.options)
        proven = known.setdefault(key, set())
        if proven is None:
            return self._official(messages, add_generation_prompt)
        text = self._quickly(source, messages, add_generation_prompt, self.has_generation_marks)
        kinds = [(m.get("role"), type(m.get("content")), *m) for m in messages]
        shapes = {(None, kinds[0]), *pairwise(kinds)}
        if not shapes <= proven:
            official = self._official(messages, add_generation_prompt)
            if official != text:
                known[key] = None
                return official
            if len(proven) > _MOST_SHAPES:
                proven.clear()
            proven.update(shapes)
        return text

    def _official(self, messages: Sequence[Message], add_generation_prompt: bool) -> _Text:
        """Render by the template that everybody uses.

        `apply_chat_template` returns the blocks as tokens alone, so this calls the function that it calls.
        """
        if not self.has_generation_marks:
            return str(self.apply(messages, add_generation_prompt, tokenize=False)), None
        return self._rendered(self.source, messages, add_generation_prompt)

    def _rendered(self, source: str, messages: Sequence[Message], add_generation_prompt: bool) -> _Text:
        """Render a source with generation marks as `apply_chat_template` does."""
        transformers = sys.modules["transformers.utils.chat_template_utils"]  # the tokenizer has brought it
        texts, blocks = transformers.render_jinja_template(
            conversations=[[{k: v for k, v in message.items() if v is not None} for message in messages]],
            tools=self.tools,
            chat_template=source,
            return_assistant_tokens_mask=True,
            add_generation_prompt=add_generation_prompt,
            **{**self.tokenizer.special_tokens_map, **self.options},
        )
        return texts[0], blocks[0]

    def _quickly(
        self, source: str, messages: Sequence[Message], add_generation_prompt: bool, marked: bool = False
    ) -> _Text:
        """Render a `cached_source`, with the blocks that it marks if asked for."""
        plain = plain_messages(messages)
        if plain is not None and self._given is not None:
            return rendered_plain(source, plain, add_generation_prompt, self._given, marked)
        if marked:
            return self._rendered(source, messages, add_generation_prompt)
        return str(self.apply(messages, add_generation_prompt, tokenize=False, chat_template=source)), None

    def text(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Render to text. A template that demands a user message gets a stand-in, which is cut out of the result."""
        plain, cut = self.text_or_cut(messages, add_generation_prompt)
        return plain if cut is None else cut.text[: cut.start] + cut.text[cut.end :]

    def trial(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Render to text as `text` does, faster (`rendering.cached_template`)."""
        source = self._faster_source if messages else None
        if source is None:
            return self.text(messages, add_generation_prompt)
        try:
            return self._quickly(source, messages, add_generation_prompt)[0]
        except template_errors():
            if any(m.get("role") == "user" for m in messages):
                raise
            return self.text(messages, add_generation_prompt)

    def text_or_cut(self, messages: Sequence[Message], add_generation_prompt: bool) -> tuple[str, Cut | None]:
        """Render to text, or to a text with a stand-in and its place."""
        try:
            return str(self.apply(messages, add_generation_prompt, tokenize=False)), None
        except template_errors() as error:
            if any(m.get("role") == "user" for m in messages):
                raise
            cut = self._with_stand_in(messages, add_generation_prompt)
            if cut is None:
                raise
            if isinstance(cut, str):
                raise ValueError(f"{cut}; put a user message into the list yourself") from error
            return "", cut

    def placeholder_user(self, messages: Sequence[Message]) -> tuple[list[Message], int]:
        """Return the messages with a stand-in user message after the leading system messages, and its index."""
        at = 0
        while at < len(messages) and messages[at].get("role") in ("system", "developer"):
            at += 1
        user = {"role": "user", "content": content_like(messages[0] if messages else {}, unused([]))}
        return [*messages[:at], user, *messages[at:]], at

    def _with_stand_in(self, messages: Sequence[Message], add_generation_prompt: bool) -> Cut | str | None:
        """Render with a stand-in; return None if the template refuses that too, a reason if it is not found again."""
        filled, at = self.placeholder_user(messages)
        other = {"role": "user", "content": content_like(filled[at], "other")}
        try:
            full = str(self.apply(filled, add_generation_prompt, tokenize=False))
            one = str(self.apply(filled[: at + 1], tokenize=False))
        except template_errors():
            return None
        try:
            two = str(self.apply([*filled[:at], other, filled[at]], tokenize=False))
            only = str(self.apply([*filled[:at], other], tokenize=False))
        except template_errors():  # two users in a row are refused: the whole beginning is the stand-in's
            two, only = one, getattr(self.tokenizer, "bos_token", None) or ""
            only = only if at == 0 and one.startswith(only) else one
        piece = two[len(only) :] if two.startswith(only) else ""
        if not piece or full.count(piece) != 1:
            return "the chat template demands a user message, and a stand-in for it cannot be told from its neighbours"
        start = full.index(piece)
        return Cut(full, start, start + len(piece))
