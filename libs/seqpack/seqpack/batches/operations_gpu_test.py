"""The properties of the jagged operations on a CUDA device, against lists of tensors on the CPU.

SEQPACK_TEST_DEVICE=cpu tries the same examples on a machine without one.
"""

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seqpack.batches.batch import check_batch, lengths, make_batch
from seqpack.batches.jagged import samples_of
from seqpack.batches.packed import PackedBatch, pack_sequences, unpack_sequences, unpack_tokens
from seqpack.testing import batch_properties, jagged_properties, operation_properties

DEVICE = os.environ.get("SEQPACK_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FIXED = settings(
    max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(autouse=True)
def seconds() -> Iterator[None]:
    torch.manual_seed(0)
    start = time.perf_counter()
    yield
    print(f"{time.perf_counter() - start:.1f} s on {DEVICE}")


@pytest.mark.parametrize("name", operation_properties.PROPERTIES)
@FIXED
@given(st.data())
def test_property_of_the_operations(name: str, data: st.DataObject) -> None:
    operation_properties.PROPERTIES[name](data, DEVICE)


@pytest.mark.parametrize("name", jagged_properties.PROPERTIES)
def test_property_of_the_layout(name: str) -> None:
    jagged_properties.PROPERTIES[name](DEVICE)


@pytest.mark.parametrize("transfer", batch_properties.BATCH_TRANSFERS)
@pytest.mark.parametrize("sizes", batch_properties.LENGTHS, ids=str)
def test_batches_of_everything(sizes: list[int], transfer: str) -> None:
    batch_properties.check_batches_of_everything(sizes, transfer, DEVICE)


def test_batches_padded_and_back() -> None:
    batch_properties.check_batches_padded_and_back(DEVICE)


def check_gradients(packed: PackedBatch) -> None:
    values = torch.randn(packed.num_tokens, dtype=torch.float64, device=DEVICE, requires_grad=True)
    torch.cat(samples_of(unpack_tokens(packed, values))).sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad == 1, packed.token_mask)


@FIXED
@given(st.data())
def test_packed_rows_and_back(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    rows = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=6))
    align = data.draw(st.integers(1, 4))
    samples: list[dict[str, Any]] = [
        {
            "input_ids": torch.arange(n) + 10 * i,
            "position_ids": torch.arange(3 * n).reshape(3, n),
            "loss_mask": torch.arange(n) > 0,
            "reward": float(i),
            "text": f"sample {i}",
        }
        for i, n in enumerate(sizes)
    ]
    transfer = data.draw(st.sampled_from(sorted(batch_properties.BATCH_TRANSFERS)))
    batch = batch_properties.BATCH_TRANSFERS[transfer](make_batch(samples).to(DEVICE), DEVICE)
    check_batch(batch)
    assert lengths(batch) == sizes
    packed = pack_sequences(batch, rows, align, bucket=data.draw(st.sampled_from([None, 5 * align])))
    assert {v.device.type for v in (*packed.values.values(), packed.cu_seqlens, packed.position_ids)} == {DEVICE}
    if rows:
        check_gradients(packed)
    back = unpack_sequences(packed)
    for key in ("input_ids", "position_ids", "loss_mask"):
        operation_properties.assert_same(samples_of(back[key]), [samples[i][key] for i in rows], DEVICE)
    assert back["reward"].tolist() == [float(i) for i in rows]
    assert list(back["text"]) == [f"sample {i}" for i in rows]
