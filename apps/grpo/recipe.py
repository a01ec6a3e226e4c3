"""A recipe: settings, and the tasks that they are meant for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from apps.grpo.config import GrpoConfig
from runplan.model.origin import Origin

if TYPE_CHECKING:  # slow to load, and a command line needs none of it
    from transformers import PreTrainedTokenizerBase

    from apps.common.tasks import Tasks
    from apps.grpo.tasks.prompt_tasks import Conversation


@dataclass(frozen=True)
class Recipe:
    """One file of `apps/grpo/recipes`: its constant RECIPE.

    A command line reads all of them: what needs torch is imported where a function of the recipe is called.
    """

    config: GrpoConfig
    """The defaults that flags override; its `recipe` is the file's name with dashes."""
    make_tasks: Callable[[GrpoConfig, PreTrainedTokenizerBase], Tasks] | None = None
    """Prompts, tools and rewards of a run. Raises ValueError for data or options that it cannot use. A recipe without
    it can be planned (`--plan`) and is refused by name when run."""
    make_model: Callable[[Path, int], Path] | None = None
    """(directory, seed) -> the directory, with a model to start from where there is no --model."""
    demonstrations: Callable[[GrpoConfig, int], list[Conversation]] | None = None
    """(config, step) -> the conversations that step of a warm start imitates; without it there is no warm start."""
    origin: Origin | None = None
    """The launch script that the recipe restates, with its model's sizes; None for a recipe of our own."""
