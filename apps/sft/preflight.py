"""Checks that refuse what will fail, before a process is started."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from apps.common.cli.certificates import accepted_parts, failures, prove_run
from apps.common.cli.refusals import Refusals
from apps.common.data.model_files import config_of_model, longest_sequence, open_model_directory
from apps.common.data.tokenizer import load_tokenizer
from apps.common.run.ranks import ranks_of_node
from apps.sft.config import SftConfig
from apps.sft.data import Conversations
from apps.sft.recipe import Recipe
from apps.sft.registry import spec_of
from engines.loading import LoadedModel
from engines.preflight import refusals as model_refusals
from engines.prove.certificate import Certificate


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
    """A model that was opened, and its tokenizer; None what was refused."""

    opened: LoadedModel | None
    tokenizer: PreTrainedTokenizerBase | None
    certificates: tuple[Certificate, ...]
    accepted: dict[str, str]
    """What runs untested, accepted by name, each with the reason."""


def prepare(config: SftConfig, recipe: Recipe | None, directory: Path, refusals: Refusals) -> Prepared:
    """Open the model and its tokenizer; what refuses the run is added to `refusals`, and None stands in its place."""
    described = config_of_model(directory, None)
    ranks = ranks_of_node(config.nproc_per_node, config.cluster.pools.nodes) * config.cluster.pools.nodes
    proofs = () if described is None else refusals.of(partial(prove_run, config.engine, described, ranks))
    opened = None if proofs is None else refusals.of(partial(open_model_directory, directory, config.engine))
    if opened is not None:
        refusals.lines += failures(proofs or ())  # else opening has told it
    accepted = accepted_parts(spec_of(config, recipe), proofs or (), described, refusals)
    tokenizer = None if described is None else refusals.of(partial(load_tokenizer, directory, chat=False))
    if described is not None:
        refusals.lines += model_refusals(config.engine, described, ranks, opened)
    return Prepared(opened, tokenizer, proofs or (), accepted)
