"""Entries of formats beside those of `parsing.formats`, and the names that servers give to formats."""
