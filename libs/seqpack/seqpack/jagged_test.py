import io
import pickle

import pytest
import torch

from seqpack.jagged import jagged, jagged_from_values, join, pad, ragged, ragged_dim, samples_of, select, unpad


def mrope(*lengths: int) -> list[torch.Tensor]:
    return [torch.arange(3 * n).view(3, n) + 100 * i for i, n in enumerate(lengths)]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("lengths", [(4, 2), (3, 3), (1,), (1, 1), (5,), (0, 2), (0,)])
def test_ragged_dimension_is_the_one_asked_for(lengths: tuple[int, ...]) -> None:
    samples = mrope(*lengths)
    x = jagged(samples)
    assert ragged_dim(x) == 1
    assert x.shape[0] == len(lengths)
    assert x.shape[1] == 3
    assert same(samples_of(x), samples)
    y = jagged([s.T for s in samples], 0)
    assert ragged_dim(y) == 0
    assert same(samples_of(y), [s.T for s in samples])


@pytest.mark.parametrize("lengths", [(4, 2), (3, 3), (1,)])
def test_layout_survives_pickle_save_and_copies(lengths: tuple[int, ...]) -> None:
    x = jagged(mrope(*lengths))
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    copies = [pickle.loads(pickle.dumps(x)), torch.load(file, weights_only=False), x.clone(), x.to("cpu"), x.detach()]
    for copy in copies:
        assert ragged_dim(copy) == 1
        assert same(samples_of(copy), samples_of(x))


def test_wrong_label_of_the_ragged_dimension_is_put_right() -> None:
    # What planners do that relabel torch's private index after torch chose dimension 1 for equal lengths.
    samples = [torch.arange(8).view(4, 2), torch.arange(8).view(4, 2) + 8]
    x = torch.nested.as_nested_tensor(samples, layout=torch.jagged)
    x._ragged_idx = 2
    assert same(samples_of(x), samples)
    travelled = pickle.loads(pickle.dumps(x))
    assert tuple(travelled.shape)[2] != 2, "the label should be wrong by now"
    assert same(samples_of(travelled), samples)
    assert same(samples_of(join([travelled, jagged(samples)])), samples * 2)


def test_bounds_are_explicit_so_that_torch_pads_right_too() -> None:
    # Without them torch pads (B, 3, j) to the width 3.
    for lengths in ((4, 7, 2), (5, 5), (1,)):
        x = jagged(mrope(*lengths))
        assert torch.nested.to_padded_tensor(x, 0).shape == (len(lengths), 3, max(lengths))
        assert torch.equal(torch.nested.to_padded_tensor(x, 0), pad(x))


def test_holes_are_skipped() -> None:
    # A third row keeps torch from taking the result for a gapless one (torch loses the lengths itself otherwise).
    rows = torch.arange(1, 7).view(3, 2)
    x = torch.nested.narrow(rows, 1, torch.tensor([0, 1, 0]), torch.tensor([2, 1, 1]), layout=torch.jagged)
    expected = [torch.tensor([1, 2]), torch.tensor([4]), torch.tensor([5])]
    assert same(samples_of(x), expected)
    assert pad(x, -1).tolist() == [[1, 2], [4, -1], [5, -1]]
    assert same(samples_of(select(x, [2, 1, 0])), expected[::-1])
    assert same(samples_of(join([x, x])), expected * 2)


def test_join_settles_layouts_that_torch_chose_by_equal_lengths() -> None:
    equal = torch.nested.as_nested_tensor(mrope(4), layout=torch.jagged)  # ragged along 0 of a sample
    other = jagged(mrope(5, 6))
    x = join([equal, other])
    assert ragged_dim(x) == 1
    assert same(samples_of(x), mrope(4) + mrope(5, 6))
    both = join([equal, torch.nested.as_nested_tensor(mrope(2, 2), layout=torch.jagged)])
    assert ragged_dim(both) == 1
    assert same(samples_of(both), mrope(4) + mrope(2, 2))


def test_join_of_layouts_that_disagree_without_any_difference_takes_the_last_dimension() -> None:
    equal = torch.nested.as_nested_tensor(mrope(4), layout=torch.jagged)
    assert ragged_dim(join([equal, jagged(mrope(4))])) == 1
    assert ragged_dim(join([jagged(mrope(4)), equal])) == 1


def test_pad_and_unpad_with_gradient() -> None:
    values = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    x = jagged_from_values(values, [1, 3, 2])
    dense = pad(x, 7.0, length=4)
    assert dense.shape == (3, 2, 4)
    assert dense[0, :, 1:].eq(7).all()
    back = unpad(dense, [1, 3, 2])
    assert same(samples_of(back), samples_of(x))
    weights = torch.randn(2, 6, dtype=torch.float64)
    (ragged(back).values * weights).sum().backward()
    assert torch.equal(values.grad, weights)


def test_select_neighbours_is_a_view_and_others_a_copy() -> None:
    x = jagged(mrope(2, 3, 4))
    assert ragged(select(x, [1, 2])).values.data_ptr() == ragged(x).values[:, 2:].data_ptr()
    assert same(samples_of(select(x, [2, 0, 2])), [mrope(2, 3, 4)[i] for i in (2, 0, 2)])
    assert samples_of(select(x, [])) == []
    assert pad(select(x, [])).shape == (0, 3, 0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: jagged([]), "at least one sample"),
        (lambda: jagged([torch.zeros(2), torch.zeros(2, 2)]), "sample 1 has shape"),
        (lambda: jagged([torch.zeros(3, 2), torch.zeros(4, 2)]), "sample 1 has shape"),
        (lambda: jagged([torch.zeros(2), torch.zeros(2).int()]), "sample 1 is torch.int32"),
        (lambda: jagged([torch.zeros(2), [1]]), "sample 1 must be a plain tensor"),
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
def test_bad_input_is_named(call, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
