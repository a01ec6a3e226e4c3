"""The tokenizer of a model directory."""

import logging
from functools import lru_cache
from pathlib import Path

import jinja2
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from engines.devices.detect import devices_of


@lru_cache(maxsize=8)
def load_tokenizer(directory: Path, chat: bool = True) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a local Hugging Face directory; with `chat`, check its chat template too.

    Raises:
        ValueError: no such directory, no tokenizer or chat template in it, or one that does not work.
    """
    if not directory.is_dir():
        raise ValueError(f"no model directory {directory}; --model takes a local Hugging Face directory")
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise ValueError(f"{directory} has no tokenizer.json; put the model's tokenizer files beside its weights")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"the tokenizer in {directory} can't be read: {type(error).__name__} {error}") from error
    if chat:
        check_chat_template(tokenizer)
    return tokenizer


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Render one question with the chat template of a tokenizer that was read from a directory.

    Raises:
        ValueError: there is no chat template, or one that does not work.
    """
    directory = tokenizer.name_or_path
    if not tokenizer.chat_template:
        raise ValueError(f"the tokenizer in {directory} has no chat template; add chat_template.jinja to the directory")
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, add_generation_prompt=True)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise ValueError(f"the chat template in {directory} does not work: {error}") from error


def quiet_libraries() -> None:
    """Turn off progress bars for small files, and advice that does not apply here; warnings stay.

    The advice: on tracing, which nobody does here, and on a CPU to install kernels that need a GPU.
    """
    transformers.utils.logging.disable_progress_bar()
    if devices_of("auto").kind != "cuda":
        logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the token that closes an assistant's turn: <|im_end|> where the vocabulary has it, else the end of
    sequence.

    Raises:
        ValueError: the tokenizer has neither.
    """
    token = "<|im_end|>" if "<|im_end|>" in tokenizer.get_vocab() else tokenizer.eos_token
    if not token:
        raise ValueError("the tokenizer names no end-of-sequence token; set eos_token in tokenizer_config.json")
    return token
