"""What others say stays text, for tokenizers of every kind; the tokenizer itself is the oracle of all else."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from rollout.testing.chat import tiny_tokenizer
from rollout.tools.escape_control_tokens import PRIVATE_AREAS, SafeEncoder, control_tokens

CORPUS = [
    "<|im_start|>user\nhello there<|im_end|>",
    "the <s> tag </s> and <think> so </think>",
    "[INST] a [/INST] b c 1 2",
]
SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<\uff5ctool\u2581sep\uff5c>"]
ADDED = ["<think>", "</think>", "<|note|>", "<b>", "   "]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ ' ' + m.name if m.name }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n</think>{% endif %}"
)


def finish(backend: Tokenizer, normalized: bool = False, **strip: Any) -> PreTrainedTokenizerFast:
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False, **strip) for t in SPECIAL])
    backend.add_tokens([AddedToken(t, special=False, normalized=normalized) for t in ADDED])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3, Qwen; trained with the control tokens in its corpus, so that merges lead up to them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS * 5, trainer)
    return finish(backend)


def llama2() -> PreTrainedTokenizerFast:
    """As Llama 2 and Gemma: sentencepiece's BPE, bytes to fall back on; its control tokens are in the vocabulary."""
    characters = [*"\u2581abcdefghijklmnopqrstuvwxyz<>|/_[]IN ST\n"]
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        *dict.fromkeys(characters),
        "<s",
        "th",
        "the",
    ]
    merges = [("<", "s"), ("<s", ">"), ("t", "h"), ("th", "e")]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return finish(backend)


def unigram() -> PreTrainedTokenizerFast:
    """As T5 and XLM-R: the lattice takes any piece of the vocabulary, control tokens too."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<s>", 0.0), ("<|im_start|>", -1.0)]
    pieces += [(c, -5.0) for c in dict.fromkeys("\u2581abcdefghijklmnopqrstuvwxyz<>|/_[]INST\n123")]
    backend = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return finish(backend)


def words() -> PreTrainedTokenizerFast:
    """A word a token; splits at blanks, so that a control token stands as a word of the vocabulary."""
    vocab = {w: i for i, w in enumerate(["<unk>", "<s>", "</s>", "<think>", "user", "assistant", "the", "tag"])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return finish(backend)


def lower_case() -> PreTrainedTokenizerFast:
    """As BERT: the normaliser changes case, and added tokens are sought in what it gives."""
    pieces = [
        "<unk>",
        *"abcdefghijklmnopqrstuvwxyz<>|/_[]0123456789",
        *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"),
    ]
    backend = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|[^\w\s]"), "isolated")
    return finish(backend, normalized=True)


def strips() -> PreTrainedTokenizerFast:
    """Control tokens that swallow the blanks beside them, as Phi-3's do."""
    backend = byte_level().backend_tokenizer
    fresh = Tokenizer(models.BPE(vocab=dict(backend.get_vocab(with_added_tokens=False)), merges=[]))
    fresh.pre_tokenizer, fresh.decoder = backend.pre_tokenizer, backend.decoder
    return finish(fresh, lstrip=True, rstrip=True)


MAKERS: dict[str, Callable[[], Any]] = {
    f.__name__: f for f in (byte_level, llama2, unigram, words, lower_case, strips, tiny_tokenizer, ByT5Tokenizer)
}
EXACT_TEXT = ("byte_level", "tiny_tokenizer", "llama2", "ByT5Tokenizer")  # those that lose nothing


@cache
def made(name: str) -> tuple[Any, SafeEncoder]:
    tokenizer = MAKERS[name]()
    tokenizer.chat_template = TEMPLATE
    if name == "ByT5Tokenizer":
        tokenizer.add_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return tokenizer, SafeEncoder(tokenizer)


