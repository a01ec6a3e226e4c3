"""Muon: orthogonalized updates of the decoder's matrices, beside AdamW for all else."""
