"""Rows on disk come back as they were written, and count as they are."""

import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apps.sft.reading import store as store_module
from apps.sft.reading.samples import Encoded
from apps.sft.reading.selection import Samples, Truncation, cut, usable_of
from apps.sft.reading.store import SCHEMA, Entry, Store, write_store

Rows = list[list[tuple[int, bool]] | None]

ROWS = st.lists(
    st.none() | st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=12), max_size=9
)
PERHAPS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def entries_of(rows: Rows) -> Iterator[Entry]:
    for number, row in enumerate(rows, start=1):
        key = f"{number:032x}"
        if row is None:
            yield Entry(number, key, None, f"reason {number % 2}")
        else:
            yield Entry(number, key, Encoded([i for i, _ in row], [m for _, m in row]))


@PERHAPS
@given(ROWS, st.integers(1, 4), st.integers(1, 2000))
def test_what_was_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: Rows, count: int, size: int
) -> None:
    monkeypatch.setattr(store_module, "ROWS_A_BATCH", count)
    monkeypatch.setattr(store_module, "BYTES_A_BATCH", size)
    write_store(tmp_path / "a.arrow", entries_of(rows))
    store = pickle.loads(pickle.dumps(Store(tmp_path / "a.arrow")))
    assert len(store) == len(rows)
    assert store.reasons == {i: f"reason {(i + 1) % 2}" for i, row in enumerate(rows) if row is None}
    for i, row in enumerate(rows):
        ids, mask = store.tokens(i)
        assert list(zip(ids.tolist(), mask.tolist(), strict=True)) == (row or [])
        assert (store.rows[i], store.key(i)) == (i + 1, f"{i + 1:032x}")
        assert (store.lengths[i], store.trained[i]) == (len(row or []), sum(m for _, m in (row or [])[1:]))


@PERHAPS
@given(ROWS.filter(bool), st.integers(2, 8), st.sampled_from(["skip", "left", "right"]))
def test_every_row_is_used_or_has_its_reason(tmp_path: Path, rows: Rows, longest: int, truncation: Truncation) -> None:
    write_store(tmp_path / "a.arrow", entries_of(rows))
    store = Store(tmp_path / "a.arrow")
    usable = usable_of(store, longest, truncation)
    left_out = [row for _, numbers in usable.left_out for row in numbers]
    assert sorted([*usable.rows, *left_out]) == list(range(1, len(rows) + 1))
    samples = Samples.of([usable], range(len(usable.entries)))
    assert samples.lengths.tolist() == [len(sample["input_ids"]) for sample in samples]
    for row, sample in zip(usable.rows, samples, strict=True):
        whole = [i for i, _ in rows[row - 1] or []]
        ids = sample["input_ids"].tolist()
        assert 0 < len(ids) == min(len(whole), longest)
        assert ids == (whole[-len(ids) :] if truncation == "left" else whole[: len(ids)])
        assert sample["loss_mask"].any()
        assert not sample["loss_mask"][0]
    assert usable.cut == (0 if truncation == "skip" else sum(len(rows[r - 1] or []) > longest for r in usable.rows))


def test_a_cut_row_keeps_the_mask_of_what_is_left() -> None:
    ids, mask = np.arange(6), np.array([False, True, False, True, True, False])
    assert [x.tolist() for x in cut((ids, mask), 3, "left")] == [[3, 4, 5], [False, True, False]]
    assert [x.tolist() for x in cut((ids, mask), 3, "right")] == [[0, 1, 2], [False, True, False]]
    assert mask[3]


def test_a_batch_has_no_more_bytes_than_it_may_and_images_are_told_apart(tmp_path: Path) -> None:
    """Arrow refuses 2 GiB of strings in one batch, and a batch is whole in memory."""
    images = [[f"data:,{letter * 3 * 2**20}"] for letter in "abcdefghijklm"]
    shown = (Entry(i, f"{i:032x}", Encoded([1], [True], [1], found)) for i, found in enumerate(images, start=1))
    path = tmp_path / "a.arrow"
    write_store(path, shown)
    with pa.memory_map(str(path)) as source:
        reader = pa.ipc.open_file(source)
        counts = [reader.get_batch(i).num_rows for i in range(reader.num_record_batches)]
    assert counts == [6, 6, 1]  # 18 MiB: what is above 16 begins another
    store = Store(path)
    assert [store.images(i)[1] for i in range(13)] == images
    assert store.shown.tolist() == [1] * 13
    assert SCHEMA.field("images").type.value_type == pa.large_string()


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def rows() -> Iterator[Entry]:
        yield Entry(1, "0" * 32, Encoded([1, 2], [False, True]))
        raise ValueError("row 2")

    with pytest.raises(ValueError, match="row 2"):
        write_store(tmp_path / "a.arrow", rows())
    assert not list(tmp_path.iterdir())
