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
    """How answers are sampled."""

    backend: Backend = "native"
    """"native" samples from the trained module's twin in this process, "vllm" through vLLM in one of its own, "openai"
    from what a server has, whose weights stay what they are."""
    max_batch: int = 512
    """Requests that decode together."""
    max_length: int | None = None
    """Prompt plus completion, in tokens; None: what the model's config says."""
    prefill_tokens: int = 16384
    """Prompt tokens of one forward pass."""
    compact_below: float = 0.75
    """Rows move together when less than this share of the batch's places works."""
    decoder: DecoderChoice = "auto"
    """"lean" is a forward pass of our own, "module" the module's; "auto" takes the first that can."""
    on_commit: OnCommit = "keep"
    """What new weights do to running requests: "keep" what the old ones computed, or "recompute" it."""
    admit: Admission = "any_step"
    """When a request may begin: beside whatever runs, or in "rounds", in which equal runs give equal bits."""
    keep_tokens: int = KEEP_TOKENS
    """Memory, in tokens, for finished requests' states that a next turn goes on from; 0: every prompt is read anew."""
    routed_experts: bool = False
    """Completions tell which experts of a mixture their tokens went to, for a trainer that replays them."""
    seed: int = 0
    """Of requests that bring no seed of their own."""
    vllm: VllmConfig = field(default_factory=VllmConfig)
    """What vLLM is told beyond that; see there."""
    openai: OpenAIConfig = field(default_factory=OpenAIConfig)
    """Where the server is; see there."""

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
