"""The reader of a model's images."""

from pathlib import Path

from engines import EngineConfig
from engines.media.image_cache import CachedReader
from engines.media.image_reader import ImageReader
from rollout.chat.images import ImageProcessor


def image_processor_of(engine: EngineConfig, model: Path | None) -> ImageProcessor | None:
    """Return the reader of images for the model in a directory; None for a model that is trained on text alone.

    Raises:
        ValueError: the directory does not say how its model cuts pictures into patches.
    """
    if engine.vision == "off" or model is None:
        return None
    reader = ImageReader.of(model)
    return ImageProcessor(CachedReader(reader), reader.numbers, reader.merge_size, measure=reader.grids)
