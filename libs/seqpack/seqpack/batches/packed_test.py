from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import seqpack.batches.packed
from seqpack.batches.batch import make_batch, view_batch
from seqpack.batches.jagged import jagged, samples_of
from seqpack.batches.packed import pack_each, pack_sequences, unpack_sequences, unpack_tokens
from seqpack.batches.view import BatchView


def batch_of(lengths: list[int]) -> TensorDict:
    torch.manual_seed(len(lengths))
    batch = make_batch(
        [
            {
                "input_ids": torch.randint(1, 99, (n,)),
                "position_ids": torch.randint(1, 99, (4, n)),
                "loss_mask": torch.tensor([False] + [True] * (n - 1)),
                "advantages": torch.randn(n),
                "reward": float(i),
                "group": i // 2,
                "pixel_values": torch.randn(i % 3, 5),
                "text": f"sample {i}",
                "messages": [{"turn": i}] * i,
            }
            for i, n in enumerate(lengths)
        ]
    )
    batch["hidden"] = jagged([torch.randn(n, 2) for n in lengths], 0)
    return batch


def assert_equal_batches(left: TensorDict, right: TensorDict, rows: list[int]) -> None:
    assert set(left.keys()) == set(right.keys())
    assert left.batch_size == (len(rows),)
    for key in right.keys():  # noqa: SIM118
        a, b = left.get(key), right.get(key)
        if not isinstance(b, torch.Tensor):
            assert a.tolist() == [b.tolist()[i] for i in rows]
        elif b.is_nested:
            expected = samples_of(b)
            got = samples_of(a)
            assert len(got) == len(rows)
            assert all(torch.equal(x, expected[i]) for x, i in zip(got, rows, strict=True))
        else:
            assert torch.equal(a, b[rows])


