"""Proofs of what the engines claim: model families, Megatron's layouts and checkpoints against plain references."""
