"""The facts that the order of rows depends on. Each checkpoint has them, so that a resumed run continues with the next
rows."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from apps.sft.config import SftConfig
from apps.sft.data import Conversations
from engines.storage.directories import existing
from engines.storage.manifest import read_manifest

ORDER = "order"
"""Where a checkpoint has these facts."""


def row_order(config: SftConfig, conversations: Conversations) -> dict[str, Any]:
    """Return the facts as plain JSON: rows a step, the seed, and each file's name, weight, rows and their digest."""
    weights = conversations.weights
    return {
        "batch_size": config.batch_size,
        "seed": config.seed,
        "weights": None if weights is None else list(weights),
        "files": [
            {"name": name, "rows": rows, "digest": digest}
            for (name, digest), rows in zip(conversations.files, conversations.sizes, strict=True)
        ],
    }


def check_row_order(checkpoint: Path, order: Mapping[str, Any], run_dir: Path) -> None:
    """Raise ValueError where a resumed run would take other rows than those that were next at its checkpoint.

    A checkpoint of an earlier version does not say, and is taken.

    Raises:
        ValueError: each thing that changed by its name; or the checkpoint is none.
    """
    facts, _ = read_manifest(existing(checkpoint))
    then = facts.get("extra", {}).get(ORDER)
    if then is not None and (changes := [*_changes(then, order)]):
        raise ValueError(
            f"{checkpoint} can't be gone on from, as the next steps would take other rows than were next: "
            f"{'; '.join(changes)}. Set that back, or start a new run (from {run_dir / 'export'} with --model, if it "
            "is there)"
        )


def _changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    if then["batch_size"] != now["batch_size"]:
        yield f"--batch-size is {now['batch_size']}, it was {then['batch_size']}"
    if then["seed"] != now["seed"]:
        yield f"--seed is {now['seed']}, it was {then['seed']}"
    names, old_names = ([file["name"] for file in facts["files"]] for facts in (now, then))
    if names != old_names:
        yield f"--data has the files {', '.join(names)}, it had {', '.join(old_names)}"
        return
    if then["weights"] != now["weights"]:
        yield f"the weights of --data are {_weights(now)}, they were {_weights(then)}"
    for file, old in zip(now["files"], then["files"], strict=True):
        why = "(the file changed, or --max-tokens, --truncation, --eval-share, --eval-data or what is read of a row)"
        if file["rows"] != old["rows"]:
            yield f"{file['name']} has {file['rows']} rows to train on, it had {old['rows']} {why}"
        elif file["digest"] != old["digest"]:
            yield f"{file['name']} has other rows to train on than it had {why}"


def _weights(facts: Mapping[str, Any]) -> str:
    return "not given" if facts["weights"] is None else ", ".join(f"{weight:g}" for weight in facts["weights"])
