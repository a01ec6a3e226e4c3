"""One file a recipe: its settings. See `apps.sft.recipe.Recipe`."""
