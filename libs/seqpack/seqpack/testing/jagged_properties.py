"""What the jagged layout must do on any device: each property of `PROPERTIES` is called with a device and asserts."""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor

from seqpack.batches.jagged import jagged, jagged_from_values, join, pad, ragged, ragged_dim, samples_of, select, unpad
from seqpack.private_api import rename_ragged
from seqpack.testing.operation_properties import TRANSFERS, assert_same, pickled


def mrope(*lengths: int, device: str = "cpu") -> list[Tensor]:
    """Return samples of shape (3, n), as multi-axis positions have."""
    return [(torch.arange(3 * n).view(3, n) + 100 * i).to(device) for i, n in enumerate(lengths)]


def ragged_dimension_is_the_given_one(device: str) -> None:
    """Assert it for equal lengths, one sample and empty samples."""
    for lengths in [(4, 2), (3, 3), (1,), (1, 1), (5,), (0, 2), (0,)]:
        samples = mrope(*lengths, device=device)
        x = jagged(samples)
        assert ragged_dim(x) == 1
        assert x.shape[0] == len(lengths)
        assert x.shape[1] == 3
        assert_same(samples_of(x), mrope(*lengths), device)
        y = jagged([s.T for s in samples], 0)
        assert ragged_dim(y) == 0
        assert_same(samples_of(y), [s.T for s in mrope(*lengths)], device)


def layout_is_kept_by_pickle_save_and_copies(device: str) -> None:
    """Assert that the ragged dimension stays, whatever the lengths."""
    for lengths in [(4, 2), (3, 3), (1,)]:
        x = jagged(mrope(*lengths, device=device))
        for copy in [x.detach(), *(travel(x, device) for travel in TRANSFERS.values())]:
            assert ragged_dim(copy) == 1
            assert_same(samples_of(copy), mrope(*lengths), device)


def wrong_label_of_the_ragged_dimension_is_put_right(device: str) -> None:
    """Assert that a private index relabelled to dimension 1, torch's choice for equal lengths, is corrected."""
    samples = [torch.arange(8).view(4, 2), torch.arange(8).view(4, 2) + 8]
    x: Any = torch.nested.as_nested_tensor([s.to(device) for s in samples], layout=torch.jagged)
    rename_ragged(x, 2)
    assert_same(samples_of(x), samples, device)
    transferred = pickled(x)
    assert tuple(transferred.shape)[2] != 2, "the label should be wrong by now"
    assert_same(samples_of(transferred), samples, device)
    assert_same(samples_of(join([transferred, jagged([s.to(device) for s in samples])])), samples * 2, device)


def bounds_are_explicit_so_that_torch_pads_right_too(device: str) -> None:
    """Assert it: without them torch pads (B, 3, j) to the width 3. Off the CPU, only floats are padded by torch."""
    dtypes = (torch.float32, torch.int64) if device == "cpu" else (torch.float32,)
    for lengths, dtype in product(((4, 7, 2), (5, 5), (1,)), dtypes):
        x = jagged([s.to(dtype) for s in mrope(*lengths, device=device)])
        assert torch.nested.to_padded_tensor(x, 0).shape == (len(lengths), 3, max(lengths))
        assert torch.equal(torch.nested.to_padded_tensor(x, 0), pad(x))


def holes_are_skipped(device: str) -> None:
    """Assert it with a third row, without which torch takes the result for a gapless one and loses the lengths."""
    rows = torch.arange(1, 7, device=device).view(3, 2)
    starts, sizes = torch.tensor([0, 1, 0], device=device), torch.tensor([2, 1, 1], device=device)
    x = torch.nested.narrow(rows, 1, starts, sizes, layout=torch.jagged)
    expected = [torch.tensor([1, 2]), torch.tensor([4]), torch.tensor([5])]
    assert_same(samples_of(x), expected, device)
    assert pad(x, -1).tolist() == [[1, 2], [4, -1], [5, -1]]
    assert_same(samples_of(select(x, [2, 1, 0])), expected[::-1], device)
    assert_same(samples_of(join([x, x])), expected * 2, device)


