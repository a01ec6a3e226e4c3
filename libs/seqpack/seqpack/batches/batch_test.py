import pickle

import pytest
import torch
from tensordict import TensorDict

from seqpack.batches.batch import check_batch, lengths, make_batch, view_batch
from seqpack.batches.dicts import check_version
from seqpack.batches.jagged import jagged, samples_of
from seqpack.batches.packed import pack_sequences, unpack_tokens


def sample(n: int, **more: object) -> dict[str, object]:
    return {"input_ids": list(range(n)), "loss_mask": [False] + [True] * (n - 1), "reward": 0.5, **more}


def test_schema_types_and_layout() -> None:
    batch = make_batch(
        [
            sample(
                n,
                group=n,
                name=f"s{n}",
                messages=[{"role": "user"}] * n,
                position_ids=torch.ones(3, n, dtype=torch.int64),
            )
            for n in (3, 3, 1)
        ]
    )
    assert batch.batch_size == (3,)
    assert lengths(batch) == [3, 3, 1]
    assert batch["input_ids"].dtype == torch.int64
    assert batch["loss_mask"].dtype == torch.bool
    assert batch["reward"].dtype == torch.float32
    assert batch["group"].tolist() == [3, 3, 1]
    assert list(batch["name"]) == ["s3", "s3", "s1"]
    assert [len(m) for m in batch["messages"]] == [3, 3, 1]
    assert samples_of(batch["position_ids"])[2].shape == (3, 1)
    check_batch(pickle.loads(pickle.dumps(batch.consolidate())))


@pytest.mark.parametrize("lengths", [[4, 4], [3, 3, 3], [4], [1], [1, 1], [2, 5]])
def test_what_torch_labelled_by_equal_lengths_is_laid_out_by_the_tokens(lengths: list[int]) -> None:
    samples = [
        {
            "input_ids": torch.arange(n) + 10 * i,
            "position_ids": torch.arange(3 * n).view(3, n) + 10 * i,
            "advantages": torch.rand(n),
            "hidden": torch.rand(n, 2),
            "features": torch.rand(2, 3, n),
        }
        for i, n in enumerate(lengths)
    ]
    dims = {"position_ids": 1, "advantages": 0, "hidden": 0, "features": 2}
    built = {k: torch.nested.as_nested_tensor([s[k] for s in samples], layout=torch.jagged) for k in samples[0]}
    for batch in (TensorDict(built, [len(lengths)]), built):
        view = view_batch(batch)
        packed = pack_sequences(batch)
        for key, dim in dims.items():
            assert (view.parts(key).dim, view.parts(key).lengths) == (dims[key], lengths)
            assert torch.equal(view.flat(key), torch.cat([s[key] for s in samples], dim))
            assert torch.equal(packed.values[key], view.flat(key))
        back = samples_of(unpack_tokens(packed, packed.values["position_ids"]))
        assert all(torch.equal(a, s["position_ids"]) for a, s in zip(back, samples, strict=True))


def test_a_batch_needs_no_tensordict() -> None:
    samples = [sample(3, text="a"), sample(2, text="b")]
    batch = make_batch(samples)
    for other in (samples, {"text": ["a", "b"], **{k: batch[k] for k in ("input_ids", "loss_mask", "reward")}}):
        assert lengths(other) == [3, 2]
        left, right = pack_sequences(other, [1, 0]), pack_sequences(batch, [1, 0])
        assert left.extras == right.extras == {"text": ["b", "a"]}
        assert left.values.keys() == right.values.keys()
        assert all(torch.equal(left.values[key], right.values[key]) for key in left.values)


def test_media_have_lengths_of_their_own() -> None:
    batch = make_batch([sample(3, pixel_values=torch.zeros(n, 5)) for n in (2, 0, 4)])
    assert [tuple(s.shape) for s in samples_of(batch["pixel_values"])] == [(2, 5), (0, 5), (4, 5)]


def changed(**values: object) -> TensorDict:
    batch = make_batch([sample(3), sample(2)])
    return TensorDict({**dict(batch.items()), **values}, batch_size=[2])


