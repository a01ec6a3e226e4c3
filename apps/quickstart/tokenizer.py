"""A byte-level tokenizer in which the markers of Qwen3.5's chat format and the tasks' fixed words are one token each.

Every text can be encoded: what is no marker becomes bytes, so digits are single tokens too.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
MARKERS = (
    "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>",
    "<tool_response>", "</tool_response>", "<tools>", "</tools>", "<think>", "</think>",
)  # fmt: skip
WORDS = ("system", "user", "assistant", "calculator", "expression", "\\boxed{")
CODE_WORDS = ("```python\n", "def f(x):\n    return x", "```", "assert f(", ") == ", "f(", ") is ", ", not ")


def chat_template() -> str:
    """Return the Jinja text of the project's chat template."""
    return (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


def build_tokenizer(words: Sequence[str] = WORDS) -> PreTrainedTokenizerFast:
    """Return a tokenizer of 256 bytes, three special tokens, and markers and words as tokens that stay visible."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (PAD, TURN_START, TURN_END)])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in (*MARKERS, *words)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=TURN_END, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = chat_template()
    return tokenizer
