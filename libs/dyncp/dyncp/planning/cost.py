"""How long a group of ranks takes for its sequences: linear, quadratic, linear-attention and communication, by layer
type.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from dyncp.ops.heads import check_heads
from dyncp.ops.methods import METHODS, Method
from dyncp.planning.sizes import Layout


@dataclass(frozen=True)
class Topology:
    """The links between ranks, and how many communicators a rank may hold.

    bandwidth: bytes a second a rank sends to ranks of its node; node_bandwidth: to other nodes. latency: seconds before
    the first byte of a collective. overlap: share of the ring's traffic that hides behind attention. max_groups:
    process groups any one rank may be in (the world not counted).
    """

    bandwidth: float = 250e9
    node_bandwidth: float = 50e9
    ranks_per_node: int = 8
    latency: float = 25e-6
    overlap: float = 0.7
    max_groups: int = 32

    def bytes_per_second(self, cp_size: int) -> float:
        """What one rank of a group of this size can send."""
        return self.bandwidth if cp_size <= self.ranks_per_node else self.node_bandwidth


class Coefficients(NamedTuple):
    """Seconds of a group of one size: base + token x (sum of lengths) + pair x (sum of length^2 / 2)."""

    base: float
    token: float
    pair: float

    def seconds(self, tokens: float, pairs: float) -> float:
        """Time of a group that holds so many tokens and (query, key) pairs."""
        return self.base + self.token * tokens + self.pair * pairs


@dataclass(frozen=True)
class CostModel:
    """Seconds of a forward and backward on one rank, and what context parallelism sends; all layers together.

    fixed: once a step, whatever it holds (launches, gathering parameters). linear: a token's matrix products. pair: a
    (query, key) pair of all full-attention layers; a causal sequence has length^2 / 2. delta: a token's recurrences and
    convolutions. delta_again: how much of `delta` is computed again where a shard also summarizes itself for its right
    neighbours. Bytes are of one token in all layers of the kind: q_bytes for queries, kv_bytes for keys and values;
    state_bytes: one rank's (M, S) pairs of all recurrent layers. measured: (method, size, base, token, pair) of whole
    groups as `dyncp.calibrate.calibration.fit` finds them; where there is an entry, it replaces the formula. The
    defaults are a hybrid model of 0.7 B parameters (six recurrent and two attention layers, width 2048) on one H200;
    `python -m dyncp calibrate` measures your own.
    """

    fixed: float = 8e-3
    linear: float = 1.0e-5
    pair: float = 3.0e-11
    delta: float = 2.0e-6
    delta_again: float = 1.0
    q_bytes: float = 2 * 8 * 256 * 2.0
    kv_bytes: float = 2 * 2 * 2 * 256 * 2.0
    state_bytes: float = 6 * 32 * 128 * 256 * 4.0
    attention_layers: int = 2
    delta_layers: int = 6
    query_heads: int = 8
    kv_heads: int = 2
    measured: tuple[tuple[str, int, float, float, float], ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self)[:-1]:
            value = getattr(self, field.name)
            if value < 0 or value != value:
                raise ValueError(f"{field.name} must not be negative, got {value}")

    def coefficients(self, cp_size: int, method: Method, layout: Layout, topology: Topology) -> Coefficients:
        """The three numbers of a group of this size; additive over sequences, so that planning is packing."""
        for name, size, *numbers in self.measured:
            if size == cp_size and (name == method or size == 1):
                return Coefficients(*numbers)
        if cp_size == 1:
            return Coefficients(self.fixed, self.linear + self.delta, self.pair)
        sent, rounds = self._traffic(cp_size, method, topology)
        scan = 2 * self.state_bytes * (cp_size - 1) / topology.bytes_per_second(cp_size) if self.delta_layers else 0.0
        rounds += 6 * self.delta_layers
        token = (self.linear + self.delta * (1 + self.delta_again)) / cp_size + sent / topology.bytes_per_second(
            cp_size
        )
        return Coefficients(
            self.fixed + scan + rounds * topology.latency,
            token,
            self.pair * imbalance(cp_size, method, layout) / cp_size,
        )

    def _traffic(self, cp_size: int, method: Method, topology: Topology) -> tuple[float, float]:
        """(bytes a rank sends for each token of the stream, collectives or ring rounds), forward and backward."""
        away = (cp_size - 1) / cp_size
        if method == "ulysses":
            repeats = max(1.0, cp_size / self.kv_heads)
            return 2 * (2 * self.q_bytes + repeats * self.kv_bytes) * away / cp_size, 4.0 * self.attention_layers
        if method == "all_gather":
            return 2 * self.kv_bytes * away, 2.0 * self.attention_layers
        shown = 1 - topology.overlap
        # Forward: keys and values. Backward: those again, and their gradients in twice the width.
        return 4 * self.kv_bytes * away * shown, 3.0 * (cp_size - 1) * self.attention_layers * shown

    def allowed(self, cp_size: int, method: Method) -> bool:
        """Whether a group of this size can run the method at all (Ulysses deals query heads evenly)."""
        return method != "ulysses" or not self.attention_layers or self.query_heads % cp_size == 0

    def check(self, method: str, layout: str) -> None:
        """ValueError for a method that is not known, or a layout that one of the layer types cannot take."""
        if method not in METHODS:
            raise ValueError(f"method {method!r} is not known: choose one of {', '.join(METHODS)}")
        if layout == "zigzag" and self.delta_layers:
            raise ValueError(
                f"the model has {self.delta_layers} gated delta net layers, which cannot be cut in zigzag: plan with "
                "layout='contiguous'"
            )
        if self.attention_layers:
            check_heads(self.query_heads, self.kv_heads, 1)

    def scaled(self, factor: float) -> "CostModel":
        """The same model on a machine whose compute is `factor` times slower."""
        return replace(
            self,
            fixed=self.fixed * factor,
            linear=self.linear * factor,
            pair=self.pair * factor,
            delta=self.delta * factor,
        )

    def to_json(self) -> str:
        """The model as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "CostModel":
        """The model written by `to_json`; ValueError for unknown names."""
        data = json.loads(text)
        unknown = data.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"a cost model has no {', '.join(sorted(unknown))}")
        rows = tuple((row[0], row[1], row[2], row[3], row[4]) for row in data.pop("measured", ()))
        return cls(**data, measured=rows)

    @classmethod
    def from_config(
        cls, config: Any, flops: float = 400e12, fixed: float = 8e-3, element_bytes: int = 2
    ) -> "CostModel":
        """A model from a Hugging Face text config by counting operations, at `flops` operations a second.

        Counts the parameters a token passes (experts: the active ones), full-attention and linear-attention layers by
        layer_types. Sliding-window layers count as full attention, an upper bound. Forward and backward: three times
        the forward. Calibrate for better numbers.
        """
        shape = ModelShape.of(config)
        bytes_kv = 2 * shape.kv_heads * shape.head_dim * element_bytes
        return cls(
            fixed=fixed,
            linear=6 * shape.active_parameters / flops,
            pair=3 * 4 * shape.query_heads * shape.head_dim * shape.attention_layers / flops,
            delta=3 * shape.delta_flops * shape.delta_layers / flops,
            q_bytes=shape.query_heads * shape.head_dim * element_bytes * shape.attention_layers,
            kv_bytes=bytes_kv * shape.attention_layers,
            state_bytes=4 * shape.delta_heads * shape.dk * (shape.dk + shape.dv) * shape.delta_layers,
            attention_layers=shape.attention_layers,
            delta_layers=shape.delta_layers,
            query_heads=shape.query_heads,
            kv_heads=shape.kv_heads,
        )


