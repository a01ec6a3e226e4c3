"""The chat templates of real models, as TRL's wheel ships them, each with a tokenizer trained on the spot.

The wheel is only searched for its folder of templates: nothing of trl is imported, so that it needs none of its
dependencies (`pip install --no-deps trl`). Which tokens stop a model stands in the generation_config.json of its
checkpoint, not with the template; it is listed here by family.
"""

from __future__ import annotations

import os
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


class Family(NamedTuple):
    """The parts of a family's checkpoints beside the template.

    `stops` is `generation_config.eos_token_id`, `closings` are the tokens with which the template itself ends an
    answer, `bos` begins a conversation. A family that is not `listed` has what its template's text tells.
    """

    stops: tuple[str, ...]
    closings: tuple[str, ...]
    bos: str = "<s>"
    listed: bool = True


_CHATML = Family(("<|im_end|>", "<|endoftext|>"), ("<|im_end|>",))
_COHERE = Family(("<|END_OF_TURN_TOKEN|>",), ("<|END_OF_TURN_TOKEN|>",), "<BOS_TOKEN>")
_DEEPSEEK = Family(("<｜end▁of▁sentence｜>",), ("<｜end▁of▁sentence｜>",), "<｜begin▁of▁sentence｜>")
_GEMMA = Family(("<eos>", "<end_of_turn>"), ("<end_of_turn>",), "<bos>")
_GEMMA4 = Family(("<eos>", "<turn|>", "<|tool_response>"), ("<turn|>",), "<bos>")
_LLAMA = Family(("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), ("<|eot_id|>",), "<|begin_of_text|>")
_PHI = Family(("<|endoftext|>", "<|assistant|>", "<|end|>"), ("<|end|>",))
_UTTERANCE = Family(("<end_of_utterance>",), ("<end_of_utterance>",))

# By the beginning of the template's name, the longest first.
FAMILIES: dict[str, Family] = {
    "cohere": _COHERE,
    "deepseek": _DEEPSEEK,
    "diffusion_gemma": _GEMMA4,
    "gemma": _GEMMA,
    "gemma4": _GEMMA4,
    "glm4moe": Family(("<|endoftext|>", "<|user|>", "<|observation|>"), ()),
    "gptoss": Family(("<|return|>", "<|endoftext|>", "<|call|>"), ("<|return|>", "<|end|>"), "<|startoftext|>"),
    "idefics3": _UTTERANCE,
    "lfm2": Family(("<|im_end|>",), ("<|im_end|>",), "<|startoftext|>"),
    "llama3": _LLAMA,
    "llava_next": Family(("</s>",), ("</s>",)),
    "muse_glimmer": Family(("<|eot|>",), ("<|eot|>",), "<|begin_of_text|>"),
    "nemotron": Family(("</s>", "<|im_end|>"), ("<|im_end|>",)),
    "phi3": _PHI,
    "qwen": _CHATML,
    "smolvlm": _UTTERANCE,
    # vLLM's examples
    "tool_chat_template_hunyuan_a13b": Family(("<|eos|>",), ("<|eos|>",), "<|startoftext|>"),
    "tool_chat_template_internlm2_tool": Family(("</s>", "<|im_end|>"), ("<|im_end|>",)),
    "tool_chat_template_llama4_pythonic": Family(("<|eot|>", "<|eom|>"), ("<|eot|>",), "<|begin_of_text|>"),
    "tool_chat_template_mistral": Family(("</s>",), ("</s>",)),
    "tool_chat_template_phi4_mini": Family(("<|endoftext|>", "<|end|>"), ("<|end|>",)),
    "tool_chat_template_xlam_llama": Family(("<|eot_id|>", "<|end_of_text|>"), ("<|eot_id|>",), "<|begin_of_text|>"),
}

_SPECIAL = re.compile(
    r"<\|[^<>\s']{1,40}?\|>|<\|[a-z_]+>|<[a-z_]+\|>|<｜[^<>\s]+?｜>|<\|\"\|>|</?think>|</?tool_call>"
    r"|<(?:start_of_turn|end_of_turn|end_of_utterance|image|start_of_image|sop|/s)>|\[gMASK\]"
)
_WORDS = (
    "hello there, what is the weather in Paris today? the sum of two numbers is four\n\nsee the result below.\n"
    "<think>\n\n</think>\n\nassistant\nuser\nsystem\nmodel\n role to=functions. analysis final commentary json\n" * 3
)


def template_folder() -> Path:
    """Return the folder of the templates: $CHAT_TEMPLATES, else trl's; ValueError if it is not installed."""
    if chosen := os.environ.get("CHAT_TEMPLATES"):
        return Path(chosen)
    spec = find_spec("trl")  # finds the package without running any of it
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(place) / "chat_templates").is_dir():
            return Path(place) / "chat_templates"
    raise ValueError("trl's chat templates are not installed: pip install --no-deps trl==1.16.0")


def template_names() -> list[str]:
    """Return the names of the templates, without `.jinja`."""
    return sorted(path.stem for path in template_folder().glob("*.jinja"))


def family_of(name: str) -> Family:
    """Return the family of a template; ValueError for one that is not listed."""
    known = [family for family in FAMILIES if name.startswith(family)]
    if not known:
        raise ValueError(f"no family is listed for the template {name!r}: add it to FAMILIES with its stop tokens")
    return FAMILIES[max(known, key=len)]


# Tokens that end turns in templates whose family is not listed; those that stand in one are taken for its stops.
KNOWN_STOPS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end|>", "<|return|>", "<|call|>",
    "<|end_of_msg|>", "<|end_of_turn|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "<|end_of_text|>",
    "<|assistant_end|>", "<|eos|>", "<｜end▁of▁sentence｜>", "<|endoftext|>", "[e~[", "<seed:eos>", "</s>", "<|EOT|>",
    "<end_of_utterance>", "</longcat_s>", "[EOS]", "<eos>",
)  # fmt: skip


def family_from(source: str) -> Family:
    """Return what is known of a template that nobody has listed: stop tokens that stand in it, else `</s>`."""
    stops = tuple(stop for stop in KNOWN_STOPS if stop in source) or ("</s>",)
    return Family(stops, stops, listed=False)


def read_template(name: str) -> tuple[str, Family]:
    """Return the text and the family of a template: one of the folder's by name, or a file by its path."""
    if name.endswith(".jinja"):
        source = Path(name).read_text(encoding="utf-8")
        return source, family_from(source)
    return (template_folder() / f"{name}.jinja").read_text(encoding="utf-8"), family_of(name)


@cache
def real_tokenizer(name: str) -> Any:
    """Train a byte-level BPE tokenizer on a template's text, with its markers as tokens, and set the template.

    Few of the markers are declared special, as in many checkpoints: gpt-oss's `<|end|>` is an added token that
    `all_special_tokens` does not list. The name may be the path of a `.jinja` file.
    """
    source, family = read_template(name)
    markers = dict.fromkeys([*family.stops, *family.closings, family.bos, *_SPECIAL.findall(source)])
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([_WORDS, _SPECIAL.sub(" ", source)], trainer)
    backend.add_tokens([AddedToken(marker, normalized=False) for marker in markers])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=AddedToken(family.bos, normalized=False),
        eos_token=AddedToken(family.stops[0], normalized=False),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = source
    return tokenizer
