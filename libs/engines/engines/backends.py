"""Training backends by name, each with the places of its parts, which are imported on first use."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pkgutil import resolve_name

from engines.extras import missing_extra_message
from seqpack.capability import Supported, Unsupported


@dataclass(frozen=True)
class TrainBackend:
    """Backend of an `EngineConfig`. Its parts are "module:object"."""

    builder: str
    """Function of (config, model, trainable) that returns a `TrainEngine`; see `engines.build_engine`."""
    feature_table: str
    """Features, each with `Supported` or `Unsupported`; "cpu" is also whether the backend is supported at all."""
    package: str | None = None
    """Package that it needs beside those of this library, and that the extra of the backend's name installs."""

    @property
    def features(self) -> Mapping[str, Supported | Unsupported]:
        """The features of the backend, each with its answer."""
        table: Mapping[str, Supported | Unsupported] = resolve_name(self.feature_table)
        return table


TRAIN_BACKENDS: dict[str, TrainBackend] = {
    "fsdp2": TrainBackend("engines.build:build_fsdp2_engine", "engines.capability:FSDP2"),
    "megatron": TrainBackend(
        "engines.megatron.build:build_megatron_engine", "engines.capability:MEGATRON", package="megatron-core"
    ),
}


def register_train_backend(name: str, backend: TrainBackend) -> None:
    """Make a backend known to `EngineConfig.backend`; ValueError for a name that another backend has."""
    if TRAIN_BACKENDS.setdefault(name, backend) != backend:
        raise ValueError(f"backend {name!r} is another one already: choose another name")


def check_backend(name: str) -> str:
    """Return the name of a backend; ValueError lists the known ones for another name."""
    if name not in TRAIN_BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, TRAIN_BACKENDS))}, got {name!r}")
    return name


def supports_backend(name: str) -> Supported | Unsupported:
    """Return whether a backend can run in this installation."""
    backend = TRAIN_BACKENDS[name]
    if backend.package is not None and not _is_installed(backend.package.replace("-", ".")):
        return Unsupported(missing_extra_message(f"{backend.package} is not installed", name))
    return backend.features["cpu"]


def _is_installed(module: str) -> bool:
    parent = module.rpartition(".")[0]
    return (not parent or find_spec(parent) is not None) and find_spec(module) is not None
