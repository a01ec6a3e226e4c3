"""Options of a chat template from the command line."""

from collections.abc import Sequence
from typing import Any

from apps.common.named_values import named_values

SET_BY_RENDERING = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize")


def template_options(words: Sequence[str]) -> dict[str, Any]:
    """Parse NAME=VALUE words as options of a chat template; a value that is JSON is read as such (true, 3, "text").

    Raises:
        ValueError: a word has another shape, or a name comes twice.
    """
    options = named_values("--template-options", words, "enable_thinking=false")
    for name in options:
        if name in SET_BY_RENDERING:
            raise ValueError(f"--template-options {name} is what each rendering says for itself: leave it out")
    return options
