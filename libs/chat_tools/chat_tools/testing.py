"""A tiny tokenizer and chat templates in the manner of the model families, for tests; needs transformers."""

from __future__ import annotations

from typing import Any

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

QWEN_LIKE = """
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list -%}
{%- if not asked -%}{{ raise_exception('No user message.') }}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('The system message comes first.') }}{%- endif -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' -%}{%- generation -%}{{- m.content + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}{{- m.content + '<|im_end|>' -}}{%- endif -%}
{{- '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

_CORPUS = ("hello there, see you bye hi what is the weather in Paris today? {}".format("the sum of two numbers") * 3,)


def tiny_tokenizer(template: str, marks: bool = True, specials: tuple[str, ...] = MARKERS) -> Any:
    """Train a byte-level BPE tokenizer of some 400 tokens; without `marks`, the template loses its generation marks."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in WORDS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=specials[0],
        eos_token=specials[-1],
        clean_up_tokenization_spaces=False,
        extra_special_tokens=list(specials),
    )
    if not marks:
        template = template.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    tokenizer.chat_template = template
    return tokenizer
