"""Proofs at the start of a run: packed layers against stock transformers, one sequence at a time; see `proof`."""
