"""What can be known to fail is refused before a process is started or a token sampled."""

from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from apps.common.flags import flag
from apps.common.model_files import longest_sequence
from apps.common.tokens import end_of_turn
from apps.grpo.config import GrpoConfig
from apps.grpo.tasks import Tasks
from engines.capability import refuse_unsupported
from engines.loading import resolve_device
from rollout import Chat


def check_machine(config: GrpoConfig) -> None:
    """Refuse an engine or a device that is not there; ranks and lengths are the plan's (`apps.common.plan`).

    Raises:
        ValueError: with the setting to change.
    """
    refuse_unsupported(config.engine)
    resolve_device(config.engine)


def check_model(
    config: GrpoConfig, directory: Path, model: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Refuse a model that cannot hold an episode, and a tokenizer of another model.

    Raises:
        ValueError: with the file or flag to change.
    """
    longest, vocab_size = longest_sequence(model), model.get_text_config().vocab_size
    if longest is not None and config.max_episode_tokens > longest:
        raise ValueError(
            f"--max-episode-tokens {config.max_episode_tokens} is over the {longest} positions of {directory} "
            "(max_position_embeddings): lower it"
        )
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise ValueError(
            f"the tokenizer in {directory} has a token {largest}, its model a vocabulary of {vocab_size}: "
            "they don't belong together"
        )
    outside = [token for token in config.sampling.stop_token_ids if not 0 <= token < vocab_size]
    if outside:
        name = flag("sampling.stop_token_ids")
        raise ValueError(f"{name} {outside[0]} is no token: {directory} has a vocabulary of {vocab_size}")


def check_prompts(config: GrpoConfig, tasks: Tasks, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse held-out and first prompts that leave no room for an answer.

    Raises:
        ValueError: a prompt is too long, or there is nothing to ask.
    """
    chat = Chat(tokenizer, end_of_turn(tokenizer))
    asked = [*tasks.held_out(), *tasks.train(0, config.prompts)]
    for task in asked:
        session = task.start()
        length = len(chat.open(session.messages, session.tools))
        if length >= config.max_episode_tokens:
            raise ValueError(
                f"a prompt has {length} tokens, which leaves none of --max-episode-tokens "
                f"{config.max_episode_tokens} for the answer: raise it. Its last message: {session.messages[-1]!r:.80}"
            )
