"""Tools a model may call, and how a call is run."""