class ModelShape(NamedTuple):
    """What the cost model needs of a config."""

    active_parameters: float
    attention_layers: int
    delta_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    delta_key_heads: int
    delta_heads: int
    dk: int
    dv: int
    delta_flops: float

    @classmethod
    def of(cls, config: Any) -> "ModelShape":
        """The shape of a Hugging Face config, or of its text part."""
        config = getattr(config, "text_config", None) or config
        layers, hidden = config.num_hidden_layers, config.hidden_size
        types = list(getattr(config, "layer_types", None) or ["full_attention"] * layers)
        delta = types.count("linear_attention")
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        dk, dv = getattr(config, "linear_key_head_dim", 0), getattr(config, "linear_value_head_dim", 0)
        hk, hv = getattr(config, "linear_num_key_heads", 0), getattr(config, "linear_num_value_heads", 0)
        gated = 2 if getattr(config, "attn_output_gate", False) or delta else 1
        attention = hidden * head_dim * ((1 + gated) * heads + 2 * kv_heads)
        linear = hidden * (2 * hk * dk + 3 * hv * dv + 2 * hv)
        embedding = hidden * config.vocab_size
        experts = getattr(config, "num_experts_per_tok", 0) * getattr(config, "moe_intermediate_size", 0)
        shared = getattr(config, "shared_expert_intermediate_size", 0) or 0
        mlp = 3 * hidden * ((experts + shared) or config.intermediate_size)
        parameters = (layers - delta) * attention + delta * linear + layers * mlp + embedding
        recurrence = hv * (8.0 * dk * dv + 64.0 * (2 * dk + 2 * dv))
        return cls(parameters, layers - delta, delta, heads, kv_heads, head_dim, hk, hv, dk, dv, recurrence)


def imbalance(cp_size: int, method: Method, layout: Layout) -> float:
    """The busiest rank's share of the attention pairs of one long sequence, over an even share.

    Contiguous shards give the last rank (2 n - 1) / n^2 of the triangle; zigzag and Ulysses share it evenly.
    """
    if cp_size == 1 or method == "ulysses" or layout == "zigzag":
        return 1.0
    return (2 * cp_size - 1) / cp_size
