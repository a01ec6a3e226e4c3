"""Names of models on the Hugging Face hub: the local snapshot of a repository, downloaded where there is a network."""

import re
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from seqpack.comm.collectives import broadcast_plain

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_DESCRIPTION = ["*.json", "*.jinja", "*.txt", "*.model"]
_FILES = ["*.safetensors", *_DESCRIPTION]
_OLDER = "pytorch_model*.bin"
"""Weights of a repository that has no safetensors."""


def model_directory(model: str | Path) -> Path:
    """Return the directory of a model: a local one, or the snapshot of `OWNER/NAME` (or `OWNER/NAME@REVISION`).

    A local directory is taken as it is, and so is what looks like no name: whoever reads it says what is missing. A
    snapshot comes from the cache or the hub (huggingface_hub with its own settings: HF_HOME, HF_HUB_OFFLINE, ...).
    Collective: rank 0 fetches, the others use its directory or, on another machine, fetch for themselves. ValueError
    where there is neither a directory nor a snapshot.
    """
    path = Path(model)
    if path.exists() or not _NAME.fullmatch(str(model)):
        return path
    many = dist.is_initialized() and dist.get_world_size() > 1
    if not many:
        return _result(_fetched(str(model)))
    first = _result(broadcast_plain(_fetched(str(model)) if dist.get_rank() == 0 else None))
    return first if first.is_dir() else _result(_fetched(str(model)))


def description_directory(model: str | Path) -> Path:
    """Return a directory with config and tokenizer of a model: a local one, or a snapshot of the hub without weights.

    It has those that an earlier call of `model_directory` fetched. ValueError: see `model_directory`.
    """
    path = Path(model)
    if path.exists() or not _NAME.fullmatch(str(model)):
        return path
    return _result(_fetched(str(model), weights=False))


def _fetched(name: str, weights: bool = True) -> Path | str:
    """Return the snapshot, or the reason why there is none."""
    repository, _, revision = name.partition("@")
    wanted: Any = {"revision": revision or None}
    try:
        return _snapshot(repository, weights, **wanted)
    except (OSError, HFValidationError, *_transport_errors()) as error:
        text = str(error).strip() or type(error).__name__
    try:  # before 2.0 a commit that is named is asked for, though its snapshot is there
        return _snapshot(repository, weights, **wanted, local_files_only=True)
    except (OSError, HFValidationError):
        return f"{name} is no local directory, and huggingface_hub has no snapshot of it: {text.splitlines()[0]}"


def _snapshot(repository: str, weights: bool, **options: Any) -> Path:
    if not weights:
        return Path(snapshot_download(repository, **options, allow_patterns=_DESCRIPTION))
    directory = Path(snapshot_download(repository, **options, allow_patterns=_FILES))
    if any(directory.rglob("*.safetensors")):
        return directory
    return Path(snapshot_download(repository, **options, allow_patterns=[*_FILES, _OLDER]))


def _transport_errors() -> tuple[type[Exception], ...]:
    """Return the errors of the HTTP packages that huggingface_hub uses; it lets some of them pass."""
    return tuple(sys.modules[name].TransportError for name in ("httpx", "httpx2") if name in sys.modules)


def _result(path_or_error: Path | str) -> Path:
    if isinstance(path_or_error, str):
        raise ValueError(path_or_error)
    return path_or_error
