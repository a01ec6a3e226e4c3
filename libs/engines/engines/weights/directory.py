"""The files of a Hugging Face model directory: the headers of its safetensors, and tensors one at a time."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


@dataclass(frozen=True)
class DiskTensor:
    """One tensor of a directory. `dtype` is None for a type that is not a floating point number that can be trained."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None


@dataclass(frozen=True)
class ModelDirectory:
    """A directory whose headers were read; tensors stay on disk until they are asked for."""

    path: Path
    tensors: Mapping[str, DiskTensor]

    @staticmethod
    def read(path: Path) -> "ModelDirectory":
        """Read all headers; ValueError names the file that is missing, cut off or not safetensors."""
        tensors: dict[str, DiskTensor] = {}
        for file in _files(path):
            try:
                with safe_open(file, "pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 (no mapping)
                        part = opened.get_slice(name)
                        tensors[name] = DiskTensor(file, tuple(part.get_shape()), _DTYPES.get(part.get_dtype()))
            except (SafetensorError, FileNotFoundError) as error:
                raise ValueError(f"{file} is missing or damaged ({error}): copy the checkpoint again") from error
        return ModelDirectory(path, tensors)

    def load(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """These tensors as they are, one at a time."""
        for name in names:
            with safe_open(self.tensors[name].file, "pt") as opened:
                yield name, opened.get_tensor(name)

    def other_files(self) -> list[Path]:
        """Everything beside the weights: configuration, tokenizer, chat template."""
        return sorted(f for f in self.path.iterdir() if f.is_file() and not f.name.endswith(_WEIGHTS))


def _files(path: Path) -> list[Path]:
    if (path / INDEX).is_file():
        try:
            weight_map = json.loads((path / INDEX).read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path / INDEX} is no index of weights ({error!r})") from error
        return [path / name for name in sorted(set(weight_map.values()))]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    raise ValueError(
        f"{path} has neither {SINGLE} nor {INDEX}: weights are read from safetensors alone, as save_pretrained writes"
    )
