"""One file a recipe: its tasks, its reward and its settings. See `apps.grpo.recipe.Recipe`."""
