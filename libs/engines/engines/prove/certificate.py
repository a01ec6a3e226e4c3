"""What a proof has compared: written to the run directory, cached by what it depends on, shown in the report."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

import seqpack.ops as seqpack_ops
from engines.families.registry import digest

_ENGINES = ("families", "inputs", "prove", "scoring")
"""Folders of this library whose code a proof runs."""


@dataclass(frozen=True)
class Certificate:
    """One proof: packed layers against stock transformers, one sequence at a time."""

    model_type: str
    config: str
    """Digest of the config."""
    width: str
    """"small": sizes and thresholds were lowered; "true": one layer of each kind with the config's own sizes."""
    lengths: tuple[int, ...]
    log_probs: float
    """Largest difference of a log-prob."""
    gradients: float
    """Largest difference of a gradient, relative to its parameter's largest entry."""
    padded: float | None
    """Largest difference of a log-prob of padded rows; None where packed rows were equal."""
    sensitivity: Mapping[str, float]
    """Largest change of a log-prob by planted error."""
    not_exercised: tuple[str, ...]
    """Config fields that the modelling code names, and that moved no number of stock transformers here."""
    problems: tuple[str, ...]
    """Why the proof failed; empty where it holds."""
    seconds: float
    versions: Mapping[str, str]

    @property
    def holds(self) -> bool:
        """Whether packed rows were equal, and each planted error was seen."""
        return not self.problems

    def __str__(self) -> str:
        """Return the line for a terminal."""
        verdict = "packed rows equal stock transformers" if self.holds else "; ".join(self.problems)
        return (
            f"proof of {self.model_type} ({self.width} width, {len(self.lengths)} lengths up to {max(self.lengths)}, "
            f"{self.seconds:.1f} s): {verdict} (log-probs {self.log_probs:.1e}, gradients {self.gradients:.1e})"
        )

    def save(self, path: Path) -> None:
        """Write it as JSON: whole, or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        part.replace(path)

    @staticmethod
    def load(path: Path) -> "Certificate":
        """Read one; ValueError where the file holds another thing."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            tuples = {name: tuple(values[name]) for name in ("lengths", "not_exercised", "problems")}
            return Certificate(**{**values, **tuples})
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no certificate: {error}") from error


def versions() -> dict[str, str]:
    """Return what a proof depends on beside the config: packages, the processor, and this code itself."""
    packages = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {**packages, "processor": platform.machine(), "code": _code()}


@cache
def _code() -> str:
    """Return a digest of the code that a proof runs: a change of it makes earlier certificates void."""
    engines, seqpack = Path(__file__).parents[1], Path(seqpack_ops.__file__).parents[1]
    folders = (*(engines / name for name in _ENGINES), seqpack / "adapters", seqpack / "ops")
    files = [file for folder in folders for file in sorted(folder.glob("*.py")) if not file.name.endswith("_test.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def cached_at(config: Any) -> Path:
    """Return where the certificate of a config is cached, by its digest and the versions."""
    folder = os.environ.get("TESSERA_CERTIFICATES") or Path.home() / ".cache" / "tessera" / "certificates"
    known = hashlib.sha256(json.dumps(versions(), sort_keys=True).encode()).hexdigest()[:8]
    return Path(folder) / f"{config.get_text_config().model_type}-{digest(config.get_text_config())}-{known}.json"