@given(st.data())
def test_unpack_is_the_inverse(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    rows = data.draw(st.one_of(st.none(), st.lists(st.integers(0, len(lengths) - 1), max_size=6)))
    align = data.draw(st.integers(1, 4))
    bucket = data.draw(st.sampled_from([None, align * 5]))
    batch = batch_of(lengths)
    packed = pack_sequences(batch, rows, align, bucket)
    chosen = list(range(len(lengths))) if rows is None else rows
    assert packed.indices == tuple(chosen)
    assert packed.lengths == tuple(lengths[i] for i in chosen)
    assert packed.values["input_ids"].shape == (packed.num_tokens,)
    assert packed.values["position_ids"].shape == (4, packed.num_tokens)
    assert packed.values["hidden"].shape == (packed.num_tokens, 2)
    assert not packed.values["loss_mask"][~packed.token_mask].any()
    assert int(packed.token_mask.sum()) == sum(packed.lengths)
    assert_equal_batches(unpack_sequences(packed), batch, chosen)


def test_example_row() -> None:
    batch = make_batch(
        [
            {"input_ids": [1, 2, 3], "loss_mask": [0 > 1, 1 > 0, 1 > 0]},
            {"input_ids": [4, 5], "loss_mask": [False, True]},
        ]
    )
    packed = pack_sequences(batch, [1, 0], align=2, bucket=8, pad_values={"input_ids": 9})
    assert packed.values["input_ids"].tolist() == [4, 5, 1, 2, 3, 9, 9, 9]
    assert packed.values["loss_mask"].tolist() == [False, True, False, True, True, False, False, False]
    assert packed.cu_seqlens.tolist() == [0, 2, 6, 8]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.positions.tolist() == packed.position_ids.tolist() == [0, 1, 0, 1, 2, 3, 0, 1]
    assert packed.positions.dtype == torch.int64
    assert packed.max_seqlen == 4
    assert packed.num_sequences == 2
    assert packed.token_mask.tolist() == [True] * 5 + [False] * 3


def test_outputs_go_back_with_gradients() -> None:
    packed = pack_sequences(batch_of([3, 1, 2]), align=4)
    logits = torch.randn(12, 7, requires_grad=True)
    back = unpack_tokens(packed, logits, token_dim=0)
    assert [tuple(s.shape) for s in samples_of(back)] == [(3, 7), (1, 7), (2, 7)]
    sum((s.sum() for s in samples_of(back)), torch.zeros(())).backward()
    assert logits.grad is not None
    assert torch.equal(logits.grad[:, 0] == 1, packed.token_mask)
    scored = packed.with_values(log_probs=torch.arange(12.0))
    assert [s.tolist() for s in samples_of(unpack_sequences(scored)["log_probs"])] == [[0, 1, 2], [4], [8, 9]]


def test_empty_row() -> None:
    packed = pack_sequences(batch_of([3, 1]), [])
    assert packed.cu_seqlens.tolist() == [0]
    assert packed.num_tokens == packed.max_seqlen == 0
    assert unpack_sequences(packed).batch_size == (0,)
    dummy = pack_sequences(batch_of([3, 1]), [], bucket=[4])
    assert dummy.cu_seqlens.tolist() == [0, 4]
    assert dummy.values["input_ids"].tolist() == [0] * 4
    assert not dummy.token_mask.any()


def test_packing_each_is_packing_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, rows = batch_of([3, 1, 4, 2]), [[2, 0], [], [1, 3, 1]]
    expected = [pack_sequences(batch, indices, align=2, pad_values={"input_ids": 7}) for indices in rows]
    checks = []

    def counted(given: TensorDict) -> BatchView:
        checks.append(given)
        return view_batch(given)

    monkeypatch.setattr(seqpack.batches.packed, "view_batch", counted)
    packed = list(pack_each(batch, rows, align=2, pad_values={"input_ids": 7}))
    assert len(checks) == 1
    for one, other in zip(packed, expected, strict=True):
        assert (one.lengths, one.indices, one.geometry) == (other.lengths, other.indices, other.geometry)
        assert (one.token_dims, one.media_lengths, one.extras) == (other.token_dims, other.media_lengths, other.extras)
        assert one.values.keys() == other.values.keys()
        assert all(torch.equal(one.values[key], other.values[key]) for key in one.values)
        assert torch.equal(one.cu_seqlens, other.cu_seqlens)
    batch["loss_mask"] = jagged([torch.ones(n, dtype=torch.bool) for n in (3, 1, 4, 2)])
    for call in (lambda: pack_each(batch, rows), lambda: pack_sequences(batch, [0])):
        with pytest.raises(ValueError, match="loss_mask of sample 0 trains the first token"):
            call()  # at once, not when the first row is taken


def test_position_ids_are_those_of_the_batch_where_it_has_them() -> None:
    packed = pack_sequences(batch_of([3, 1]))
    assert packed.position_ids is packed.values["position_ids"]
    assert packed.positions.tolist() == [0, 1, 2, 0]
    plain = pack_sequences(batch_of([3, 1]), keys=["input_ids"])
    assert plain.position_ids is plain.positions
    moved = packed.with_values(position_ids=packed.positions + 7)
    assert moved.position_ids.tolist() == [7, 8, 9, 7]
    assert moved.to("cpu").positions.tolist() == [0, 1, 2, 0]


def test_metadata_of_the_batch_goes_with_the_row_and_comes_back() -> None:
    batch = batch_of([3, 1])
    batch.set_non_tensor("temperature", 0.7)
    packed = pack_sequences(batch, [1])
    assert packed.metadata == {"temperature": 0.7}
    assert "temperature" not in packed.extras
    assert unpack_sequences(packed)["temperature"] == 0.7


def test_keys_and_device() -> None:
    packed = pack_sequences(batch_of([3, 1]), keys=["input_ids", "reward"]).to("cpu")
    assert set(packed.values) == {"input_ids", "reward"}
    assert packed.extras == {}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda b: pack_sequences(b, [2]), r"indices\[0\] = 2 is out of range for 2 samples"),
        (lambda b: pack_sequences(b, [-1]), r"indices\[0\] must be at least 0"),
        (lambda b: pack_sequences(b, keys=["nothing"]), r"does not have: \['nothing'\]"),
        (lambda b: pack_sequences(b, pad_values={"nothing": 1}), r"does not have: \['nothing'\]"),
        (lambda b: pack_sequences(b).with_values(x=torch.zeros(3)), "x has shape"),
        (lambda b: unpack_tokens(pack_sequences(b), torch.zeros(3)), "must hold the 4 tokens"),
    ],
)
def test_bad_input_is_named(call: Callable[[TensorDict], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(batch_of([3, 1]))


def test_nested_dicts_are_refused_by_name() -> None:
    batch = batch_of([3, 1])
    batch["media"] = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
    with pytest.raises(ValueError, match="media is a nested TensorDict"):
        pack_sequences(batch)
