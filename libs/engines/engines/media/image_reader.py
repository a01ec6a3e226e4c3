"""Pictures as the patches that a vision tower of Qwen takes, by the model directory's own image processor."""

import base64
import binascii
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engines.extras import missing_extra_message

try:
    from PIL import Image, UnidentifiedImageError
except ImportError as error:
    raise ImportError(missing_extra_message("pictures are read with pillow", "images")) from error

FILE = "preprocessor_config.json"
_BASE64 = ";base64,"


class ImageReader:
    """A reader of pictures: patches f32[P, numbers] and grids i64[n, 3] (time, height, width in patches)."""

    def __init__(self, processor: Any) -> None:
        """Take `processor`, transformers' image processor of Qwen2-VL, which Qwen3-VL and Qwen3.5 use too."""
        self.processor = processor

    @staticmethod
    def of(directory: Path) -> "ImageReader":
        """Read the settings in a model directory. ValueError where they are missing or malformed."""
        if not (directory / FILE).is_file():
            raise ValueError(
                f"{directory} has no {FILE}, which says how its model cuts pictures into patches: add it, or leave "
                "vision off"
            )
        # Imported here: it takes half a second, which who reads no pictures need not pay.
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        try:
            return ImageReader(Qwen2VLImageProcessorPil.from_pretrained(directory, local_files_only=True))
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"{directory / FILE} cannot be read: {error}") from error

    def __str__(self) -> str:
        """Return the settings as JSON: readers with equal text read pictures alike."""
        return str(self.processor.to_json_string())

    @property
    def merge_size(self) -> int:
        """Number of patches that become one token, along each side."""
        return int(self.processor.merge_size)

    @property
    def numbers(self) -> int:
        """Number of values of a patch: colours x frames x height x width."""
        return int(3 * self.processor.temporal_patch_size * self.processor.patch_size**2)

    def __call__(self, pictures: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Read pictures as `open_image` takes them; ValueError names one that cannot be read."""
        opened = []
        for number, image in enumerate(pictures):
            try:
                opened.append(open_image(image))
            except ValueError as error:
                raise ValueError(f"picture {number}: {error}") from error
        if not opened:
            raise ValueError("there is no picture to read")
        patches, grids = zip(*map(self._cut, opened), strict=True)
        return torch.from_numpy(np.concatenate(patches)), torch.tensor(grids, dtype=torch.int64)

    def _cut(self, image: Image.Image) -> tuple[Any, tuple[int, int, int]]:
        """Return patches and grid of an RGB picture: the processor's own steps, without what it does around them."""
        processor = self.processor
        grid, size = self._grid_of(*image.size), processor.patch_size
        if processor.do_resize and image.size != (wanted := (grid[2] * size, grid[1] * size)):
            image = image.resize(wanted, processor.resample)
        pixels = np.asarray(image).transpose(2, 0, 1)
        if processor.do_rescale:
            pixels = processor.rescale(pixels, processor.rescale_factor)
        if processor.do_normalize:
            pixels = processor.normalize(pixels, processor.image_mean, processor.image_std)
        patches, *_ = processor.patchify(pixels, size, processor.merge_size, processor.temporal_patch_size)
        return patches, grid

    def grids(self, images: Sequence[Any]) -> Tensor:
        """Return the grids i64[n, 3] of pictures from their sizes: of files, headers alone are read, so that a torn
        one is not noticed. ValueError names one that is no picture."""
        grids = [self._grid(number, image) for number, image in enumerate(images)]
        return torch.tensor(grids, dtype=torch.int64).view(-1, 3)

    def _grid(self, number: int, image: Any) -> tuple[int, int, int]:
        try:
            return self._grid_of(*size_of(image))
        except ValueError as error:
            raise ValueError(f"picture {number}: {error}") from error

    def _grid_of(self, width: int, height: int) -> tuple[int, int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize  # slow to load

        processor = self.processor
        if processor.do_resize:
            factor = processor.patch_size * processor.merge_size
            height, width = smart_resize(
                height, width, factor, processor.size["shortest_edge"], processor.size["longest_edge"]
            )
        return 1, height // processor.patch_size, width // processor.patch_size


def as_text(image: Any) -> str:
    """Return a picture of a dataset's row as JSON holds it: its path, or a `data:` URI. ValueError for other rows."""
    if isinstance(image, Mapping):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return f"data:application/octet-stream{_BASE64}{base64.b64encode(image).decode()}"
    if not isinstance(image, str):
        raise ValueError(f"a {type(image).__name__} is no picture of a file: its bytes, or its path")
    return image


def open_image(image: Any) -> Image.Image:
    """Open a picture as RGB: a PIL image, a path, bytes, a `data:` URI, or a row of a dataset (`bytes`, `path`).

    ValueError for anything else, or a file that is no picture.
    """
    with _opened(image) as opened:
        return opened.convert("RGB")


def size_of(image: Any) -> tuple[int, int]:
    """Return (width, height) of a picture, as `open_image` takes it; ValueError as there, but for torn files."""
    with _opened(image) as opened:
        return opened.size


@contextmanager
def _opened(image: Any) -> Iterator[Image.Image]:
    """Open a picture, of which nothing but its header is read yet, and close its file; errors are ValueError."""
    if isinstance(image, Mapping):  # as the datasets library writes images to Parquet
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str) and image.startswith("data:"):
        _, separator, text = image.partition(_BASE64)
        try:
            image = base64.b64decode(text, validate=True) if separator else None
        except binascii.Error as error:
            raise ValueError(f"a data URI is not base64: {error}") from error
    if isinstance(image, bytes):
        image = io.BytesIO(image)
    try:
        if isinstance(image, Image.Image):
            yield image
        else:
            with Image.open(image) as opened:
                yield opened
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"it cannot be read ({error})") from error
    except AttributeError as error:
        raise ValueError(f"a {type(image).__name__} is no picture: give a path, bytes or a PIL image") from error
