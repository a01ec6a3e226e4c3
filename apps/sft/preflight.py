"""Checks that refuse what will fail, before a process is started."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from apps.common.cli.certificates import CheckedModel, open_checked
from apps.common.cli.refusals import Refusals
from apps.common.data.model_files import longest_sequence, made_for_checks
from apps.common.data.tokenizer import load_tokenizer
from apps.quickstart.model import ensure_tiny_model
from apps.sft.config import SftConfig
from apps.sft.data import Conversations
from apps.sft.recipe import Recipe
from apps.sft.registry import spec_of
from engines.preflight import refusals as model_refusals


def check_model(
    conversations: Conversations, directory: Path, model: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise ValueError for conversations without positions, or a tokenizer of another model.

    Raises:
        SettingsError: with the files or flags to change, all of them.
    """
    refusals = Refusals()
    longest, vocab_size = longest_sequence(model), model.get_text_config().vocab_size
    here = int(max(conversations.train.lengths.max(), conversations.held_out.lengths.max()))
    if longest is not None and here > longest:
        refusals.lines.append(
            f"a row has {here} tokens, {directory} has {longest} positions (max_position_embeddings): lower "
            f"--max-tokens to {longest}"
        )
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        refusals.lines.append(
            f"the tokenizer in {directory} has a token {largest}, its model a vocabulary of {vocab_size}: they don't "
            "belong together"
        )
    refusals.tell()


@dataclass(frozen=True)
class Prepared:
    """A model with its proofs, and its tokenizer; None what was refused."""

    checked: CheckedModel
    tokenizer: PreTrainedTokenizerBase | None


def check_made(config: SftConfig, recipe: Recipe | None, refusals: Refusals) -> None:
    """Add what refuses a run for the model that it would make to what refuses it already."""
    with made_for_checks(lambda directory: ensure_tiny_model(directory, config.seed), refusals.lines) as directory:
        prepare(config, recipe, directory, refusals)


def prepare(
    config: SftConfig, recipe: Recipe | None, directory: Path, refusals: Refusals, whole: bool = True
) -> Prepared:
    """Open the model and its tokenizer; what refuses the run is added to `refusals`, and None stands in its place.

    `whole`: see `open_checked`.
    """
    checked = open_checked(spec_of(config, recipe), directory, config.nproc_per_node, refusals, whole)
    described = checked.model_config
    tokenizer = None if described is None else refusals.of(partial(load_tokenizer, directory, chat=False))
    if described is not None:
        refusals.lines += model_refusals(config.engine, described, checked.ranks, checked.opened)
    return Prepared(checked, tokenizer)
