"""Tools that a model may call, and how calls are run."""