def join_fixes_layouts_that_torch_inferred_from_equal_lengths(device: str) -> None:
    """Assert it for a shard that is ragged along 0 of a sample, and neighbours that are along 1."""
    equal = torch.nested.as_nested_tensor(mrope(4, device=device), layout=torch.jagged)
    other = jagged(mrope(5, 6, device=device))
    x = join([equal, other])
    assert ragged_dim(x) == 1
    assert_same(samples_of(x), mrope(4) + mrope(5, 6), device)
    both = join([equal, torch.nested.as_nested_tensor(mrope(2, 2, device=device), layout=torch.jagged)])
    assert ragged_dim(both) == 1
    assert_same(samples_of(both), mrope(4) + mrope(2, 2), device)


def join_without_any_difference_takes_the_last_dimension(device: str) -> None:
    """Assert it where labels disagree and lengths do not decide."""
    equal = torch.nested.as_nested_tensor(mrope(4, device=device), layout=torch.jagged)
    assert ragged_dim(join([equal, jagged(mrope(4, device=device))])) == 1
    assert ragged_dim(join([jagged(mrope(4, device=device)), equal])) == 1


def join_without_any_difference_keeps_a_common_label(device: str) -> None:
    """Assert it where the values have holes or other sizes beside, so that samples are joined one by one."""
    rows = torch.arange(24, device=device).view(3, 4, 2)
    starts, sizes = torch.tensor([1, 0, 2], device=device), torch.full((3,), 2, device=device)
    holes = torch.nested.narrow(rows, 1, starts, sizes, layout=torch.jagged)  # three samples (2, 2), ragged along 0
    assert ragged_dim(holes) == 0
    for both in (join([holes, holes]), join([holes, jagged([torch.zeros(2, 2, dtype=torch.int64, device=device)], 0)])):
        assert ragged_dim(both) == 0
    assert_same(samples_of(join([holes, holes])), [s.cpu() for s in samples_of(holes)] * 2, device)


def pad_and_unpad_carry_gradients(device: str) -> None:
    """Assert it in float64, against the weights of the sum."""
    values = torch.randn(2, 6, dtype=torch.float64, device=device, requires_grad=True)
    x = jagged_from_values(values, [1, 3, 2])
    dense = pad(x, 7.0, length=4)
    assert dense.shape == (3, 2, 4)
    assert dense[0, :, 1:].eq(7).all()
    back = unpad(dense, [1, 3, 2])
    assert_same(samples_of(back), [s.detach().cpu() for s in samples_of(x)], device)
    weights = torch.randn(2, 6, dtype=torch.float64, device=device)
    (ragged(back).values * weights).sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad, weights)


def neighbours_are_a_view_and_others_a_copy(device: str) -> None:
    """Assert it, and that selecting nothing gives an empty batch that pads to nothing."""
    x = jagged(mrope(2, 3, 4, device=device))
    assert ragged(select(x, [1, 2])).values.data_ptr() == ragged(x).values[:, 2:].data_ptr()
    assert_same(samples_of(select(x, [2, 0, 2])), [mrope(2, 3, 4)[i] for i in (2, 0, 2)], device)
    assert samples_of(select(x, [])) == []
    assert pad(select(x, [])).shape == (0, 3, 0)


PROPERTIES: dict[str, Callable[[str], None]] = {
    check.__name__: check
    for check in (
        ragged_dimension_is_the_given_one,
        layout_is_kept_by_pickle_save_and_copies,
        wrong_label_of_the_ragged_dimension_is_put_right,
        bounds_are_explicit_so_that_torch_pads_right_too,
        holes_are_skipped,
        join_fixes_layouts_that_torch_inferred_from_equal_lengths,
        join_without_any_difference_takes_the_last_dimension,
        join_without_any_difference_keeps_a_common_label,
        pad_and_unpad_carry_gradients,
        neighbours_are_a_view_and_others_a_copy,
    )
}
