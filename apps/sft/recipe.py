"""A recipe of the sft app: settings, and the launch script that they restate."""

from dataclasses import dataclass

from apps.sft.config import SftConfig
from runplan.model.origin import Origin


@dataclass(frozen=True)
class Recipe:
    """One file of `apps/sft/recipes`: its constant RECIPE."""

    config: SftConfig
    """The defaults that flags override; its `recipe` is the file's name with dashes."""
    synthetic: bool = False
    """Without --model and --data a tiny model is made and a synthetic task is demonstrated to it."""
    origin: Origin | None = None
    """The launch script that the recipe restates, with its model's sizes; None for a recipe of our own."""
