"""Names that are looked up while other modules are imported."""

from enum import Enum

from torchvision import missing


class InterpolationMode(Enum):
    """transformers makes a table of these."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def __getattr__(name: str) -> object:
    return missing(__name__, name)
