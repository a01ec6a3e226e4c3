"""The files of a Hugging Face model directory: the headers of its safetensors, and tensors one at a time."""

import json
import math
import struct
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
    offset: int
    """Offset of its first byte in the file."""


@dataclass(frozen=True)
class ModelDirectory:
    """A directory whose headers were read; tensors stay on disk until they are asked for."""

    path: Path
    tensors: Mapping[str, DiskTensor]

    @staticmethod
    def read(path: Path) -> "ModelDirectory":
        """Read all headers; ValueError names the file or tensor that is missing, cut off, double or not safetensors."""
        tensors: dict[str, DiskTensor] = {}
        files = _files(path)
        for file, indexed in files.items():
            header = _header(file)
            for name in sorted(indexed - header.keys()):
                raise ValueError(f"{path / INDEX} says that {file.name} holds {name}, which it does not")
            for name in sorted(header.keys() & tensors.keys()):
                raise ValueError(f"{file} and {tensors[name].file} both hold {name}: remove one of them")
            tensors |= header
        return ModelDirectory(path, tensors)

    def rows(self, name: str, rows: slice | None = None) -> Tensor:
        """Read these rows (dimension 0; None: the whole) of a floating-point tensor into memory of their own.

        Nothing else of the file is read or mapped. ValueError where the file has become shorter.
        """
        entry = self.tensors[name]
        assert entry.dtype is not None, f"{name} is quantised"
        shape = entry.shape if rows is None else (rows.stop - rows.start, *entry.shape[1:])
        tensor = torch.empty(shape, dtype=entry.dtype)
        if tensor.numel() == 0:
            return tensor
        skipped = 0 if rows is None else rows.start * math.prod(entry.shape[1:]) * tensor.element_size()
        with entry.file.open("rb", buffering=0) as file:
            file.seek(entry.offset + skipped)
            into = memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
            while into:
                count = file.readinto(into)
                if not count:
                    raise ValueError(f"{entry.file} ends within {name}: copy the checkpoint again")
                into = into[count:]
        return tensor

    def load(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield these tensors as they are, one at a time."""
        for name in names:
            with safe_open(self.tensors[name].file, "pt") as opened:
                yield name, opened.get_tensor(name)

    def other_files(self) -> list[Path]:
        """Return all files beside the weights: configuration, tokenizer, chat template."""
        return sorted(f for f in self.path.iterdir() if f.is_file() and not f.name.endswith(_WEIGHTS))


def _files(path: Path) -> dict[Path, set[str]]:
    """Return the weight files, each with the tensors that an index assigns to it."""
    if (path / INDEX).is_file():
        try:
            weight_map = dict(json.loads((path / INDEX).read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path / INDEX} is no index of weights ({error!r})") from error
        files: dict[Path, set[str]] = {}
        for name, file in sorted(weight_map.items(), key=str):
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"{path / INDEX} places {name} in {file!r}, which is no file of the directory")
            files.setdefault(path / file, set()).add(name)
        return dict(sorted(files.items()))
    if (path / SINGLE).is_file():
        return {path / SINGLE: set()}
    raise ValueError(
        f"{path} has neither {SINGLE} nor {INDEX}: weights are read from safetensors alone, as save_pretrained writes"
    )


def _header(file: Path) -> dict[str, DiskTensor]:
    """Return the tensors of a file; safetensors itself checks that header and length agree."""
    try:
        with safe_open(file, "pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is missing or damaged ({error}): copy the checkpoint again") from error
    with file.open("rb") as opened:
        (size,) = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(size))
    return {
        name: DiskTensor(file, tuple(entry["shape"]), _DTYPES.get(entry["dtype"]), 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }
