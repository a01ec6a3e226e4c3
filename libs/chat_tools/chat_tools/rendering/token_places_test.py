"""The characters of tokens are those that the tokenizers library gives, whatever the tokenizer."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from chat_tools.rendering import token_places
from chat_tools.rendering.token_places import encode

WORDS = ["hello there, what  is the sum of na\u00efve \u4f60\u597d \U0001f600 two numbers?\n\n I'm fine\t" * 4]
BYTES = pre_tokenizers.ByteLevel.alphabet()


def byte_level(normalizer: Any = None, processor: Any = None, **added: Any) -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=BYTES, show_progress=False))
    backend.add_tokens([AddedToken("<|x|>", normalized=False, **added)])
    if normalizer is not None:
        backend.normalizer = normalizer
    if processor is not None:
        backend.post_processor = processor
    return backend


def spaces_as_signs(pre_tokenizer: Any, normalizer: Any, decoder: Any) -> Any:
    """A BPE whose spaces are U+2581 and whose other characters are bytes, as those of Gemma and Llama 2."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizer, decoder
    if normalizer is not None:
        backend.normalizer = normalizer
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend.train_from_iterator(WORDS, trainers.BpeTrainer(vocab_size=330, special_tokens=special, show_progress=False))
    backend.add_tokens([AddedToken("<|x|>", normalized=False)])
    return backend


def words() -> Any:
    backend = Tokenizer(models.WordLevel({"hello": 0, "there": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend


GEMMA_WORDS = pre_tokenizers.Split(" ", "merged_with_previous")
GEMMA = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
LLAMA = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
BACKENDS = {
    "bytes": byte_level(),
    "composed": byte_level(normalizers.NFC()),
    "lower": byte_level(normalizers.Lowercase()),
    "trimmed": byte_level(processor=processors.ByteLevel(trim_offsets=True)),
    "a token takes white space in": byte_level(rstrip=True, lstrip=True),
    "gemma": spaces_as_signs(GEMMA_WORDS, normalizers.Replace(" ", "\u2581"), GEMMA),
    "llama": spaces_as_signs(pre_tokenizers.Metaspace(), None, LLAMA),
    "words": words(),
}
TOKENIZERS = {name: PreTrainedTokenizerFast(tokenizer_object=backend) for name, backend in BACKENDS.items()}
signs = st.sampled_from("ab \n\t?<|x>\u00e9\u0301\u4f60\U0001f600\u2581\u0130")
texts = st.text(signs | st.characters(codec="utf-8")) | (
    st.lists(st.sampled_from(["hello", " there", "<|x|>", "  ", "\n\n", "\u597d", "e\u0301", "I'm"])).map("".join)
)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(texts)
@example("")
@example("\U0001f600\U0001f601 <|x|>  a")
@example("e\u0301<|x|>")
def test_as_the_tokenizer_says(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids, offsets = encode(tokenizer, text)
    expected = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
    assert ids == expected.ids
    assert list(zip(*offsets, strict=True)) == expected.offsets


def test_which_are_told_by_their_bytes() -> None:
    """Of the others those are told by the tokenizer that differ in the probe or are no bytes of the text."""
    usable = {name: encode(t, "a") and token_places._KNOWN[t]._usable for name, t in TOKENIZERS.items()}
    assert [name for name, is_usable in usable.items() if not is_usable] == ["trimmed"]
    text = "hello there, <|x|>\n\n I'm\U0001f600"
    told = {name: _told(t, text) for name, t in TOKENIZERS.items()}
    assert [name for name, is_told in told.items() if is_told] == ["bytes", "composed", "gemma"]


def _told(tokenizer: Any, text: str) -> bool:
    known = token_places._KNOWN[tokenizer]
    return known._usable and known._places(encode(tokenizer, text)[0], text) is not None


def test_another_backend_is_looked_at_anew() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    encode(tokenizer, "a")
    tokenizer.add_tokens(["hello"])
    assert encode(tokenizer, "a hello ")[1].ends == [1, 2, 7, 8]
    tokenizer._tokenizer = byte_level(normalizers.Lowercase())
    ids, offsets = encode(tokenizer, "HELLO")
    assert ids == tokenizer("hello")["input_ids"]
    assert offsets.ends[-1] == 5
