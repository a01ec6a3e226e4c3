"""What a proof has compared: written to the run directory, cached by what it depends on, shown in the report."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

import seqpack.ops as seqpack_ops
from engines.families.own_family import depends_on
from engines.families.registry import checked_part, digest

_ENGINES = ("families", "inputs", "prove", "scoring")
"""Folders of this library whose code a proof runs."""
_SWITCHES = (
    *("ATEN_", "CUBLAS_", "CUDA_LAUNCH", "CUDNN_", "FLA_", "MKL_", "NCCL_ALGO", "NVIDIA_TF32", "NVTE_"),
    *("ONEDNN_", "PYTORCH_", "TILELANG_", "TORCH", "TRITON_"),
)
"""Beginnings of the names of environment variables that may change numbers."""


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
    """Largest difference of a log-prob of padded rows, infinite where they differ; None where not compared."""
    sensitivity: Mapping[str, float]
    """Change of a log-prob by planted error: the largest, of a changed config field one that is large enough."""
    not_exercised: tuple[str, ...]
    """Config fields that the modelling code names, and that moved no number of stock transformers here far enough."""
    problems: tuple[str, ...]
    """Why the proof failed; empty where it holds."""
    seconds: float
    versions: Mapping[str, str]
    subject: str = "packed rows"
    """What was held to stock transformers: "packed rows" of a type in small, "options" on ranks, a "device" with its
    kernels and dtype."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the engine that the proof ran with."""
    stock_error: float | None = None
    """Largest difference of a log-prob of stock transformers itself, in the run's dtype, from the plain result."""
    place: Mapping[str, str] = field(default_factory=dict)
    """Device, driver, and environment variables that may change numbers."""
    differences: Mapping[str, float] = field(default_factory=dict)
    """Largest relative differences of what else was compared."""

    @property
    def hash(self) -> str:
        """The digest of all that it says but the time it took."""
        values = {name: value for name, value in asdict(self).items() if name != "seconds"}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def holds(self) -> bool:
        """Whether packed rows were equal, and each planted error was seen."""
        return not self.problems

    def admits(self, batching: str = "packed") -> bool:
        """Return whether a run with this batching may stand on it: only its own rows need be equal."""
        return self.holds if batching != "padded" or self.padded is None else self.padded < float("inf")

    def __str__(self) -> str:
        """Return the line for a terminal."""
        verdict = f"{self.subject} equal stock transformers" if self.holds else "; ".join(self.problems)
        return (
            f"proof of {self.model_type} ({self.width} width, {len(self.lengths)} lengths up to {max(self.lengths)}, "
            f"{self.seconds:.1f} s): {verdict} (log-probs {self.log_probs:.1e}, gradients {self.gradients:.1e})"
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values, with its hash."""
        return {**asdict(self), "hash": self.hash}

    def save(self, path: Path) -> None:
        """Write it as JSON: whole, or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        part.replace(path)

    @staticmethod
    def load(path: Path) -> "Certificate":
        """Read one; ValueError where the file holds another thing."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            tuples = {name: tuple(values[name]) for name in ("lengths", "not_exercised", "problems")}
            written = values.pop("hash")
            certificate = Certificate(**{**values, **tuples})
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no certificate: {error}") from error
        if certificate.hash != written:
            raise ValueError(f"{path} was changed after it was written: delete it")
        return certificate


def versions() -> dict[str, str]:
    """Return what a proof depends on beside the config: packages, the processor, and this code itself."""
    packages = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {**packages, "processor": platform.machine(), "code": _code()}


def _code() -> str:
    """Return a digest of the code that a proof runs: a change of it makes earlier certificates void."""
    engines, seqpack = Path(__file__).parents[1], Path(seqpack_ops.__file__).parents[1]
    return code(*(engines / name for name in _ENGINES), seqpack / "adapters", seqpack / "ops")


@cache
def code(*folders: Path) -> str:
    """Return a digest of the code in these folders, without tests."""
    files = [file for folder in folders for file in sorted(folder.rglob("*.py")) if not file.name.endswith("_test.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def place(device: torch.device | str = "cpu") -> dict[str, str]:
    """Return what a proof depends on beside the code: the device, its driver, environment variables."""
    device = torch.device(device)
    variables = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_SWITCHES) and not (name.startswith("TORCHELASTIC_") or name.endswith("CACHE_DIR"))
    }  # torchrun's name a run, and torch itself sets the folder of its compiler
    if device.type != "cuda":
        return {"device": device.type, **variables}
    driver = Path("/proc/driver/nvidia/version")
    line = driver.read_text(encoding="utf-8").splitlines()[0] if driver.is_file() else "unknown"
    return {"device": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda), "driver": line, **variables}


def cached_at(config: Any, subject: str = "packed rows", depends: Mapping[str, Any] | None = None) -> Path:
    """Return where the certificate of a config is cached, by its digest, the versions, and what else it `depends` on:
    options, the place."""
    folder = os.environ.get("TESSERA_CERTIFICATES") or Path.home() / ".cache" / "tessera" / "certificates"
    part, known = checked_part(config), [versions(), subject, dict(depends or {})]
    if (own := depends_on(part)) is not None:
        known.append(own)
    key = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:8]
    name = f"{part.model_type}-{digest(part)}-{subject.replace(' ', '-')}-{key}.json"
    return Path(folder) / name
