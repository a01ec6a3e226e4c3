"""A text as token ids, and the characters of each token.

The tokenizers library finds a token's characters by a table of every byte of the text, which takes nearly as long as
the tokens themselves. Where tokens stand for bytes, one behind another, their lengths say the same: so they are asked
for without places, and their bytes have to be the text's, one for one. A text for which they are not (a normalizer or a
token that takes white space in changed it) is tokenised with places.

Invariant (tests): these are the places that the tokenizer gives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from chat_tools.rendering.template import stock_backend

NO_OFFSETS = "the tokenizer gives no offsets: load the fast one (use_fast=True)"
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_UNKNOWN = "\ufffd"
_NO_TEXT = b"\xff"  # of a token that stands for nothing alone: no text has this byte
# Characters of all lengths in UTF-8, composed and not, and white space that tokenizers may take in or leave out.
_PROBE = "a  b \n\n c\t<|x|> \u00e9e\u0301\u4f60\U0001f600\u0301 0123 I'm \u2581_ \r\n  \ud55c\u200d z "


class Offsets(NamedTuple):
    """The characters `start:end` of each token; both are in order."""

    starts: Sequence[int]
    ends: Sequence[int]

    @classmethod
    def of(cls, pairs: Sequence[Sequence[int]]) -> Offsets:
        """Return the offsets of pairs, as tokenizers give them."""
        return cls([start for start, _ in pairs], [end for _, end in pairs])


def encode(tokenizer: Any, text: str) -> tuple[list[int], Offsets]:
    """Return ids and the characters of each token; ValueError for a tokenizer without offsets."""
    backend = stock_backend(tokenizer)
    if backend is not None:
        known = _KNOWN.get(tokenizer)
        if known is None or known.backend is not backend:
            known = _KNOWN[tokenizer] = _Tokens(backend)
        return known.encode(text)
    try:
        encoded = tokenizer(
            text,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
    except NotImplementedError as error:
        raise ValueError(NO_OFFSETS) from error
    return list(encoded["input_ids"]), Offsets.of(encoded["offset_mapping"])


class _Tokens:
    """A tokenizer's backend, and the bytes of its tokens as far as they were needed."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self._bytes = _Bytes(backend)
        self._characters = _Characters(self._bytes)
        self._usable = True
        ids, offsets = self._encode_with_places(_PROBE)
        self._usable = self._places(ids, _PROBE) in (offsets, None)

    def encode(self, text: str) -> tuple[list[int], Offsets]:
        """Return ids and the characters of each token."""
        if self._usable:
            ids = self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
            if (offsets := self._places(ids, text)) is not None:
                return ids, offsets
        return self._encode_with_places(text)

    def _encode_with_places(self, text: str) -> tuple[list[int], Offsets]:
        encoding = self.backend.encode(text, add_special_tokens=False)
        return encoding.ids, Offsets.of(encoding.offsets)

    def _places(self, ids: list[int], text: str) -> Offsets | None:
        """Return the characters of each token; None where their bytes are not the text's."""
        pieces = list(map(self._bytes.__getitem__, ids))
        if b"".join(pieces) != text.encode("utf-8", "surrogatepass"):
            return None
        if text.isascii():
            ends = list(accumulate(map(len, pieces)))
            return Offsets([0, *ends[:-1]], ends) if ends else Offsets([], [])
        ends = list(accumulate(map(self._characters.__getitem__, ids)))
        starts = [0, *ends[:-1]]
        if not self._characters.inner.isdisjoint(ids):  # a character of several tokens is in each of them
            inner = self._characters.inner
            starts = [start - (token in inner) for start, token in zip(starts, ids, strict=True)]
        return Offsets(starts, ends)


class _Bytes(dict[int, bytes]):
    """The bytes that each token stands for, where it stands alone."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, token: int) -> bytes:
        text = str(self._backend.decode([token], skip_special_tokens=False))
        if _UNKNOWN in text:  # part of a character
            written = str(self._backend.id_to_token(token))
            match, byte_of = _BYTE.fullmatch(written), _byte_of_character()
            value = bytes.fromhex(match[1]) if match else bytes(byte_of.get(c, 0) for c in written)
        else:
            value = text.encode()
        self[token] = value or _NO_TEXT
        return self[token]


class _Characters(dict[int, int]):
    """The characters that begin in each token; `inner` are the tokens that begin within one."""

    def __init__(self, pieces: _Bytes) -> None:
        super().__init__()
        self.inner: set[int] = set()
        self._pieces = pieces

    def __missing__(self, token: int) -> int:
        piece = self._pieces[token]
        self[token] = count = sum(byte & 0xC0 != 0x80 for byte in piece)
        if piece and piece[0] & 0xC0 == 0x80:
            self.inner.add(token)
        return count


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary writes (GPT-2's table)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_KNOWN: WeakKeyDictionary[Any, _Tokens] = WeakKeyDictionary()
