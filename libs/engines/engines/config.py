"""The configuration of an engine: one frozen dataclass, checked when it is made."""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, Literal, TypedDict, get_args, get_origin

from engines.backends import check_backend
from engines.lora_config import LoraConfig
from seqpack.extensions.load_object import is_user_code


class Adam(TypedDict, total=False):
    """Settings of one update, in place of the configuration's."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float | None


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine. A value that cannot work is a ValueError here, before any model is loaded."""

    model: str | None = None
    """A Hugging Face model directory, or OWNER/NAME[@REVISION] on the hub; None when a module is passed."""
    backend: str = "fsdp2"
    """"fsdp2", "megatron", or one of `engines.register_train_backend`."""
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """"auto" is cuda where there is one, else cpu."""
    npu_operators: Literal["auto", "off"] = "auto"
    """On device npu, RMSNorm, rotary embedding, SwiGLU and experts by torch_npu's operators ("auto"), or all by torch's
    own ("off"), whose results are those of other devices to the last bits."""
    batching: Literal["packed", "padded"] = "packed"
    """"padded" is the plain reference path: rows padded to the longest of their micro-batch, the model untouched."""
    max_tokens_per_rank: int = 16384
    """Hard cap on the tokens of one rank's micro-batch."""
    context_parallel: str = "off"
    """"off", "static:N" or "dynamic"."""
    tensor_parallel: int = 1
    """Ranks that share every layer (backend megatron); they share its tokens between layers too."""
    pipeline_parallel: int = 1
    """Stages of layers, on ranks of their own (backend megatron)."""
    virtual_pipeline_parallel: int = 1
    """Interleaved stages of layers on each pipeline rank: less waiting, more messages (backend megatron)."""
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage, which has the embedding too; None splits evenly (backend megatron)."""
    last_stage_layers: int | None = None
    """Layers of the last pipeline stage, which has the head too (backend megatron)."""
    expert_parallel: int = 1
    """Ranks that share the experts of a layer (of a stage, under Megatron): tokens travel to theirs."""
    expert_tensor_parallel: int = 1
    """Ranks that share each expert's matrices (backend megatron)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype that the model computes in; "auto" is float32 on a CPU and bfloat16 elsewhere."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters and optimizer states."""
    moments_dtype: Literal["auto", "bfloat16"] = "auto"
    """Dtype of AdamW's moments: "auto" is that of the parameters, "bfloat16" halves them beside float32 parameters
    (`engines.execution.bfloat16_adamw`; backend fsdp2)."""
    skip_zero_gradient_rows: bool = True
    """Leave out rows that add exactly nothing to loss and gradient (an objective says which), such as those of
    groups with equal rewards. Metrics then speak of the computed rows alone."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Run decoder layers and head as compiled functions over fused kernels: "auto" where that can be (but behind
    a vision tower). "on" compiles other types' layers as they are, once they equal plain ones in small, or is an error
    with the reason."""
    weights: Literal["auto", "sharded", "replicated"] = "auto"
    """"sharded" over all ranks (FSDP2), or whole on each with float32 values and moments sharded: faster, two bytes
    a parameter more. "auto" replicates on a single GPU, and leaves the weights of a single CPU process as they are."""
    shard_ranks: int | None = None
    """Hybrid sharding: this many neighbouring ranks share the weights and their optimizer states, and each such group
    has a copy of them. Weights are gathered within a group, and gradients added up across copies once a step. A divisor
    of the ranks; None shares them over all (backend fsdp2). What expert_parallel shares is shared over all ranks."""
    vision: Literal["off", "frozen", "trained"] = "off"
    """The vision tower of a vision-language model. "off": the model is trained on text, and the tower goes into every
    export as it was. "frozen": it sees images, and stays as it was. "trained": it is trained with the rest."""
    gradient_checkpointing: bool = False
    """Keep a layer's inputs alone, and compute it again in the backward pass."""
    activation_offload: bool = False
    """Keep these inputs in host memory until the backward pass (backend fsdp2)."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass (less memory, one more gather)."""
    temperature: float = 1.0
    """Log-probs are those of softmax(logits / temperature); give the sampler's."""
    logit_chunk: int = 4096
    """Tokens whose logits are in memory at once."""

    collective_timeout_seconds: int | None = None
    """Timeout of collectives in every process group; None is torch's own. The default group must be made with the same
    (`engines.launch`)."""

    lora: LoraConfig = field(default_factory=LoraConfig)
    """Train low-rank adapters in place of the weights."""

    router_aux_loss_coef: float | None = None
    """Coefficient of a router's load-balancing loss; None keeps the model's own, 0 trains without that loss."""
    router_forwards_ahead: int | None = None
    """Micro-batches beside the first whose forward pass runs before the first backward pass, and spares a pass that
    counts for the balancing loss (not with pipeline stages). Their activations stay meanwhile. None: the apps run as
    many ahead as fit the device by their plan, an engine alone none."""
    router_z_loss_coef: float = 0.0
    """Coefficient of a router's z-loss, the squared log-partition of its logits: a mean over tokens, summed over
    layers, as megatron-core's `moe_z_loss_coeff`."""
    routing_replay: bool = False
    """Send every token to the experts that the batch's `routed_experts` names (those that it was sampled through),
    where it names some; in `forward` too."""

    mtp_loss_scaling_factor: float | None = None
    """Train the head for multi-token prediction (`mtp.*`) by this multiple of its cross entropy, on detached hidden
    states: the model's own gradient stays as it is. None: the head goes into every export as it was."""

    lr: float = 1e-5
    """Learning rate after the warmup."""
    learning_rates: tuple[str, ...] = ()
    """PATTERN=LR: another learning rate for the parameters whose names on disk hold the regular expression, such as
    `embed_tokens`, `visual`, `\\.mlp\\.gate\\.` (routers) or `lora_B`; where several do, the first counts. The
    schedule scales them all alike."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warmup, down to `min_lr_ratio` of it at `total_steps`."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""
    total_steps: int | None = None
    """Step at which "linear" and "cosine" end; None for "constant"."""
    min_lr_ratio: float = 0.0
    """Share of the learning rate at which "linear" and "cosine" end."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """"muon" updates the matrices of decoder layers by Muon (Jordan et al. 2024), with the learning rate and decay that
    AdamW would have, and all else by AdamW: 4 bytes of moments a parameter of a matrix in place of 8."""
    muon_momentum: float = 0.95
    """Momentum of Muon (Nesterov's)."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's beta1 and beta2."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """Weight decay of matrices; norms, biases and other vectors are never decayed."""
    transformer_options: tuple[str, ...] = ()
    """NAME=VALUE fields of megatron-core's TransformerConfig, beside those that follow from the model and these
    settings (backend megatron)."""
    optimizer_on_host: bool = False
    """Keep optimizer states in host memory. Megatron's float32 weights are there too, and step there; FSDP2 brings the
    states of one parameter after another to the device, and updates there, bit for bit as without."""
    parameters_on_host: bool = False
    """Keep parameters and gradients in host memory too (with `optimizer_on_host`): those of a layer come to the device
    while it computes, those of one parameter after another for its update, bit for bit as without (backend fsdp2)."""
    megatron_optimizer: Literal["auto", "torch", "core"] = "auto"
    """Optimizer of Megatron's weights: torch's AdamW, or megatron-core's own optimizer ("core"), which runs Transformer
    Engine's or apex's fused Adam where one is installed. "auto" is megatron-core's on a GPU where it runs what is asked
    for, else torch's. A checkpoint of either resumes under the other (backend megatron)."""
    distributed_optimizer: bool = False
    """Shard optimizer states and float32 weights over the ranks that hold the same weights (backend megatron)."""
    grad_clip: float | None = 1.0
    """Largest global gradient norm; None clips nothing."""

    prove: Literal["off", "cached", "always", "full"] = "cached"
    """What admits a model that no family here describes, and options that no test has run together: a comparison with
    stock transformers in small, kept for the next start ("cached"), made anew ("always"), or nothing ("off"). "full"
    compares every model also at its true width and lengths, on a CPU too (slowly), and options on the run's devices;
    both are kept."""
    allow_untested: tuple[str, ...] = ()
    """Names of what may go untested: config fields of such a model that no part of its proof exercised, and hardware
    that was not at hand ("npu", "nodes", "teacher")."""

    recheck_every: int = 50
    """The first batch, then one every so many, is checked while it trains: some of its sequences are scored alone by
    the stock model, and log-probs that differ by more than `recheck_bound` end the run. 0: the first batch alone."""
    recheck_rows: int = 2
    """Sequences of each rank that are scored so: a short one and a long one, then others. 0 checks nothing."""
    recheck_tokens: int = 4096
    """Most tokens of such a sequence; of a longer one its beginning is scored."""
    recheck_bound: float | None = None
    """Largest difference of log-probs, as a root mean square over a sequence's tokens; None is 1e-3 in float32 and
    0.25 in bfloat16."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Reaction to a loss or gradient that is NaN or infinite, always without an update: "stop" ends the run with
    `engines.NonFiniteError`, "skip" continues with the next batch, and ends it at the tenth such step in a row."""
    family: str | None = None
    """A model family of your own: an engines.families.family.Family, or what makes one, as FILE.py:NAME or
    package.module:NAME. It describes a type that no registered family does, and is proven like one without any."""
    family_options: tuple[str, ...] = ()
    """NAME=VALUE options of a function that makes the family."""

    def __post_init__(self) -> None:
        if problems := [*self.problems()]:
            raise ValueError("; ".join(problems))

    def problems(self) -> Iterator[str]:
        """Yield the text of each problem; most begin with a field's name."""
        yield from self.out_of_range()
        if not self._unreadable():
            yield from self._beside_each_other()
            yield from self._of_schedule()

    def out_of_range(self) -> Iterator[str]:
        """Yield the problems of single fields, whatever the others are."""
        wrong = self._unreadable()
        yield from wrong.values()
        if self.family is not None and not is_user_code(self.family):
            yield f"family must be FILE.py:NAME or package.module:NAME, got {self.family!r}"
        if self.family is None and self.family_options:
            yield "family_options has no effect without family: leave it out"
        for names, holds, text in _RANGES:
            for name in names:
                value = getattr(self, name)
                if name not in wrong and value is not None and not holds(value):
                    yield f"{name} {text.format(value)}"

    def _unreadable(self) -> dict[str, str]:
        """Return the problems of fields that have the wrong type or shape, by name."""
        problems: dict[str, str] = {}
        for entry in fields(self):
            try:
                _check_type(entry.name, getattr(self, entry.name), entry.type)
                if entry.name in _SHAPES:
                    _SHAPES[entry.name](getattr(self, entry.name))
            except ValueError as error:
                problems[entry.name] = str(error)
        return problems

    def _beside_each_other(self) -> Iterator[str]:
        """Yield the problems of fields whose values exclude each other."""
        if self.pipeline_parallel == 1 and (self.first_stage_layers or self.last_stage_layers):
            yield "first_stage_layers and last_stage_layers have no effect with one stage: raise pipeline_parallel"
        if self.moments_dtype == "bfloat16" and self.betas[1] > LARGEST_BETA:
            yield (
                f"moments_dtype='bfloat16' keeps no second moment with betas[1]={self.betas[1]}: set that to at most "
                f"{LARGEST_BETA}"
            )
        if self.optimizer_on_host and self.moments_dtype == "bfloat16":
            yield "optimizer_on_host keeps float32 moments: set moments_dtype='auto', or leave it out"
        if self.parameters_on_host and not self.optimizer_on_host:
            yield "parameters_on_host keeps optimizer states there too: set optimizer_on_host=True"
        if self.optimizer != "muon" and self.muon_momentum != EngineConfig.muon_momentum:
            yield "muon_momentum has no effect with optimizer 'adamw': leave it out, or set optimizer='muon'"
        if self.optimizer == "muon" and self.lora.rank:
            yield "optimizer='muon' is for whole weights, adapters are trained by AdamW: leave one of both out"
        if self.activation_offload and not self.gradient_checkpointing:
            yield "activation_offload moves what gradient_checkpointing keeps: set that too"
        if self.vision == "trained" and self.lora.rank:
            yield "adapters are on the text part alone: set vision='frozen', or lora.rank=0"
        if self.mtp_loss_scaling_factor is not None and self.lora.rank:
            yield "mtp_loss_scaling_factor trains the head's weights, adapters leave all as they are: leave one out"
        if self.shard_ranks is not None and self.weights == "replicated":
            yield "shard_ranks is for sharded weights: leave it out, or set weights='sharded'"
        if parse_learning_rates(self.learning_rates) and not self.lr:
            yield "learning_rates are scheduled as multiples of lr, which is 0: set lr above 0"

    def _of_schedule(self) -> Iterator[str]:
        """Yield the problems of the learning rate schedule."""
        if self.total_steps is not None and self.total_steps < 1:
            yield f"total_steps must be at least 1, got {self.total_steps}"
        if self.lr_schedule == "constant":
            if self.min_lr_ratio:
                yield "min_lr_ratio has no effect with lr_schedule 'constant': set it to 0, or another lr_schedule"
            if self.total_steps is not None:
                yield "total_steps has no effect with lr_schedule 'constant': set it to None, or another lr_schedule"
        elif self.total_steps is None or self.total_steps <= self.warmup_steps:
            yield f"lr_schedule {self.lr_schedule!r} needs total_steps above warmup_steps"