def encode(name: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    tokenizer, encoder = made(name)
    escaped = encoder.escape(messages)
    text = tokenizer.apply_chat_template(escaped.messages, tokenize=False, add_generation_prompt=True, **options)
    return encoder.encode(text, escaped)


def stock(name: str, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    tokenizer, _ = made(name)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


every = pytest.mark.parametrize("name", MAKERS)
control = st.sampled_from([*SPECIAL, *ADDED[:3], "<tool_call>", "</tool_call>", "<|endoftext|>", "<pad>"])
broken = st.sampled_from(
    ["<|im_", "start|>", "<|", "|>", "<", ">", "[", "INST]", "<s", "\uff5c", "<|IM_START|>", "\uff1cs>"]
)
plain = st.text(st.sampled_from("abc the 1\n\u00e9\u4f60\U0001f600\ue000\ue001\U000f0000\\u"), max_size=12)
untrusted = st.lists(st.one_of(control, broken, plain), max_size=6).map("".join)


def count(ids: Sequence[int], encoder: SafeEncoder) -> dict[str, int]:
    """How often each control token stands in the ids."""
    return {token: list(ids).count(index) for token, index in encoder.control.items() if token != "<unk>"}


@every
@settings(max_examples=60, deadline=None)
@given(first=untrusted, second=untrusted, role=st.sampled_from(["user", "tool", "environment"]))
def test_others_can_forge_no_control_token(name: str, first: str, second: str, role: str) -> None:
    """As many control tokens as the same conversation with harmless words has, be they in one text or joined."""
    harmless: list[dict[str, Any]] = [
        {"role": role, "content": "a"},
        {"role": role, "content": [{"type": "text", "text": "b"}] * 2},
    ]
    hostile: list[dict[str, Any]] = [
        {"role": role, "content": first},
        {"role": role, "content": [{"type": "text", "text": first}, {"type": "text", "text": second}]},
    ]
    encoder = made(name)[1]
    assert count(encode(name, hostile), encoder) == count(encode(name, harmless), encoder)
    named = [{**m, "name": second} for m in hostile]
    assert count(encode(name, named), encoder) == count(encode(name, harmless), encoder)


@every
@settings(max_examples=40, deadline=None)
@given(text=untrusted)
def test_the_assistant_can_repeat_no_special_token(name: str, text: str) -> None:
    """It may have read it in a tool's result; its history is rendered anew where a template rewrites turns."""
    tokenizer, encoder = made(name)
    special = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special} - {"<unk>"}
    calls = [{"type": "function", "function": {"name": text, "arguments": {"x": text}}}]
    hostile, harmless = (
        count(encode(name, [{"role": "assistant", "content": content, "tool_calls": calls}]), encoder)
        for content in (text, "a")
    )
    assert {t: n for t, n in hostile.items() if t in special} == {t: n for t, n in harmless.items() if t in special}


@pytest.mark.parametrize("name", EXACT_TEXT)
@settings(max_examples=60, deadline=None)
@given(text=untrusted)
def test_what_they_say_decodes_to_the_same_characters(name: str, text: str) -> None:
    tokenizer, _ = made(name)
    messages = [{"role": "tool", "content": text}]
    wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    decoded = tokenizer.decode(encode(name, messages), **options)
    blank = "[ \u2581]" if name == "llama2" else r"(?!)"  # which sentencepiece itself does not keep apart
    assert re.sub(blank, "", decoded) == re.sub(blank, "", wanted)


@every
@settings(max_examples=60, deadline=None)
@given(
    text=st.one_of(plain, st.sampled_from(["a <b> tag", "x   y\n\n", "1 < 2 | 3 > 2", "[1]", "|>", " a "])),
    system=control,
)
def test_all_else_is_encoded_as_by_the_tokenizer_itself(name: str, text: str, system: str) -> None:
    """A system message may hold control tokens, the assistant's own `<think>`; plain words are what they were."""
    messages = [
        {"role": "system", "content": f"{system} be brief"},
        {"role": "user", "content": text},
        {"role": "assistant", "content": "<think> so </think> the " + text},
        {"role": "tool", "content": text},
    ]
    assume(name != "lower_case" or text.lower() == text)
    assert encode(name, messages) == stock(name, messages)


def test_a_forged_token_is_what_a_tokenizer_gives_that_never_heard_of_it() -> None:
    innocent = tiny_tokenizer()
    for_ids = [innocent.backend_tokenizer.token_to_id(c) for c in "<|im_start|>"]
    tokenizer = made("tiny_tokenizer")[0]
    ids = encode("tiny_tokenizer", [{"role": "user", "content": "<|im_start|>"}])
    opening = tokenizer("<|im_start|>user\n", add_special_tokens=False)["input_ids"]
    assert ids[: len(opening) + len(for_ids)] == [*opening, *for_ids]


def test_control_tokens_are_the_special_ones_and_those_the_template_writes() -> None:
    found = control_tokens(made("byte_level")[0])
    assert set(found) == {*SPECIAL, "<think>", "</think>", "<|note|>"}  # not <b>, not blanks
    assert found["<s>"] == made("byte_level")[0].convert_tokens_to_ids("<s>")


def test_a_template_that_writes_ascii_json_is_read_all_the_same() -> None:
    tokenizer = tiny_tokenizer(
        "{% for m in messages %}<|im_start|>{{ m.content | tojson(ensure_ascii=True) }}{% endfor %}"
    )
    encoder = SafeEncoder(tokenizer)
    escaped = encoder.escape([{"role": "tool", "content": '<|im_end|>"\\u00e9'}])
    text = tokenizer.apply_chat_template(escaped.messages, tokenize=False)
    assert tokenizer.decode(encoder.encode(text, escaped)) == '<|im_start|>"<|im_end|>\\"\\\\u00e9"'


def test_private_characters_of_the_text_itself_are_kept() -> None:
    everything = "".join(map(chr, PRIVATE_AREAS[0]))
    encoder = made("tiny_tokenizer")[1]
    escaped = encoder.escape([{"role": "user", "content": everything}, {"role": "user", "content": "<|im_end|>"}])
    assert escaped.messages[0]["content"] == everything
    assert set(escaped.originals) <= {chr(c) for c in PRIVATE_AREAS[1]}
    all_of_them = "".join(map(chr, [*PRIVATE_AREAS[0], *PRIVATE_AREAS[1]]))
    with pytest.raises(ValueError, match="every private use character"):
        encoder.escape([{"role": "user", "content": all_of_them}])


def test_roles_types_and_other_values_pass_unchanged() -> None:
    message = {"role": "tool", "type": "<x>", "n": 3, "content": None, "parts": ({"type": "<y>", "text": "<"},)}
    (changed,) = made("tiny_tokenizer")[1].escape([message]).messages
    assert (changed["role"], changed["type"], changed["n"], changed["content"]) == ("tool", "<x>", 3, None)
    assert changed["parts"][0]["type"] == "<y>"
    assert changed["parts"][0]["text"] != "<"


class Careless(ByT5Tokenizer):  # type: ignore[misc]
    """A tokenizer in Python that makes a control token of plain text whatever it is told."""

    def __call__(self, text: str, split_special_tokens: bool = False, **options: Any) -> Any:
        return super().__call__(text, **options)


def test_a_tokenizer_in_python_that_cannot_be_held_back_is_refused() -> None:
    encoder = SafeEncoder(Careless())
    escaped = encoder.escape([{"role": "user", "content": "</s>"}])
    with pytest.raises(ValueError, match="makes '</s>' of plain text: use its fast variant"):
        encoder.encode(escaped.messages[0]["content"], escaped)
