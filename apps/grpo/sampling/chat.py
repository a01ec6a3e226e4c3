"""Chat format of a run's model."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from apps.common.data.images import image_processor_of
from apps.common.data.template_options import template_options
from apps.common.data.tokenizer import end_of_turn
from apps.common.tool_formats import format_of
from apps.grpo.config import GrpoConfig
from apps.sft.reading.samples import stop_tokens_of
from chat_tools import Format, detect_format
from rollout import Chat


def chat_of(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase, model: Path | None = None) -> Chat:
    """Return the chat format of a run: the tokenizer's own template with the options of the configuration.

    `model`: the directory whose generation_config.json says at which tokens the model stops.
    """
    stops = None if model is None else stop_tokens_of(model, tokenizer)
    end = end_of_turn(tokenizer) if stops is None else None
    options = template_options(config.plugins.template_options)
    form = tool_format_of(config, tokenizer) or "qwen3_xml"  # some format, of calls that nobody makes (`check_prompts`)
    return Chat(
        tokenizer, end, form, stop_tokens=stops, image_processor=image_processor_of(config.engine, model), **options
    )


def tool_format_of(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> str | Format | None:
    """Return how the model writes tool calls: as the configuration says, or its chat template shows; None: neither
    does."""
    if config.plugins.tool_format is not None:
        return format_of(config.plugins.tool_format, config.plugins.tool_format_options)
    try:
        return detect_format(tokenizer)
    except ValueError:
        return None
