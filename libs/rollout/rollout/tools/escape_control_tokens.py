"""Escaping of text from tools, users and environments: it can't become a control token, whatever it says.

A chat template writes control tokens (`<|im_start|>`, `<think>`) as characters, and a tokenizer reads them back from
the rendered text, whoever wrote them there. Here the two are told apart by their spelling:

1. In the messages of others, the characters that a control token begins or ends with, and bars, are replaced one by
   one by characters of a private use area that occur nowhere else (`escape`). The template renders that. Two pieces
   that only the template joins can't form a control token either. In the assistant's messages, which may repeat a
   tool's result, only special tokens are escaped: templates look for `<think>` in them.
2. Every control token that the rendered text still shows was written by the template. Each gets a secret name, and the
   escaping is reverted in the rest (`encode`).
3. The text is encoded by a copy of the tokenizer which knows the control tokens by their secret names alone, with the
   same ids, in its added tokens and in its vocabulary.

Invariants: text without control tokens gets the ids that the tokenizer itself gives, in its place; an untrusted
`<|im_start|>` gets those of a tokenizer that has never heard of it, and decodes to the same characters. (transformers
5.23 has `sanitize_control_tokens` to the same end; it encodes piece by piece and sees whole tokens within one string
only.)
"""

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from rollout.extras import missing_extra_message

try:
    from tokenizers import Tokenizer as Backend
except ImportError as error:
    raise ImportError(missing_extra_message("chats need tokenizers", "native")) from error

Message = Mapping[str, Any]
TRUSTED_ROLES = ("system", "developer")
PRIVATE_AREAS = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
_BARS = "|\uff5c"
_PIPED = re.compile(r"<[|\uff5c].*[|\uff5c]>|<[|\uff5c].*>|<.*[|\uff5c]>", re.DOTALL)


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Added tokens by id."""
        ...

    def __call__(self, text: str, **kwargs: Any) -> Any:
        """Tokenise text into ids."""
        ...


class EscapedMessages(NamedTuple):
    """Messages for a template to render, with their control tokens escaped, and what reverts the escaping."""

    messages: list[Message]
    originals: dict[str, str]


def control_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the tokens that steer a conversation, by content.

    They are the tokens declared special, and the added ones that the chat template writes or that have the shape
    `<|...|>`; an added token of blanks or an HTML tag is text like any other.
    """
    template = getattr(tokenizer, "chat_template", None)
    written = "\0".join(map(str, template.values())) if isinstance(template, dict) else str(template or "")
    declared = set(getattr(tokenizer, "all_special_tokens", ()))
    tokens = {}
    for index, token in tokenizer.added_tokens_decoder.items():
        content = str(token.content)
        steers = token.special or content in declared or content in written or _PIPED.fullmatch(content)
        if steers and not content.isspace():
            tokens[content] = int(index)
    return tokens


