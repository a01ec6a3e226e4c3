"""A tiny tokenizer for tests, with any chat template; needs transformers."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from chat_tools.testing.templates import TEMPLATES

WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|image_pad|>", "<|video_pad|>")
_CORPUS = ("hello there, see you, bye hi what is the weather in Paris today? the sum of two numbers\n\n" * 3,)
_MARKS = re.compile(r"\{%-? *(?:end)?generation *-?%\}")


@cache
def _model() -> Any:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(_CORPUS, trainer)
    return backend.to_str()


def tiny_tokenizer(name: str, marks: bool = True, template: str | None = None, declared: bool = True) -> Any:
    """Return a byte-level BPE tokenizer of some 400 tokens with a family's special tokens and chat template.

    Without `marks`, the template loses its generation marks; `template` is a Jinja text in place of the family's.
    Unless `declared`, the markers are added tokens that the tokenizer does not list as special, as gpt-oss's `<|end|>`.
    """
    source, specials = TEMPLATES[name]
    backend = Tokenizer.from_str(_model())
    backend.add_special_tokens([AddedToken(t, special=declared, normalized=False) for t in specials])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in WORDS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=specials[0],
        bos_token=specials[0],
        eos_token=specials[-1],
        extra_special_tokens=list(specials) if declared else None,
        clean_up_tokenization_spaces=False,
    )
    source = source if template is None else template
    tokenizer.chat_template = source if marks else _MARKS.sub("", source)
    return tokenizer
