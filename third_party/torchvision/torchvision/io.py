"""Reading of image files."""

from torchvision import missing


def __getattr__(name: str) -> object:
    return missing(__name__, name)
