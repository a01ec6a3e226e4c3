"""Checkpoints between one, two and four ranks, every way."""

from engines.proofs.checkpoint_matrix_test import assert_moved


def test_a_checkpoint_of_some_ranks_fits_others() -> None:
    assert_moved((1, 2, 4))
