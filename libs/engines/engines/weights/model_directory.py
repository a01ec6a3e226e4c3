"""The files of a Hugging Face model directory: what its weight files hold, and tensors one at a time.

Of several kinds of weight files the first counts, as in `from_pretrained`: `model.safetensors`, its index, and the same
of `pytorch_model.bin`, which is read as tensors alone (`torch.load` with `weights_only`).
"""

import json
import math
import pickle
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_ORDER = (SINGLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Weight files of a directory in their order of precedence."""
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES |= {"I64": torch.int64}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


@dataclass(frozen=True)
class DiskTensor:
    """One tensor of a directory. `dtype` is None for a type that is neither a floating point number that can be
    trained nor that of whole numbers in a model's buffers (tables of ids)."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    offset: int = 0
    """Offset of its first byte in a safetensors file."""
    mapped: Tensor | None = field(default=None, compare=False, repr=False)
    """The tensor of a .bin file, whose values are read from the file when they are used."""


@dataclass(frozen=True)
class ModelDirectory:
    """A directory whose headers were read; tensors stay on disk until they are asked for."""

    path: Path
    tensors: Mapping[str, DiskTensor]

    @staticmethod
    def read(path: Path) -> "ModelDirectory":
        """Read all headers; ValueError names the file or tensor that is missing, cut off or double.

        All tensors of the files that an index names are there, as in transformers, whichever of them it gives each.
        """
        refuse_adapter(path)
        tensors: dict[str, DiskTensor] = {}
        files = _files(path)
        for file in files:
            header = _header(file) if file.suffix == ".safetensors" else _mapped(file)
            for name in sorted(header.keys() & tensors.keys()):
                raise ValueError(f"{file} and {tensors[name].file} both hold {name}: remove one of them")
            tensors |= header
        for file, indexed in files.items():
            for name in sorted(indexed - tensors.keys()):
                raise ValueError(f"the index of {path} says that {file.name} holds {name}, which no file of it does")
        return ModelDirectory(path, tensors)

    def rows(self, name: str, rows: slice | None = None) -> Tensor:
        """Read these rows (dimension 0; None, or a scalar: the whole) of a tensor into memory of their
        own.

        Nothing else of the file is read or mapped. ValueError where the file has become shorter.
        """
        entry = self.tensors[name]
        assert entry.dtype is not None, f"{name} is quantised"
        rows = rows if entry.shape else None
        if entry.mapped is not None:
            return (entry.mapped if rows is None else entry.mapped[rows]).clone(memory_format=torch.contiguous_format)
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
            entry = self.tensors[name]
            if entry.mapped is not None:
                yield name, entry.mapped.clone(memory_format=torch.contiguous_format)
                continue
            with safe_open(entry.file, "pt") as opened:
                yield name, opened.get_tensor(name)

    def other_files(self) -> list[Path]:
        """Return all files beside the weights: configuration, tokenizer, chat template."""
        return sorted(f for f in self.path.iterdir() if f.is_file() and not f.name.endswith(_WEIGHTS))


def has_weights(path: Path) -> bool:
    """Return whether the weight files of a directory are there, all of those that an index names."""
    try:
        return all(file.is_file() for file in _files(path))
    except ValueError:
        return False


def refuse_adapter(path: Path) -> None:
    """Raise ValueError where a directory holds an adapter of peft's: which base to give, in its own words."""
    file = path / "adapter_config.json"
    if not file.is_file():
        return
    try:
        described = json.loads(file.read_text())
    except ValueError:
        described = None
    base = described.get("base_model_name_or_path") if isinstance(described, dict) else None
    does = "which from_pretrained puts over the weights" if (path / "config.json").is_file() else "and no model"
    raise ValueError(
        f"{path} holds an adapter (adapter_config.json), {does}: give its base {base or 'model'}, a directory or a "
        "name on the hub, or save the two as one (peft: merge_and_unload, then save_pretrained)"
    )


def _files(path: Path) -> dict[Path, set[str]]:
    """Return the weight files, each with the tensors that an index assigns to it."""
    name = next((name for name in _ORDER if (path / name).is_file()), None)
    if name is None or any(path.glob("shard-*-model-*-of-*.safetensors")):
        raise ValueError(
            f"{path} has neither {SINGLE} nor an index of such files, nor pytorch_model.bin: no other weights are read "
            "(save_pretrained writes these)"
        )
    if not name.endswith(".json"):
        return {path / name: set()}
    try:
        weight_map = dict(json.loads((path / name).read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / name} is no index of weights ({error!r})") from error
    files: dict[Path, set[str]] = {}
    for tensor, file in sorted(weight_map.items(), key=str):
        if not isinstance(file, str) or Path(file).is_absolute() or ".." in Path(file).parts:
            raise ValueError(f"{path / name} places {tensor} in {file!r}, which is no file of the directory")
        files.setdefault(path / file, set()).add(tensor)
    return dict(sorted(files.items()))


def _mapped(file: Path) -> dict[str, DiskTensor]:
    """Return the tensors of a .bin file, mapped into memory; one of the format before zip files is read whole."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except pickle.UnpicklingError as error:
        raise ValueError(f"{file} is damaged, or holds more than tensors: copy it again, or save tensors") from error
    except (OSError, RuntimeError, EOFError) as error:
        raise ValueError(f"{file} is missing or damaged ({error}): copy the checkpoint again") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(f"{file} is no state dict: save_pretrained writes one of tensors alone")
    known = set(_DTYPES.values())
    return {
        name: DiskTensor(file, tuple(value.shape), value.dtype if value.dtype in known else None, mapped=value)
        for name, value in loaded.items()
    }


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