def test_first_token_is_never_trained() -> None:
    with pytest.raises(ValueError, match="loss_mask of sample 1 trains the first token"):
        check_batch(changed(loss_mask=jagged([torch.tensor([False, True, True]), torch.tensor([True, True])])))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"loss_mask": jagged([torch.zeros(3).bool(), torch.zeros(3).bool()])},
            "sample 1 has 3 values of loss_mask for 2",
        ),
        (
            {"advantages": jagged([torch.zeros(3).long(), torch.zeros(2).long()])},
            "advantages must be a tensor of torch.float32",
        ),
        ({"advantages": torch.zeros(2, 3)}, "advantages must be jagged"),
        ({"reward": torch.zeros(2, 3)}, r"reward must have shape \(2,\)"),
        ({"input_ids": jagged([torch.zeros(0).long(), torch.zeros(2).long()])}, "sample 0 of input_ids is empty"),
        ({"input_ids": torch.zeros(2, 3).long()}, "input_ids is not jagged"),
        ({"position_ids": jagged([torch.zeros(2, 3).long(), torch.zeros(2, 2).long()])}, "position_ids must be"),
        ({"pixel_values": jagged([torch.zeros(3, 2), torch.zeros(3, 4)])}, "pixel_values is ragged along dimension 1"),
        ({"position_ids": jagged([torch.zeros(3, 3).long(), torch.zeros(2, 3).long()], 0)}, "ragged along dimension 0"),
        ({"advantages": jagged([torch.zeros(1, 3), torch.zeros(1, 2)])}, r"advantages must be \(B, j\)"),
        ({"hidden": jagged([torch.zeros(3, 4), torch.zeros(1, 4)], 0)}, "sample 1 has 1 values of hidden for 2"),
    ],
)
def test_check_batch_names_the_key(values: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_batch(changed(**values))


def test_check_batch_takes_what_is_no_batch() -> None:
    for nothing in ("text", 3, [1, 2], torch.zeros(2, 3)):
        with pytest.raises(ValueError, match="a batch is a TensorDict, a view of one, a dict of columns or a sequence"):
            check_batch(nothing)
    with pytest.raises(ValueError, match="no key 'input_ids'"):
        check_batch({})
    ids = jagged([torch.zeros(3).long(), torch.zeros(2).long()])
    with pytest.raises(ValueError, match="text has 3 values for 2 samples"):
        check_batch({"input_ids": ids, "text": ["a", "b", "c"]})
    with pytest.raises(ValueError, match=r"note has shape \(3, 1\), its first dimension must be the 2 samples"):
        check_batch({"input_ids": ids, "note": torch.zeros(3, 1)})
    with pytest.raises(ValueError, match=r"batch_size \[B\]"):
        check_batch(TensorDict({}, batch_size=[]))
    with pytest.raises(ValueError, match="no key 'input_ids'"):
        check_batch(TensorDict({}, batch_size=[2]))


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([], "at least one sample"),
        ([sample(2), {"input_ids": [1]}], r"sample 1 and sample 0 disagree on the keys \['loss_mask', 'reward'\]"),
        ([{"loss_mask": [False]}], "need the key 'input_ids'"),
        ([sample(2, input_ids=[1.5, 2.0])], "input_ids of sample 0 is torch.float32"),
        ([sample(2, input_ids="ab")], "input_ids of sample 0 is not a tensor"),
        ([sample(2, extra=torch.zeros(5))], "sample 0 has 5 values of extra for 2"),
        ([sample(2, extra=torch.zeros(2)), sample(2, extra="x")], "extra is a tensor in some samples"),
        ([sample(2, extra=torch.zeros(2)), sample(2, extra=torch.zeros(()))], "extra: sample 1 has shape"),
    ],
)
def test_make_batch_names_sample_and_key(samples: list[dict[str, object]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_batch(samples)


@pytest.mark.parametrize("version", ["0.10.0", "0.14.3", "0.9", "0.14.0a1"])
def test_old_tensordict_is_refused_with_the_reason(version: str) -> None:
    with pytest.raises(ImportError, match=r"loses data: it resets the ragged dimension"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.15.0", "0.15.3", "0.16", "1.0.0"])
def test_new_tensordict_is_taken(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("lengths", [[4, 2, 7], [3, 3], [2], [2, 2, 2]])
def test_routed_experts_lie_along_the_tokens(lengths: list[int]) -> None:
    """Also where a sample has as many tokens as layers, or as experts a token, or all lengths are equal."""
    chosen = [torch.randint(-1, 9, (n, 2, 3), dtype=torch.int16) for n in lengths]
    batch = make_batch([sample(n, routed_experts=c) for n, c in zip(lengths, chosen, strict=True)])
    backwards = list(range(len(lengths)))[::-1]
    packed = pack_sequences(pickle.loads(pickle.dumps(batch)), backwards, align=4)
    assert packed.values["routed_experts"].shape == (packed.num_tokens, 2, 3)
    back = samples_of(unpack_tokens(packed, packed.values["routed_experts"], packed.token_dims["routed_experts"]))
    assert all(torch.equal(found, chosen[i]) for i, found in zip(backwards, back, strict=True))


def test_routed_experts_under_another_label_are_laid_out_by_the_tokens() -> None:
    """Where rows have as many tokens as layers, the dimension that is labelled ragged says nothing."""
    chosen = [torch.randint(-1, 9, (2, 2, 3), dtype=torch.int16) for _ in "ab"]
    batch = changed(input_ids=jagged([torch.arange(2)] * 2), loss_mask=jagged([torch.tensor([False, True])] * 2))
    batch["routed_experts"] = jagged(chosen, 1)
    view = view_batch(batch)
    assert view.parts("routed_experts").dim == 0
    assert torch.equal(view.flat("routed_experts"), torch.cat(chosen))


def test_routed_experts_of_another_shape_are_refused() -> None:
    good = torch.zeros(3, 2, 2, dtype=torch.int16)
    for wrong in (good.int(), good[:2], good[:, 0], good.transpose(0, 1).repeat(1, 2, 1)):
        with pytest.raises(ValueError, match="routed_experts"):
            make_batch([sample(3, routed_experts=wrong)])
