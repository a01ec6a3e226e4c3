"""Jagged columns of a batch compose, however the batch came about: one offsets object in all of the same lengths."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from seqpack.batches.batch import make_batch, view_batch
from seqpack.batches.dicts import share_offsets
from seqpack.batches.jagged import is_jagged, jagged, jagged_from_values, jagged_like, samples_of
from seqpack.batches.operations import chunk, concat, from_padded, index_select, split, to_padded
from seqpack.batches.packed import pack_sequences, unpack_sequences, unpack_tokens

ROWS: list[list[int]] = [[3, 1, 4], [2, 2], [5], [1, 1, 1]]


def batch_of(lengths: list[int]) -> TensorDict:
    """A batch of every kind of column; the nested part was built apart, as TensorDicts of a caller are."""
    batch = make_batch(
        [
            {
                "input_ids": torch.arange(n) + 10 * i,
                "loss_mask": torch.arange(n) > 0,
                "log_probs": torch.full((n,), -1.0 - i),
                "old_log_probs": torch.full((n,), -1.5),
                "position_ids": torch.arange(n).expand(3, n).contiguous(),
                "routed_experts": torch.zeros(n, 2, 2, dtype=torch.int16),
                "pixel_values": torch.ones(2 + i, 4),
                "reward": 0.5,
                "name": f"row {i}",
            }
            for i, n in enumerate(lengths)
        ]
    )
    batch["nested"] = TensorDict({"x": jagged([torch.ones(n) for n in lengths])}, [len(lengths)])
    return share_offsets(batch)


def through_a_file(batch: TensorDict) -> TensorDict:
    file = io.BytesIO()
    torch.save(batch, file)
    file.seek(0)
    loaded: TensorDict = torch.load(file, weights_only=False)
    return loaded


OURS: dict[str, Callable[[TensorDict], TensorDict]] = {
    "made": lambda x: x,
    "index_select": lambda x: index_select(x, [0, 0, len(x) - 1]),
    "chunk": lambda x: chunk(x, 2)[0],
    "split": lambda x: split(x, 1)[-1],
    "concat": lambda x: concat([x, chunk(x, 2)[0]]),
    "padded and back": lambda x: from_padded(to_padded(x), x),
    "view": lambda x: view_batch(x.exclude("nested")).to_batch(),
    "selected view": lambda x: view_batch(x.exclude("nested")).select([len(x) - 1, 0]).to_batch(),
    "packed and back": lambda x: unpack_sequences(pack_sequences(x.exclude("nested"), align=4, bucket=64)),
    "consolidated": lambda x: share_offsets(x.consolidate()),
    "consolidated and sent": lambda x: share_offsets(pickle.loads(pickle.dumps(x.consolidate()))),
    "made by torch": lambda x: share_offsets(
        x.clone().update({"log_probs": torch.nested.as_nested_tensor(samples_of(x["log_probs"]), layout=torch.jagged)})
    ),
}
THEIRS: dict[str, Callable[[TensorDict], TensorDict]] = {
    "indices": lambda x: x[torch.tensor([len(x) - 1, 0])],
    "slice": lambda x: x[:2],
    "mask": lambda x: x[torch.arange(len(x)) > 0] if len(x) > 1 else x,
    "cat": lambda x: torch.cat([x, x]),
    "split": lambda x: x.split(1)[-1],
    "clone": lambda x: x.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": through_a_file,
    "to a dtype": lambda x: x.to(torch.float64),
    "to a device": lambda x: x.to("cpu"),
    "select": lambda x: x.select("input_ids", "log_probs", "old_log_probs", "loss_mask", "position_ids"),
}


def assert_composes(batch: TensorDict) -> None:
    """Arithmetic of columns is that of their values; the offsets are one object in all but media."""
    difference: Any = batch["log_probs"] - batch["old_log_probs"]
    both: Any = difference * batch["loss_mask"]
    rows = zip(*(samples_of(batch[key]) for key in ("log_probs", "old_log_probs", "loss_mask")), strict=True)
    wanted = torch.cat([(new - old) * mask for new, old, mask in rows])
    assert torch.equal(torch.cat(samples_of(both)), wanted)
    entries = {**dict(batch.items()), **(dict(batch["nested"].items()) if "nested" in batch.keys() else {})}  # noqa: SIM118
    columns: dict[str, Any] = {key: value for key, value in entries.items() if is_jagged(value)}
    assert len({id(column.offsets()) for key, column in columns.items() if key != "pixel_values"}) == 1


@pytest.mark.parametrize("lengths", ROWS, ids=str)
@pytest.mark.parametrize("way", OURS)
def test_columns_of_a_batch_compose(way: str, lengths: list[int]) -> None:
    assert_composes(OURS[way](batch_of(lengths)))


@pytest.mark.parametrize("lengths", ROWS, ids=str)
@pytest.mark.parametrize("way", THEIRS)
def test_operations_of_tensordict_keep_it(way: str, lengths: list[int]) -> None:
    """Except `consolidate`, which the next test holds to its text."""
    assert_composes(THEIRS[way](batch_of(lengths)))


def test_consolidate_loses_it_and_sharing_brings_it_back() -> None:
    batch = batch_of([3, 1]).consolidate()
    with pytest.raises(RuntimeError, match="cannot call binary pointwise function"):
        batch["log_probs"] - batch["old_log_probs"]
    again = share_offsets(batch)
    assert again["log_probs"].values().data_ptr() == batch["log_probs"].values().data_ptr()
    assert_composes(again)


def test_a_column_from_elsewhere_is_shared_on_request() -> None:
    batch = batch_of([3, 1])
    batch["advantages"] = jagged([torch.ones(3), torch.zeros(1)])
    with pytest.raises(RuntimeError, match="cannot call binary pointwise function"):
        batch["advantages"] * batch["loss_mask"]
    shared = share_offsets(batch)
    assert (shared["advantages"] * shared["loss_mask"]).values().tolist() == [0.0, 1.0, 1.0, 0.0]
    assert shared["input_ids"].offsets() is batch["input_ids"].offsets()  # those of input_ids stay
    assert list(shared.keys()) == list(batch.keys())
    assert list(shared["name"]) == ["row 0", "row 1"]


def test_what_has_other_lengths_stays_as_it_is() -> None:
    ids, other = jagged([torch.zeros(3), torch.zeros(2)]), jagged([torch.zeros(2), torch.zeros(3)])
    holes = torch.nested.narrow(
        torch.arange(10.0).view(2, 5), 1, torch.tensor([1, 2]), torch.tensor([3, 2]), layout=torch.jagged
    )
    dense = torch.zeros(2)
    shared = share_offsets({"other": other, "input_ids": ids, "holes": holes, "dense": dense, "text": ["a", "b"]})
    assert shared["other"] is other
    assert shared["dense"] is dense
    assert shared["text"] == ["a", "b"]
    assert (shared["holes"] + ids).values().tolist() == [1.0, 2.0, 3.0, 7.0, 8.0]
    by_holes = share_offsets({"holes": holes, "ids": ids})  # the first jagged one leads
    assert (by_holes["holes"] + by_holes["ids"]).values().tolist() == [1.0, 2.0, 3.0, 7.0, 8.0]
    leading = share_offsets({"ids": ids}, like=jagged([torch.zeros(3), torch.zeros(2)]))
    assert leading["ids"] is not ids
    assert share_offsets({"dense": dense})["dense"] is dense


def test_values_like_a_column() -> None:
    ids: Any = jagged([torch.zeros(3), torch.zeros(2)])
    wide = jagged_like(torch.arange(10.0).view(2, 5), ids)
    assert [row.tolist() for row in samples_of(wide)] == [[[0, 1, 2], [5, 6, 7]], [[3, 4], [8, 9]]]
    deep: Any = jagged_like(torch.ones(5, 2), ids, 0)
    assert deep.offsets() is ids.offsets()
    meta: Any = jagged_like(torch.ones(5, device="meta"), ids)
    assert meta.device.type == "meta"
    with pytest.raises(ValueError, match="lengths add up to 5, but dimension 0 of values is 4"):
        jagged_like(torch.ones(4), ids)


def test_all_that_is_unpacked_of_one_row_composes() -> None:
    batch = batch_of([3, 1, 4])
    packed = pack_sequences(batch.exclude("nested"), [2, 0], align=4)
    first: Any = unpack_tokens(packed, packed.values["log_probs"])
    second: Any = unpack_tokens(packed, packed.values["old_log_probs"])
    want: Tensor = jagged_from_values(torch.tensor([-1.5] * 4 + [0.5] * 3), [4, 3])
    assert (first - second).values().tolist() == [-1.5] * 4 + [0.5] * 3 == want.values().tolist()
