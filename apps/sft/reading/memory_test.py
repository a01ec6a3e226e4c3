"""A file of images inside its rows is tokenised in a part of the memory that it would take."""

import base64
import io
import json
import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from apps.common.data.images import image_processor_of
from apps.common.data.tokenizer import load_tokenizer
from apps.quickstart.vision import ensure_vision_model
from apps.sft.reading.examples import Columns
from apps.sft.reading.store import Store
from apps.sft.reading.tokenized import tokenize_file
from engines import EngineConfig

ROWS, PICTURE = 150, 750_000
"""Rows, and bytes of each one's picture: 150 MB as base64."""
CASES = [("a.jsonl", 1, 170), ("a.jsonl", 2, 250), ("a.parquet", 1, 350)]
"""File, processes, and MiB that it may take: 90, 116, 227 when it was written; 420, 614, 673 with all rows at once."""


def picture(number: int) -> bytes:
    """A small one that takes many bytes: what stands behind a PNG's end is not read."""
    written = io.BytesIO()
    Image.new("RGB", (32, 32), (number, 0, 0)).save(written, "PNG")
    return written.getvalue().ljust(PICTURE, b"\0")


def made(path: Path) -> Path:
    """Rows with a picture in a column, as bytes (.parquet) or as text (.jsonl)."""
    ask = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    if path.suffix == ".parquet":
        rows = [{"messages": ask, "images": [{"bytes": picture(i)}]} for i in range(ROWS)]
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=30, compression="none")
        return path
    with path.open("w") as file:
        for i in range(ROWS):
            uri = f"data:image/png;base64,{base64.b64encode(picture(i)).decode()}"
            file.write(json.dumps({"messages": ask, "images": [uri]}) + "\n")
    return path


def most_mib() -> int:
    """The most memory that this process ever had."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) // 1024


def growth(path: Path, model: Path, processes: int) -> tuple[int, Path]:
    """In a process of its own: by how many MiB tokenising a file raises its memory, and the store."""
    tokenizer, image_processor = load_tokenizer(model), image_processor_of(EngineConfig(vision="frozen"), model)
    columns, stops = Columns(images="images"), None
    small = path.with_name("small.jsonl")
    small.write_text(
        json.dumps({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]})
    )
    tokenize_file(small, columns, tokenizer, stops, path.parent / "small", processes, image_processor)
    before = most_mib()
    store = tokenize_file(path, columns, tokenizer, stops, path.parent / "tokens", processes, image_processor)
    return most_mib() - before, store.path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_vision_model(tmp_path_factory.mktemp("seeing") / "model", 0)


@pytest.mark.parametrize(("name", "processes", "most"), CASES)
def test_memory_is_bounded_by_bytes(model: Path, tmp_path: Path, name: str, processes: int, most: int) -> None:
    path = made(tmp_path / name)
    assert path.stat().st_size > ROWS * PICTURE
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:
        grown, store = alone.submit(growth, path, model, processes).result()
    assert grown < most
    assert len(Store(store)) == ROWS
    assert Store(store).shown.sum() == ROWS