LARGEST_BETA = 0.99
"""Largest beta2 of a bfloat16 second moment: a step changes it by up to 1 - beta, which must be well above 2^-9."""


def parse_context_parallel(value: str) -> int | Literal["dynamic"]:
    """Return 1 for "off", N for "static:N", or "dynamic"; ValueError for anything else."""
    if value == "off":
        return 1
    if value == "dynamic":
        return "dynamic"
    kind, _, number = value.partition(":")
    if kind == "static" and number.isdigit() and int(number) >= 1:
        return int(number)
    raise ValueError(f"context_parallel must be 'off', 'static:N' or 'dynamic', got {value!r}")


def parse_options(words: tuple[str, ...]) -> dict[str, Any]:
    """Return options by name from words NAME=VALUE, each value read as JSON where it is JSON; ValueError for another
    word, or a name that comes twice."""
    options: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier() or name in options:
            raise ValueError(f"transformer_options are NAME=VALUE, each name once, got {word!r}")
        try:
            options[name] = json.loads(text)
        except json.JSONDecodeError:
            options[name] = text
    return options


def parse_learning_rates(words: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    """Return regular expressions with their rates, in order; ValueError for what is not PATTERN=LR, or comes twice."""
    rates: dict[str, float] = {}
    for word in words:
        pattern, equals, text = word.rpartition("=")
        if not equals or not pattern or pattern in rates:
            raise ValueError(f"learning_rates are PATTERN=LR, each pattern once, got {word!r}")
        try:
            re.compile(pattern)
            rates[pattern] = float(text)
        except (re.error, ValueError) as error:
            raise ValueError(f"learning_rates: {word!r} is no PATTERN=LR: {error}") from error
        if not 0 <= rates[pattern] < math.inf:
            raise ValueError(f"learning_rates must be finite and at least 0, got {word!r}")
    return tuple(rates.items())


def _check_type(name: str, value: Any, wanted: Any) -> None:
    """Raise ValueError unless the value is of the field's type: one of its choices, a finite number, ..."""
    if get_origin(wanted) is Literal:
        if value not in get_args(wanted):
            raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(wanted)))}, got {value!r}")
    elif get_origin(wanted) is UnionType:
        if value is not None:
            _check_type(name, value, get_args(wanted)[0])
    elif get_origin(wanted) is tuple and get_args(wanted)[-1] is ...:
        if not isinstance(value, tuple):
            raise ValueError(f"{name} must be a tuple, got {value!r}")
        for entry in value:
            _check_type(name, entry, get_args(wanted)[0])
    elif get_origin(wanted) is tuple:
        if not isinstance(value, tuple) or len(value) != len(get_args(wanted)):
            raise ValueError(f"{name} must be a tuple of {len(get_args(wanted))} numbers, got {value!r}")
        for entry, kind in zip(value, get_args(wanted), strict=True):
            _check_type(name, entry, kind)
    elif wanted is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value!r}")
    elif not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise ValueError(f"{name} must be {wanted.__name__}, got {value!r}")


