"""Pictures in every form that they come in; and those that cannot be read."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from engines.media.image_reader import ImageReader, as_text, open_image

SETTINGS = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


@pytest.fixture
def reader(tmp_path: Path) -> ImageReader:
    size = {"size": {"shortest_edge": 64, "longest_edge": 4096}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS | size))
    return ImageReader.of(tmp_path)


def picture(width: int = 24, height: int = 16, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, format="PNG")
    return out.getvalue()


def test_patches_are_the_pixels_of_merged_blocks(reader: ImageReader) -> None:
    """Held to the definition: blocks of 2 x 2 patches row by row, each patch colours x frames x height x width."""
    image = picture()
    patches, grids = reader([image])
    assert grids.tolist() == [[1, 4, 6]]
    assert patches.shape == (24, reader.numbers)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 * 2 - 1
    at = 0
    for top in range(0, 16, 8):
        for left in range(0, 24, 8):
            for dy in (0, 4):
                for dx in (0, 4):
                    one = pixels[:, top + dy : top + dy + 4, left + dx : left + dx + 4]
                    want = one[:, None].expand(3, 2, 4, 4).flatten()
                    assert (patches[at] - want).abs().max() < 1e-5
                    at += 1


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 300), st.integers(2, 300), st.sampled_from([1024, 4096, 30_000]), st.booleans())
def test_grids_are_read_off_headers(width: int, height: int, most: int, resized: bool) -> None:
    """Held to the reader that decodes the picture."""
    reader = ImageReader(Qwen2VLImageProcessorPil(**SETTINGS, size={"shortest_edge": 64, "longest_edge": most}))
    reader.processor.do_resize = resized
    if not resized:
        width, height = (max(8, side // 8 * 8) for side in (width, height))
    data = png(picture(width, height))
    assert torch.equal(reader.grids([data]), reader([data])[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Image.Image, "convert", None)
        patch.setattr(ImageFile.ImageFile, "load", None)  # nothing is decoded
        assert reader.grids([data, data]).shape == (2, 3)


@pytest.mark.parametrize("change", [{}, {"do_rescale": False}, {"do_normalize": False}, {"image_std": [0.3, 0.4, 0.5]}])
def test_patches_are_those_of_the_processor(change: dict[str, Any]) -> None:
    """Bit for bit, of pictures that are resized and of one that is not."""
    processor = Qwen2VLImageProcessorPil(**SETTINGS | change, size={"shortest_edge": 64, "longest_edge": 4096})
    pictures = [picture(*size) for size in ((24, 16), (100, 90), (17, 5), (31, 64))]
    want = processor(images=pictures, return_tensors="pt")
    patches, grids = ImageReader(processor)(pictures)
    assert torch.equal(patches, want["pixel_values"].to(torch.float32))
    assert torch.equal(grids, want["image_grid_thw"])


def test_headers_of_no_picture_are_named(reader: ImageReader) -> None:
    assert reader.grids([]).shape == (0, 3)
    with pytest.raises(ValueError, match="picture 1: it cannot be read"):
        reader.grids([picture(), b"no picture"])
    with pytest.raises(ValueError, match="picture 0: absolute aspect ratio must be smaller than 200"):
        reader.grids([picture(2000, 8)])


def test_every_form_of_a_picture_is_the_same_one(reader: ImageReader, tmp_path: Path) -> None:
    image = picture()
    data = png(image)
    (tmp_path / "a.png").write_bytes(data)
    uri = "data:image/png;base64," + base64.b64encode(data).decode()
    row = {"bytes": data, "path": None}
    forms = [image, data, str(tmp_path / "a.png"), uri, row, {"bytes": None, "path": str(tmp_path / "a.png")}]
    patches, grids = reader([*forms, as_text(row), as_text(data)])
    assert len(grids) == 8
    assert all(torch.equal(part, patches[:24]) for part in patches.split(24))
    assert as_text(forms[2]) == forms[2]


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (b"no picture", "picture 1: it cannot be read"),
        (png(picture())[:60], "picture 1: it cannot be read"),
        ("nowhere.png", "picture 1: it cannot be read"),
        ("data:image/png;base64,***", "picture 1: a data URI is not base64"),
        ("data:image/png,abc", "picture 1: a NoneType is no picture"),
        (3.5, "picture 1: a float is no picture"),
        ({"bytes": None, "path": None}, "picture 1: a NoneType is no picture"),
    ],
)
def test_what_cannot_be_read_is_named(reader: ImageReader, broken: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        reader([picture(), broken])


def test_settings_are_needed(reader: ImageReader, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no picture to read"):
        reader([])
    with pytest.raises(ValueError, match=r"has no preprocessor_config\.json"):
        ImageReader.of(tmp_path / "none")
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        ImageReader.of(tmp_path)
    with pytest.raises(ValueError, match="a list is no picture of a file"):
        as_text([1])
    assert open_image(picture().convert("L")).mode == "RGB"
