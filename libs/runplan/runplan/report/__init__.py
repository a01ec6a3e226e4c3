"""The plan of a run as data and as text."""
