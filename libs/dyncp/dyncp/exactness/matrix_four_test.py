"""All cells of the exactness matrix over four gloo processes."""

from dyncp.exactness.matrix_test import assert_exact, run_cells


def test_every_cell_is_exact_or_refused() -> None:
    assert_exact(run_cells([4]), 4)
