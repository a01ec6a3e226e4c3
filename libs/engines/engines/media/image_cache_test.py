"""Pictures that are kept: equal to what the reader reads, each once, within the bytes given."""

import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engines.media.image_cache import CachedReader
from engines.media.image_reader import ImageReader

SIZE = {"shortest_edge": 64, "longest_edge": 4096}


class CountingReader(ImageReader):
    """A reader that remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__(Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, size=SIZE))
        self.asked: list[Any] = []

    def __call__(self, pictures: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked += pictures
        return super().__call__(pictures)


def write(path: Path, seed: int, side: int = 16) -> str:
    Image.fromarray(np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)).save(path)
    return str(path)


def test_equals_the_reader_and_reads_each_picture_once(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{seed}.png", seed, 16 + 8 * seed) for seed in range(3)]
    reader = CountingReader()
    cached = CachedReader(reader)
    cached.ahead(files[:2])
    wanted = ImageReader(reader.processor)(files)
    for _ in range(3):
        for found, want in zip(cached(files), wanted, strict=True):
            assert torch.equal(found, want)
    assert sorted(reader.asked) == files
    assert torch.equal(cached.grids(files), wanted[1])


def test_every_form_is_kept_but_open_pictures(tmp_path: Path) -> None:
    path = write(tmp_path / "a.png", 0)
    data = Path(path).read_bytes()
    reader = CountingReader()
    cached = CachedReader(reader)
    for picture in (path, data, {"bytes": data, "path": None}, {"bytes": None, "path": path}, Image.open(path)):
        for _ in range(2):
            cached([picture])
    assert len(reader.asked) == 4  # the path, the bytes, the open one twice


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.png", 0)
    cached = CachedReader(CountingReader())
    before = cached([path])[0]
    write(tmp_path / "a.png", 1)
    os.utime(path, ns=(1, 1))
    assert not torch.equal(cached([path])[0], before)


def test_what_is_kept_has_a_bound(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{seed}.png", seed) for seed in range(4)]
    reader = CountingReader()
    one = ImageReader(reader.processor)([files[0]])[0].nbytes
    cached = CachedReader(reader, max_bytes=2 * one)
    for path in (*files[:2], files[0], files[2], files[3], files[3]):
        cached([path])
    assert len(reader.asked) == 4
    cached([files[1]])  # forgotten as the one longest unused
    assert reader.asked[-1] == files[1]


def test_what_cannot_be_read_is_named_by_its_place_each_time(tmp_path: Path) -> None:
    cached = CachedReader(CountingReader())
    good = write(tmp_path / "a.png", 0)
    for bad in (b"no picture", str(tmp_path / "nowhere.png"), 7):
        cached.ahead([bad])
        for _ in range(2):
            with pytest.raises(ValueError, match="picture 1: "):
                cached([good, bad])
    with pytest.raises(ValueError, match="no picture to read"):
        cached([])


def test_another_process_gets_the_settings_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.png", 0, 512)
    cached = CachedReader(ImageReader(CountingReader().processor))
    patches = cached([path])[0]
    sent = pickle.dumps(cached)
    assert len(sent) < patches.nbytes / 10
    assert torch.equal(pickle.loads(sent)([path])[0], patches)
    assert str(pickle.loads(sent)) == str(cached)


def test_what_is_asked_does_not_look_at_all_that_is_kept(tmp_path: Path) -> None:
    """The bytes are counted once a read, of those alone that were under way."""
    files = [write(tmp_path / f"{seed}.png", seed) for seed in range(6)]
    cached = CachedReader(CountingReader())
    one = cached(files[:1])[0].nbytes
    for path in files:
        cached([path])
    assert len(cached._under_way) <= 1  # the last one, which may have ended before it was looked at
    assert cached._held == (6 - len(cached._under_way)) * one == sum(cached._sizes.values())
