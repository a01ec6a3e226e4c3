"""Every setting of a rollout engine, checked when it is made."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from rollout.backends import ENGINE_BACKENDS, OwnSettings, load

if TYPE_CHECKING:  # imported where they are used
    from rollout.openai.settings.config import OpenAIConfig
    from rollout.vllm.settings.config import VllmConfig

Backend = Literal["native", "vllm", "openai"]
DecoderChoice = Literal["auto", "lean", "module"]
OnCommit = Literal["keep", "recompute"]
Admission = Literal["any_step", "rounds"]
KEEP_TOKENS = 65536
CACHE_PART = 4
"""Where the native engine's caches have a bound, its prefix cache and the prompts that it holds get this part each."""


@dataclass(frozen=True)
class RolloutConfig:
    """Settings of sampling."""

    backend: Backend = "native"
    """"native" samples from a module in this process (the trained module's twin), "vllm" through vLLM in processes of
    its own, "openai" through a server whose weights never change."""
    max_batch: int = 512
    """Most requests that decode together."""
    max_length: int | None = None
    """Most tokens of prompt and completion together; None: what the model's config says."""
    prefill_tokens: int = 16384
    """Number of prompt tokens of one forward pass."""
    compact_below: float = 0.75
    """Rows are moved together when less than this share of the batch's slots is in use."""
    decoder: DecoderChoice = "auto"
    """"lean" is a forward pass of our own, "module" the module's; "auto" takes the first that can."""
    on_commit: OnCommit = "keep"
    """What new weights do to the caches of running requests: "keep" them, or "recompute" them."""
    admit: Admission = "any_step"
    """When a request may begin: beside running ones, or in "rounds", in which equal runs give equal bits."""
    keep_tokens: int = KEEP_TOKENS
    """Size of the prefix cache in tokens: states of finished requests for next turns; 0: prompts are read anew."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of all caches: of running requests, of prompts and of the prefix cache; None: no bound but `max_batch`."""
    routed_experts: bool = False
    """Whether completions say which experts of a mixture read their tokens, for a trainer that replays them."""
    tokenizer: Path | None = None
    """Directory of the model's tokenizer, for structured outputs alone; without it they are refused."""
    seed: int = 0
    """Seed for requests that bring none of their own."""
    vllm: OwnSettings["VllmConfig"] = OwnSettings()  # noqa: RUF009  a descriptor
    """Further settings of vLLM."""
    openai: OwnSettings["OpenAIConfig"] = OwnSettings()  # noqa: RUF009  a descriptor
    """Address and settings of the server."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("backend", Backend),
            ("decoder", DecoderChoice),
            ("on_commit", OnCommit),
            ("admit", Admission),
        ):
            value = getattr(self, name)
            if value not in get_args(choices):
                raise ValueError(f"{name} is one of {', '.join(get_args(choices))}, got {value!r}")
        counts = (("max_batch", 1), ("max_length", 1), ("prefill_tokens", 1), ("keep_tokens", 0))
        for name, least in (*counts, ("kv_cache_memory_bytes", 1)):
            value = getattr(self, name)
            if value is None and name in ("max_length", "kv_cache_memory_bytes"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if not isinstance(self.routed_experts, bool):
            raise ValueError(f"routed_experts is true or false, got {self.routed_experts!r}")
        if not isinstance(self.tokenizer, Path | None):
            raise ValueError(f"tokenizer is a pathlib.Path of a directory, got {self.tokenizer!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed must be a whole number, got {self.seed!r}")
        if not 0 <= self.compact_below <= 1:
            raise ValueError(f"compact_below is a share in [0, 1], got {self.compact_below!r}")
        self._check_backend()

    def _check_backend(self) -> None:
        """Raise ValueError for settings of another backend, or that this one refuses together."""
        backend = ENGINE_BACKENDS[self.backend]
        for item in fields(self):
            if isinstance(item.default, OwnSettings):
                item.default.check(self)
        if backend.settings_check is not None:
            load(backend.settings_check)(self)
        for item in fields(self):
            if isinstance(item.default, OwnSettings):
                idle = item.name != self.backend and not item.default.is_default(self)
            else:
                idle = item.name in backend.ignored and getattr(self, item.name) != item.default
            if idle:
                raise ValueError(f"{item.name} has no effect with backend {self.backend!r}: leave it out")
