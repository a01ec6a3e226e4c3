from collections.abc import Callable

import pytest
import torch

from seqpack.batches.jagged import jagged, jagged_from_values, join, pad, ragged, unpad
from seqpack.testing.jagged_properties import PROPERTIES, mrope


@pytest.mark.parametrize("law", PROPERTIES)
def test_law(law: str) -> None:
    PROPERTIES[law]("cpu")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: jagged([]), "at least one sample"),
        (lambda: jagged([torch.zeros(2), torch.zeros(2, 2)]), "sample 1 has shape"),
        (lambda: jagged([torch.zeros(3, 2), torch.zeros(4, 2)]), "sample 1 has shape"),
        (lambda: jagged([torch.zeros(2), torch.zeros(2).int()]), "sample 1 is torch.int32"),
        (lambda: jagged([torch.zeros(2), [1]]), "sample 1 must be a plain tensor"),  # type: ignore[list-item]
        (lambda: jagged([torch.zeros(())]), "stack scalars"),
        (lambda: jagged([torch.zeros(2)], 1), "ragged_dim 1 is out of range"),
        (lambda: jagged_from_values(torch.zeros(3), [1, 1]), "lengths add up to 2"),
        (lambda: jagged_from_values(torch.zeros(3), [4, -1]), r"lengths\[1\] must be at least 0"),
        (lambda: ragged(torch.zeros(3)), "expected a NestedTensor"),
        (lambda: join([jagged(mrope(2)), jagged([torch.zeros(2)])]), "different ranks"),
        (lambda: join([jagged([torch.zeros(3, 2)]), jagged([torch.zeros(4, 3)])]), r"differ along dimensions \[0, 1\]"),
        (lambda: pad(jagged(mrope(2)), 0, 1), "shorter than the longest"),
        (lambda: unpad(torch.zeros(2, 3), [1, 4]), r"lengths\[1\] = 4 exceeds"),
        (lambda: unpad(torch.zeros(2, 3), [1]), "1 lengths for 2 rows"),
        (lambda: unpad(torch.zeros(2), [1, 1]), "needs a batch and a ragged"),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
