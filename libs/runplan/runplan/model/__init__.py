"""The model of a run, by its sizes, and the recipe that names it."""
