"""Batches that hold everything a TensorDict may hold, beside the same as plain dicts, and what must be true of them."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from seqpack.batches.jagged import jagged
from seqpack.batches.operations import chunk, concat, from_padded, index_select, num_samples, split, to_padded, unbind
from seqpack.testing.operation_properties import TRANSFERS, assert_same, pickled

Rows = list[dict[str, Any]]

BATCH_TRANSFERS: dict[str, Callable[[Any, str], Any]] = {
    **TRANSFERS,
    "consolidate": lambda x, _: x.consolidate(),
    "consolidate and pickle": lambda x, _: pickled(x.consolidate()),
    "consolidate and pickle twice": lambda x, _: pickled(pickled(x.consolidate())),
    "consolidate, to the host and back": lambda x, device: x.consolidate().to("cpu").to(device),
    "consolidated on the host": lambda x, device: pickled(x.to("cpu").consolidate()).to(device),
}

LENGTHS = [[3, 1, 4, 1, 5], [3, 3], [4], [1], [1, 1, 1], [2, 2, 3]]


def batch_of(lengths: list[int], device: str = "cpu") -> tuple[TensorDict, Rows]:
    """Return a TensorDict of everything that a batch may hold, on the device, and the same as dicts on the CPU."""
    rows: Rows = [
        {
            "input_ids": torch.arange(n) + 10 * i,
            "position_ids": torch.arange(3 * n).reshape(3, n) + 10 * i,
            "hidden": torch.arange(2 * n).reshape(n, 2).float() + i,
            "reward": torch.tensor(float(i)),
            "grid": torch.tensor([i, i + 1, i + 2]),
            "text": f"text {i}",
            "messages": [{"role": "user", "content": str(i)}] * (i % 3),
            "tools": None if i % 2 else {"name": i},
            "nested": {"x": torch.arange(n).float(), "label": i},
        }
        for i, n in enumerate(lengths)
    ]

    def column(name: str, values: list[Any]) -> Any:
        if name == "nested":
            return TensorDict({k: column(k, [v[k] for v in values]) for k in ("x", "label")}, batch_size=[len(values)])
        if not isinstance(values[0], Tensor):
            return NonTensorStack(*[NonTensorData(v) for v in values])
        values = [v.to(device) for v in values]
        if name in ("reward", "grid"):
            return torch.stack(values)
        return jagged(values, 0 if name == "hidden" else -1)

    return TensorDict({k: column(k, [r[k] for r in rows]) for k in rows[0]}, [len(rows)], device=device), rows


def assert_samples(batch: TensorDict, rows: Rows, device: str = "cpu") -> None:
    """Assert that the samples of the batch, on the device, are the rows."""
    assert batch.batch_size == (len(rows),)
    assert batch.device is not None
    assert batch.device.type == device
    for sample, row in zip(unbind(batch), rows, strict=True):
        assert set(sample.keys()) == set(row)
        for key, value in row.items():
            if key == "nested":
                assert_same([sample["nested", "x"]], [value["x"]], device)
                assert sample["nested", "label"] == value["label"]
            elif isinstance(value, Tensor):
                assert_same([sample[key]], [value], device)
            else:
                assert sample[key] == value


def check_batches_of_everything(lengths: list[int], transfer: str, device: str = "cpu") -> None:
    """Chunk, concat, index, split and unbind a batch of everything after a journey."""

    def transferred(x: Any) -> Any:
        return BATCH_TRANSFERS[transfer](x, device)

    batch, rows = batch_of(lengths, device)
    batch = transferred(batch)
    assert_samples(batch, rows, device)
    for count in (1, 2, 3, len(rows) + 1):
        pieces = chunk(batch, count)
        assert [num_samples(p) for p in pieces] == [num_samples(p) for p in chunk(torch.zeros(len(rows)), count)]
        start = 0
        for piece in pieces:
            assert_samples(piece, rows[start : start + num_samples(piece)], device)
            start += num_samples(piece)
        assert_samples(concat([transferred(p) for p in pieces]), rows, device)
    order = [*reversed(range(len(rows))), 0]
    assert_samples(index_select(batch, order), [rows[i] for i in order], device)
    assert_samples(index_select(batch, []), [], device)
    assert_samples(concat([batch, split(batch, 1)[0]]), [*rows, rows[0]], device)


def check_batches_padded_and_back(device: str = "cpu") -> None:
    """Pad a batch of everything, each key with its value, and cut it again."""
    batch, rows = batch_of([3, 1, 2], device)
    dense = to_padded(batch, {"input_ids": 99}, length=4)
    assert dense["input_ids"].tolist() == [[0, 1, 2, 99], [10, 99, 99, 99], [20, 21, 99, 99]]
    assert dense["position_ids"].shape == (3, 3, 4)
    assert dense["position_ids"][1, :, 1:].eq(0).all()
    assert torch.equal(dense["grid"], batch["grid"])
    assert dense["nested", "x"].shape == (3, 4)
    assert_samples(from_padded(dense, batch), rows, device)  # keys outside the schema and nested ones as well
    by_name = from_padded(dense, [3, 1, 2], keys=["input_ids", "position_ids"])
    assert_same(unbind(by_name["input_ids"]), [r["input_ids"] for r in rows], device)
    assert_same(unbind(by_name["position_ids"]), [r["position_ids"] for r in rows], device)
    assert by_name["hidden"].shape == (3, 4, 2)
    cut = from_padded(dense, [3, 1, 2], 0, keys=["hidden"])
    assert_same(unbind(cut["hidden"]), [r["hidden"] for r in rows], device)