class SafeEncoder:
    """Encoder of rendered conversations in which the words of others are data.

    Exact for tokenizers of the `tokenizers` library; others (written in Python) encode piece by piece, as they work
    themselves.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.control = control_tokens(tokenizer)
        self._written = _any_of(self.control)
        special = {str(t.content) for t in tokenizer.added_tokens_decoder.values() if t.special}
        self._special = _any_of(special & self.control.keys())
        edges = {c for token in self.control for c in (token.strip()[0], token.strip()[-1])}
        edges |= {bar for bar in _BARS if any(bar in token for token in self.control)}
        self._marks = "".join(sorted(edges - set('"\\')))  # JSON escapes those two, and must still see them
        self._tokenizer = tokenizer
        self._names = _secret_names(self.control)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._backend = _renamed(backend, self._names) if isinstance(backend, Backend) else None

    def escape(self, messages: Sequence[Message], tools: Any = None) -> EscapedMessages:
        """Return the messages with those of others (texts, names and ids) escaped; `tools` are read only.

        Others are all roles but those in `TRUSTED_ROLES`; the assistant's messages keep what templates look for.
        """
        places = self._free_places(repr((messages, tools)))
        table = str.maketrans(self._marks, places)

        def all_of(text: str) -> str:
            return text.translate(table)

        def special_tokens(text: str) -> str:
            return self._special.sub(lambda match: all_of(match[0]), text)

        changed = [
            m if m.get("role") in TRUSTED_ROLES
            else _changed(m, special_tokens if m.get("role") == "assistant" else all_of)
            for m in messages
        ]  # fmt: skip
        return EscapedMessages(changed, dict(zip(places, self._marks, strict=True)))

    def encode(self, text: str, escaped: EscapedMessages) -> list[int]:
        """Return the ids of a rendered text (or a part of one) whose untrusted messages were escaped."""
        originals = str.maketrans(escaped.originals)
        if any(f"\\u{ord(place):04x}" in text for place in escaped.originals):  # a template that writes ASCII JSON
            for place, original in escaped.originals.items():
                text = text.replace(f"\\u{ord(place):04x}", json.dumps(original)[1:-1])
        if self._backend is None:
            return self._encode_pieces(text, originals)
        named = self._written.sub(lambda match: self._names[match[0]], text).translate(originals)
        return list(self._backend.encode(named, add_special_tokens=False).ids)

    def _free_places(self, given: str) -> str:
        """Return a private use character for each mark, none of which is in `given` (where repr escapes them)."""
        count = len(self._marks)
        for area in PRIVATE_AREAS:
            for start in range(area.start, area.stop - count, max(count, 1)):
                places = "".join(map(chr, range(start, start + count)))
                if not any(f"{ord(place):04x}" in given for place in places):
                    return places
        raise ValueError("the messages use every private use character: leave some out")

    def _encode_pieces(self, text: str, originals: dict[int, str]) -> list[int]:
        """Encode for a tokenizer written in Python: control tokens by id, each text between them by itself."""
        ids: list[int] = []
        at, strip = 0, False
        for match in (*self._written.finditer(text), None):
            piece = text[at : match.start() if match else len(text)].translate(originals)
            piece = piece.lstrip() if strip else piece
            token = self._tokenizer.added_tokens_decoder[self.control[match[0]]] if match else None
            piece = piece.rstrip() if token and token.lstrip else piece
            if piece:
                ids += self._encode_plain(piece)
            if match:
                ids.append(self.control[match[0]])
                at, strip = match.end(), bool(token and token.rstrip)
        return ids

    def _encode_plain(self, piece: str) -> list[int]:
        forged = set(self._written.findall(piece))
        ids = list(self._tokenizer(piece, add_special_tokens=False, split_special_tokens=bool(forged))["input_ids"])
        for token in forged:
            if self.control[token] in ids:
                raise ValueError(f"this tokenizer makes {token!r} of plain text: use its fast variant")
        return ids


def _secret_names(control: Mapping[str, int]) -> dict[str, str]:
    """Return a secret name for each token: random lower-case letters, which no normaliser changes."""
    secret = "".join(secrets.choice("bcdfghjklmnpqrstvwxz") for _ in range(32))
    return {token: f"{secret}{''.join(chr(97 + int(d)) for d in f'{i:06d}')}" for i, token in enumerate(control)}


def _renamed(backend: Backend, names: Mapping[str, str]) -> Backend:
    """Return a copy of the tokenizer in which these tokens have other names and the same ids."""
    whole: dict[str, Any] = json.loads(backend.to_str())
    whole |= {"truncation": None, "padding": None, "post_processor": None}  # none of them changes the ids of a text
    for token in whole["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = whole["model"]
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {names.get(token, token): index for token, index in model["vocab"].items()}
    elif "vocab" in model:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        pairs = [(merge, merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"]]
        model["merges"] = [m for m, (a, b) in pairs if not {a, b, a + b} & names.keys()]
    return Backend.from_str(json.dumps(whole))


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of the tokens at a place."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def _changed(message: Message, change: Callable[[str], str]) -> Message:
    """Change every string in a message but its role and the types of its parts."""

    def walk(value: Any, key: str | None) -> Any:
        if isinstance(value, str):
            return value if key in ("role", "type") else change(value)
        if isinstance(value, Mapping):
            return {k: walk(v, k) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [walk(v, key) for v in value]
        return value

    return {k: walk(v, k) for k, v in message.items()}
