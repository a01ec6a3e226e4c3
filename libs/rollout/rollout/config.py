"""Every setting of a rollout engine, checked when it is made."""

from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from rollout.openai.settings.config import OpenAIConfig
from rollout.vllm.settings.config import VllmConfig

Backend = Literal["native", "vllm", "openai"]
DecoderChoice = Literal["auto", "lean", "module"]
OnCommit = Literal["keep", "recompute"]
Admission = Literal["any_step", "rounds"]
KEEP_TOKENS = 65536
_NESTED: dict[str, type[VllmConfig] | type[OpenAIConfig]] = {"vllm": VllmConfig, "openai": OpenAIConfig}
_OF_A_SERVER = ("prefill_tokens", "compact_below", "decoder", "on_commit", "admit", "keep_tokens", "routed_experts")
_WITHOUT_EFFECT: dict[str, tuple[str, ...]] = {
    "native": ("vllm", "openai"),
    "vllm": ("compact_below", "decoder", "admit", "keep_tokens", "openai"),
    "openai": (*_OF_A_SERVER, "vllm"),
}


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
    routed_experts: bool = False
    """Whether completions say which experts of a mixture read their tokens, for a trainer that replays them."""
    seed: int = 0
    """Seed for requests that bring none of their own."""
    vllm: VllmConfig = field(default_factory=VllmConfig)
    """Further settings of vLLM."""
    openai: OpenAIConfig = field(default_factory=OpenAIConfig)
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
        for name, least in (("max_batch", 1), ("max_length", 1), ("prefill_tokens", 1), ("keep_tokens", 0)):
            value = getattr(self, name)
            if value is None and name == "max_length":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if not isinstance(self.routed_experts, bool):
            raise ValueError(f"routed_experts is true or false, got {self.routed_experts!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed must be a whole number, got {self.seed!r}")
        if not 0 <= self.compact_below <= 1:
            raise ValueError(f"compact_below is a share in [0, 1], got {self.compact_below!r}")
        for name, kind in _NESTED.items():
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} is a {kind.__name__}, got {getattr(self, name)!r}")
        if self.routed_experts and self.vllm.experts_over_copies and self.vllm.tensor_parallel > 1:
            raise ValueError(
                "routed_experts can't be told where copies of several workers share experts, as each worker routes a "
                "part of the tokens: set tensor_parallel=1, or leave experts_over_copies off"
            )
        if self.routed_experts and self.vllm.graph_sizes:
            raise ValueError(
                "routed_experts are noted by Python between layers, which a graph leaves out: no graph_sizes"
            )
        for item in fields(self):
            usual = _NESTED[item.name]() if item.name in _NESTED else item.default
            if item.name in _WITHOUT_EFFECT[self.backend] and getattr(self, item.name) != usual:
                raise ValueError(f"{item.name} has no effect with backend {self.backend!r}: leave it out")
