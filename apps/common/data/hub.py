"""Data sets of the Hugging Face hub by their names: from the local cache, or through `datasets` where it is there."""

import hashlib
import importlib.util
import os
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError


def snapshot_of(repository: str, subset: str | None, split: str) -> Path:
    """Return the directory of a data set in the cache of the hub, or the file that `datasets` made of a split.

    Raises:
        ValueError: it is not in the cache, and `datasets` is not installed or can't fetch it; the text says what helps.
    """
    try:
        directory = Path(snapshot_download(repository, repo_type="dataset", local_files_only=True))
        if any(directory.rglob("*.*")):
            return directory
        why = "its snapshot in the cache is empty"
    except (LocalEntryNotFoundError, HFValidationError) as error:
        why = str(error).splitlines()[0]
    if importlib.util.find_spec("datasets") is not None:
        made = _through_datasets(repository, subset, split)
        if isinstance(made, Path):
            return made
        why = made
    raise ValueError(
        f"{repository} is no local file, and no data set that can be read here ({why}). Where there is a network, run "
        f"hf download {repository} --repo-type dataset (the cache is {constants.HF_HUB_CACHE}; HF_HOME moves it), or "
        "name local files"
    )


def _through_datasets(repository: str, subset: str | None, split: str) -> Path | str:
    """Return a Parquet file of the split in the cache of `datasets`, or why there is none."""
    import datasets  # installed where hub names are read through it

    try:
        rows = datasets.load_dataset(repository, subset, split=split)
    except (OSError, ValueError, HfHubHTTPError, datasets.exceptions.DatasetsError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    made_of = [repository, subset, split, [file["filename"] for file in rows.cache_files]]
    key = hashlib.blake2b(repr(made_of).encode(), digest_size=6).hexdigest()
    path = Path(datasets.config.HF_DATASETS_CACHE) / "rows" / f"{repository.replace('/', '--')}-{split}-{key}.parquet"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        rows.to_parquet(str(temporary))
        os.replace(temporary, path)
    return path
