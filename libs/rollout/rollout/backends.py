"""The backends by name, each with the places of its parts, which are imported on first use."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar, overload

from seqpack.capability import Supported, Unsupported

T = TypeVar("T")


@dataclass(frozen=True)
class EngineBackend:
    """Backend of a `RolloutConfig`. Its parts are "module:object"."""

    builder: str
    """Function of (config, model, pad_token_id, version) that returns the engine."""
    feature_table: str
    """Features, each with `Supported` or `Unsupported`; "cpu" is also whether the backend is supported at all."""
    settings: str | None = None
    """Class of the settings that it alone has: the field of `RolloutConfig` with its name."""
    settings_check: str | None = None
    """Function of a `RolloutConfig` that raises ValueError for settings that exclude each other."""
    ignored: tuple[str, ...] = ()
    """Fields of `RolloutConfig` without effect on it, beside the settings of other backends."""

    @property
    def features(self) -> Mapping[str, Supported | Unsupported]:
        """The features of the backend, each with its answer."""
        table: Mapping[str, Supported | Unsupported] = load(self.feature_table)
        return table

    def settings_class(self) -> type[Any]:
        """Return the class of the backend's own settings."""
        assert self.settings is not None
        kind: type[Any] = load(self.settings)
        return kind


ENGINE_BACKENDS = {
    "native": EngineBackend("rollout.native.backend:build", "rollout.capability:NATIVE"),
    "vllm": EngineBackend(
        "rollout.vllm.backend:build",
        "rollout.vllm.limits.capability:VLLM",
        "rollout.vllm.settings.config:VllmConfig",
        "rollout.vllm.settings.config:check_routed_experts",
        ignored=("compact_below", "decoder", "admit", "keep_tokens", "kv_cache_memory_bytes"),
    ),
    "openai": EngineBackend(
        "rollout.openai.backend:build",
        "rollout.openai.settings.capability:OPENAI",
        "rollout.openai.settings.config:OpenAIConfig",
        ignored=(
            "prefill_tokens",
            "compact_below",
            "decoder",
            "on_commit",
            "admit",
            "keep_tokens",
            "kv_cache_memory_bytes",
            "routed_experts",
            "tokenizer",
        ),
    ),
}


def load(part: str) -> Any:
    """Return a part of a backend.

    Raises:
        ValueError: its package is not in this installation.
    """
    module, _, name = part.partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks something itself
        raise ValueError(f"this installation has no {error.name} ({part})") from error


class EachBackend(Mapping[str, T]):
    """A part of each backend by name, imported on first use."""

    def __init__(self, value: Callable[[EngineBackend], T]) -> None:
        self._value = value

    def __getitem__(self, name: str) -> T:
        return self._value(ENGINE_BACKENDS[name])

    def __iter__(self) -> Iterator[str]:
        return iter(ENGINE_BACKENDS)

    def __len__(self) -> int:
        return len(ENGINE_BACKENDS)

    def __contains__(self, name: object) -> bool:
        return name in ENGINE_BACKENDS


class OwnSettings(Generic[T]):
    """Field of a dataclass with the settings of the backend of its name: the defaults where it is left out.

    The backend's settings are imported when the field is read or given.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, config: None, owner: type) -> "OwnSettings[T]": ...

    @overload
    def __get__(self, config: object, owner: type) -> T: ...

    def __get__(self, config: object | None, owner: type) -> Any:
        if config is None:
            return self  # the field's default, which stands for the backend's defaults
        return vars(config)[self.name] if self.is_given(config) else self.settings_class()()

    def __set__(self, config: object, value: T) -> None:
        if value is not self:
            vars(config)[self.name] = value

    def is_given(self, config: object) -> bool:
        """Return whether the settings were named where the configuration was made."""
        return self.name in vars(config)

    def is_default(self, config: object) -> bool:
        """Return whether nothing of the settings was changed."""
        return not self.is_given(config) or bool(vars(config)[self.name] == self.settings_class()())

    def check(self, config: object) -> None:
        """Raise ValueError for a value of another class."""
        if self.is_given(config) and not isinstance(vars(config)[self.name], kind := self.settings_class()):
            raise ValueError(f"{self.name} is a {kind.__name__}, got {vars(config)[self.name]!r}")

    def settings_class(self) -> type[Any]:
        """Return the class of the settings."""
        return ENGINE_BACKENDS[self.name].settings_class()
