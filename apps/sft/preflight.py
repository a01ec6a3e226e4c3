"""Checks that refuse what will fail, before a process is started."""

from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from apps.common.data.model_files import longest_sequence
from apps.sft.data import Conversations
from engines.families.registry import family_of


def check_model(
    conversations: Conversations, directory: Path, model: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise ValueError for an unknown family, conversations without positions, or a tokenizer of another model.

    Raises:
        ValueError: with the file or flag to change.
    """
    family_of(model)
    longest, vocab_size = longest_sequence(model), model.get_text_config().vocab_size
    here = int(max(conversations.train.lengths.max(), conversations.held_out.lengths.max()))
    if longest is not None and here > longest:
        raise ValueError(
            f"a row has {here} tokens, {directory} has {longest} positions (max_position_embeddings): lower "
            f"--max-tokens to {longest}"
        )
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise ValueError(
            f"the tokenizer in {directory} has a token {largest}, its model a vocabulary of {vocab_size}: they don't "
            "belong together"
        )
