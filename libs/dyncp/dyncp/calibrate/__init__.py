"""A machine's cost model, measured."""
