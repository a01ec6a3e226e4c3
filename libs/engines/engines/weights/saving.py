"""Hugging Face model directories, written from a stream of tensors, with at most one file's worth in memory."""

import copy
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engines.weights.model_directory import INDEX, SINGLE
from engines.weights.model_weights import ModelWeights

FILE_BYTES = 4 * 2**30


def save_weights(tensors: Iterable[tuple[str, Tensor]], directory: Path, file_bytes: int = FILE_BYTES) -> None:
    """Write safetensors files of at most `file_bytes` (or one tensor), and their index where there are several."""
    pending: dict[str, Tensor] = {}
    size = total = 0
    files: list[list[str]] = []
    for name, tensor in tensors:
        one = tensor.numel() * tensor.element_size()
        if pending and size + one > file_bytes:
            files.append(_write(pending, directory, len(files)))
            pending, size = {}, 0
        pending[name] = tensor.to("cpu", copy=True).contiguous()  # a view would keep the whole tensor alive
        size, total = size + one, total + one
    files.append(_write(pending, directory, len(files)))
    if len(files) == 1:
        _part(directory, 0).rename(directory / SINGLE)
        return
    finals = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for i, final in enumerate(finals):
        _part(directory, i).rename(directory / final)
    weight_map = {name: final for final, names in zip(finals, files, strict=True) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def save_configuration(weights: ModelWeights, model: Any, directory: Path, dtype: torch.dtype | None = None) -> None:
    """Write everything beside the weights: the source's files as they are, or the model's configuration.

    Config fields of tensors that are neither carried nor trained are left out; the config names the dtype asked for.
    """
    if weights.source is None:
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = dtype or _most_common(weights.dtypes)
        config.save_pretrained(directory)
        if model.can_generate():
            model.generation_config.save_pretrained(directory)
    else:
        for file in weights.source.other_files():
            shutil.copyfile(file, directory / file.name)
    path = directory / "config.json"
    before = json.loads(path.read_text())
    after = _edited(before, weights, dtype)
    if after != before:
        path.write_text(json.dumps(after, indent=2, sort_keys=True) + "\n")


def _edited(config: Mapping[str, Any], weights: ModelWeights, dtype: torch.dtype | None) -> dict[str, Any]:
    gone = {
        field for pattern, fields in weights.family.carried.items() if not weights.holds(pattern) for field in fields
    }
    out = {key: value for key, value in config.items() if key not in gone}
    for key in {"dtype", "torch_dtype"} & out.keys():
        if dtype is not None:
            out[key] = str(dtype).removeprefix("torch.")
    if "text_config" in out:
        out["text_config"] = _edited(out["text_config"], weights, dtype)
    return out


def _most_common(dtypes: Mapping[str, torch.dtype]) -> torch.dtype:
    values = list(dtypes.values())
    return max(set(values), key=values.count)


def _part(directory: Path, number: int) -> Path:
    return directory / f"part-{number}.safetensors"


def _write(tensors: dict[str, Tensor], directory: Path, number: int) -> list[str]:
    save_file(tensors, _part(directory, number), metadata={"format": "pt"})
    return list(tensors)
