"""What the Megatron backend must know of a model: sizes and switches, read off a transformers config, and refusals."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from engines.capability import Supported, Unsupported
from engines.config import EngineConfig
from engines.extras import missing_extra_message
from engines.families.registry import registered_family
from engines.parallel.layout import ParallelLayout
from engines.parallel.stages import StageSizes

DENSE = ("qwen3", "qwen3_5_text")
ROUTED = ("qwen3_moe", "qwen3_5_moe_text")
GATED = ("qwen3_5_text", "qwen3_5_moe_text")
"""Model types whose attention has an output gate, and whose norms keep their weight as a distance from one."""
MBRIDGE_TYPES = ("qwen2", "llama")
"""Model types whose weights go by the tables of mbridge (`megatron.external_mappings.mbridge`): those that have run."""
MBRIDGE = "0.15.1"
EVEN = StageSizes()
EVIDENCE = Supported("proofs/megatron_layouts_test.py::test_every_layout_gives_the_steps_of_one_process")


@dataclass(frozen=True)
class DeltaSizes:
    """Heads of the gated delta net layers, and the taps of their convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def keys(self) -> int:
        """Number of rows of all keys."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Number of rows of all values."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class ExpertSizes:
    """Routed experts, and the shared one (0: none)."""

    experts: int
    top_k: int
    intermediate: int
    shared: int
    normalized: bool
    """Whether the chosen experts' weights are normalised to sum to one."""


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder in the field's names; `layer_types` has an entry a layer."""

    vocab: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    layer_types: tuple[str, ...]
    tied: bool
    gated: bool
    delta: DeltaSizes | None
    experts: ExpertSizes | None
    padding: int | None
    """Token whose embedding gets no gradient: `padding_idx` of torch's embedding."""
    decoder: str = "model."
    """Prefix of the names of the decoder's tensors, which is another in a vision-language model."""
    qk_norm: bool = True
    """Whether queries and keys are normalised."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias."""
    mtp: bool = False
    """Whether a head for multi-token prediction is trained with it."""

    def vocab_rows(self, tp: int) -> int:
        """Return the number of embedding rows on each tensor-parallel rank: the last one's may be padded."""
        return -(-self.vocab // tp)

    def vocabulary_of(self, rank: int, tp: int) -> range:
        """Return the tokens whose rows tensor-parallel rank `rank` has, without padding."""
        start = rank * self.vocab_rows(tp)
        return range(start, min(start + self.vocab_rows(tp), self.vocab))

    @staticmethod
    def of(config: Any, vision: bool = False) -> "ModelSizes":
        """Read a transformers config that `supported` admits; `vision`: that of its vision-language model."""
        text = config.get_text_config()
        layers = int(text.num_hidden_layers)
        types = tuple(getattr(text, "layer_types", None) or ["full_attention"] * layers)
        delta = None
        if "linear_attention" in types:
            delta = DeltaSizes(
                text.linear_num_key_heads,
                text.linear_num_value_heads,
                text.linear_key_head_dim,
                text.linear_value_head_dim,
                text.linear_conv_kernel_dim,
            )
        experts = None
        if text.model_type in ROUTED:
            experts = ExpertSizes(
                text.num_experts,
                text.num_experts_per_tok,
                text.moe_intermediate_size,
                getattr(text, "shared_expert_intermediate_size", None) or 0,
                text.model_type in GATED or bool(text.norm_topk_prob),
            )
        return ModelSizes(
            vocab=text.vocab_size,
            hidden=text.hidden_size,
            intermediate=getattr(text, "intermediate_size", None) or text.moe_intermediate_size,
            heads=text.num_attention_heads,
            kv_heads=text.num_key_value_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            eps=text.rms_norm_eps,
            layer_types=types,
            tied=bool(text.tie_word_embeddings),
            gated=text.model_type in GATED,
            delta=delta,
            experts=experts,
            padding=getattr(text, "pad_token_id", None),
            decoder="model.language_model." if vision else "model.",
        )


def supported(config: Any, layout: ParallelLayout, stages: StageSizes = EVEN) -> Supported | Unsupported:
    """Return whether a model of this transformers config runs on this layout under Megatron."""
    reason = _family(config.get_text_config()) or _layout(ModelSizes.of(config), layout)
    if reason is None:
        try:
            stages.split(len(ModelSizes.of(config).layer_types), layout.pp)
        except ValueError as error:
            reason = str(error)
    return EVIDENCE if reason is None else Unsupported(reason)


def stage_sizes(settings: EngineConfig) -> StageSizes:
    """Return the sizes of pipeline stages that the settings ask for."""
    return StageSizes(settings.virtual_pipeline_parallel, settings.first_stage_layers, settings.last_stage_layers)


def refuse_unsupported_model(settings: EngineConfig, config: Any, layout: ParallelLayout) -> None:
    """Raise ValueError with the reason where a model of this transformers config cannot run on this layout."""
    answer = supported(config, layout, stage_sizes(settings))
    if isinstance(answer, Unsupported):
        raise ValueError(f"backend='megatron' cannot run this: {answer.reason}; use backend='fsdp2', or change it")


def _family(text: Any) -> str | None:
    known = (*DENSE, *ROUTED, *MBRIDGE_TYPES)
    if text.model_type not in known:
        return f"{text.model_type!r} has no Megatron layer specification, only {', '.join(known)} have one"
    if text.model_type in MBRIDGE_TYPES and (version := _installed("mbridge")) != MBRIDGE:
        wanted = missing_extra_message(
            f"weights of {text.model_type!r} go by the tables of mbridge {MBRIDGE}", "mbridge"
        )
        return wanted if version is None else f"{wanted} (mbridge {version} has not been run)"
    for switch in ("attention_bias", "mlp_bias"):
        if getattr(text, switch, False):
            return f"{switch}=True: the layers of this backend have no such biases"
    if text.hidden_act != "silu":
        return f"hidden_act {text.hidden_act!r}: the layers of this backend compute silu (gelu: log-probs off by 0.7)"
    types = set(getattr(text, "layer_types", None) or ())
    if types - {"full_attention", "linear_attention"} or getattr(text, "use_sliding_window", False):
        return "sliding-window layers: the attention of this backend has no window (log-probs were off by 4.4)"
    mixed = getattr(text, "mlp_only_layers", None) or getattr(text, "decoder_sparse_step", 1) != 1
    if text.model_type in ROUTED and mixed:
        return "layers without experts between layers with experts: this backend gives all layers experts, or none"
    try:
        family = registered_family(text)
        assert family is not None  # of a known type
        family.check_config(text)
    except ValueError as error:
        return f"{error}. A proof that admits it is of FSDP2's layers"
    return None


def _installed(package: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _layout(sizes: ModelSizes, layout: ParallelLayout) -> str | None:
    divided = {"attention heads": sizes.heads, "key-value heads": sizes.kv_heads}
    if sizes.delta is not None:
        divided |= {"delta net key heads": sizes.delta.key_heads, "delta net value heads": sizes.delta.value_heads}
    if sizes.experts is None:
        divided["intermediate size"] = sizes.intermediate
    elif sizes.experts.shared:
        divided["shared expert's size"] = sizes.experts.shared
    for what, size in divided.items():
        if size % layout.tp:
            return f"{what} {size} cannot be split over tensor_parallel={layout.tp}"
    if sizes.vocab <= sizes.vocab_rows(layout.tp) * (layout.tp - 1):
        return f"vocabulary {sizes.vocab} leaves a rank of tensor_parallel={layout.tp} without rows"
    if sizes.experts is None and layout.ep * layout.etp > 1:
        return f"expert_parallel={layout.ep} and expert_tensor_parallel={layout.etp} need a model with experts"
    if sizes.experts is not None and sizes.experts.top_k == 1 and sizes.experts.normalized:
        return "one expert a token whose weight is made one is nothing that megatron-core's router does"
    if sizes.experts is not None and sizes.experts.experts % layout.ep:
        return f"{sizes.experts.experts} experts cannot be split over expert_parallel={layout.ep}"
    if sizes.experts is not None and sizes.experts.intermediate % layout.etp:
        return f"experts of width {sizes.experts.intermediate} cannot be split over expert_tensor_parallel={layout.etp}"
    return None