_COUNTS = (
    *("max_tokens_per_rank", "logit_chunk"),
    *("tensor_parallel", "pipeline_parallel", "virtual_pipeline_parallel"),
    *("first_stage_layers", "last_stage_layers", "expert_parallel", "expert_tensor_parallel", "shard_ranks"),
    *("collective_timeout_seconds", "recheck_tokens"),
)
_WEIGHTS = (
    *("lr", "warmup_steps", "weight_decay", "router_z_loss_coef", "router_aux_loss_coef"),
    *("recheck_every", "recheck_rows", "router_forwards_ahead"),
)
_RANGES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_COUNTS, lambda size: size >= 1, "must be at least 1, got {}"),
    (_WEIGHTS, lambda value: value >= 0, "must be at least 0, got {}"),
    (("mtp_loss_scaling_factor",), lambda value: value > 0, "must be above 0, or None to train no head, got {}"),
    (("temperature",), lambda value: value > 0, "must be above 0, got {} (for greedy answers use 1.0 here)"),
    (("eps",), lambda value: value > 0, "must be above 0, got {}: a gradient of zero would divide by it"),
    (("min_lr_ratio",), lambda value: 0 <= value <= 1, "must be between 0 and 1, got {}"),
    (("muon_momentum",), lambda value: 0 <= value < 1, "must be at least 0 and below 1, got {}"),
    (("betas",), lambda betas: all(0 <= beta < 1 for beta in betas), "must be at least 0 and below 1, got {}"),
    (("recheck_bound",), lambda value: value > 0, "must be above 0, or None for the dtype's own, got {}"),
    (("grad_clip",), lambda value: value > 0, "must be above 0, or None to clip nothing, got {}"),
)
"""Fields, the condition on their values that are not None, and the text of the error."""
_SHAPES: dict[str, Callable[[Any], object]] = {
    "backend": check_backend,
    "context_parallel": parse_context_parallel,
    "transformer_options": parse_options,
    "learning_rates": parse_learning_rates,
}
"""Parsers of text fields, which raise ValueError for a text that they refuse."""
