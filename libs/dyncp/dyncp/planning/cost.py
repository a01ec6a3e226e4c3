"""How long a group of ranks takes for its sequences: operations, as seqpack counts them, communication and launches.

Seconds of a group of one size are base + token x tokens + pair x (query, key) pairs, additive over its sequences; that
is what makes planning a packing problem.
"""

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dyncp.planning.heads import check_heads
from dyncp.planning.methods import METHODS, Method
from dyncp.planning.sizes import Layout
from seqpack.planning.family_flops import model_flops
from seqpack.planning.flops import ModelFlops


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
        """Return the bytes a second that one rank of a group of this size can send."""
        return self.bandwidth if cp_size <= self.ranks_per_node else self.node_bandwidth


class Coefficients(NamedTuple):
    """Seconds of a group of one size: base + token x (sum of lengths) + pair x (sum of (query, key) pairs)."""

    base: float
    token: float
    pair: float

    def seconds(self, tokens: float, pairs: float) -> float:
        """Return the seconds of a group that holds so many tokens and (query, key) pairs."""
        return self.base + self.token * tokens + self.pair * pairs


@dataclass(frozen=True)
class CostModel:
    """Seconds of a forward and backward on one rank, and what context parallelism sends; all layers together.

    fixed: once a step, whatever it holds (launches, gathering parameters). linear: a token's matrix products. pair: a
    (query, key) pair of all attention layers. windows: (window, share of `pair`); a layer with a window computes no
    pairs further apart, and such models are planned for single ranks alone (`dyncp.attention` has no windows). delta:
    a token's recurrences and convolutions. delta_again: how much of `delta` is computed again where a shard also
    summarizes itself for its right neighbours. Bytes are of one token in all layers of the kind: q_bytes for queries,
    kv_bytes for keys and values; state_bytes: one rank's (M, S) pairs of all recurrent layers. measured: (method, size,
    base, token, pair) of whole groups as `dyncp.calibrate.calibration.fit` finds them; where there is an entry, it
    replaces the formula. The defaults are a hybrid model of 0.7 B parameters (six recurrent and two attention layers,
    width 2048) on one H200; `python -m dyncp calibrate` measures your own.
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
    windows: tuple[tuple[int | None, float], ...] = ((None, 1.0),)

    def __post_init__(self) -> None:
        numbers = {field.name: getattr(self, field.name) for field in fields(self)[:-2]}
        for method, size, *row in self.measured:
            numbers |= {f"measured {method} {size}, number {i}": value for i, value in enumerate(row)}
        for name, value in numbers.items():
            if value < 0 or not math.isfinite(value):
                raise ValueError(f"{name} must not be negative and must be finite, got {value}")

    def pairs(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return (query, key) pairs of each causal sequence, layers with a window weighted by their share.

        As `seqpack.SequenceCost.pairs` counts them: a token sees itself and the window - 1 tokens before it.
        """
        total = np.zeros(len(lengths))
        for window, share in self.windows:
            seen = lengths if window is None else np.minimum(lengths, window)
            total += share * (seen * (seen + 1) // 2 + (lengths - seen) * seen)
        return total

    def coefficients(self, cp_size: int, method: Method, layout: Layout, topology: Topology) -> Coefficients:
        """Return the coefficients of a group of this size; additive over sequences, so that planning is packing."""
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
        """Return (bytes a rank sends for each token of the stream, collectives or ring rounds), both directions."""
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
        """Return whether a group of this size can run the method (Ulysses splits query heads evenly; no windows)."""
        if cp_size > 1 and any(window is not None for window, _ in self.windows):
            return False
        return method != "ulysses" or not self.attention_layers or self.query_heads % cp_size == 0

    def check(self, method: str, layout: str) -> None:
        """Raise ValueError for an unknown method, or a layout that one of the layer types cannot take."""
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
        """Return the same model on a machine whose compute is `factor` times slower."""
        return replace(
            self,
            fixed=self.fixed * factor,
            linear=self.linear * factor,
            pair=self.pair * factor,
            delta=self.delta * factor,
        )

    def to_json(self) -> str:
        """Return the model as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "CostModel":
        """Return the model that `to_json` wrote; ValueError for unknown names."""
        data = json.loads(text)
        unknown = data.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"a cost model has no {', '.join(sorted(unknown))}")
        rows = tuple((row[0], row[1], row[2], row[3], row[4]) for row in data.pop("measured", ()))
        windows = tuple((window, share) for window, share in data.pop("windows", [[None, 1.0]]))
        return cls(**data, measured=rows, windows=windows)

    @classmethod
    def from_config(
        cls, config: Any, flops: float = 400e12, fixed: float = 8e-3, element_bytes: int = 2
    ) -> "CostModel":
        """Return the cost model of a Hugging Face config's text part, operations counted by `seqpack.model_flops`.

        ValueError for a model that seqpack does not know. The other arguments as in `of`.
        """
        return cls.of(model_flops(config), flops, fixed, element_bytes)

    @classmethod
    def of(cls, model: ModelFlops, flops: float = 400e12, fixed: float = 8e-3, element_bytes: int = 2) -> "CostModel":
        """Return the cost model of counted operations at `flops` operations a second, and of their operands' bytes.

        Forward and backward are three times the forward. fixed: seconds of a step beside its operations. Calibrate for
        better numbers.
        """
        attention = [layer for layer in model.layers if layer.kind != "linear_attention"]
        delta = [layer for layer in model.layers if layer.kind == "linear_attention"]
        pair = sum(model.pairs.values())
        return cls(
            fixed=fixed,
            linear=3 * model.linear / flops,
            pair=3 * pair / flops,
            delta=3 * model.recurrent / flops,
            q_bytes=float(element_bytes * sum(layer.query_width for layer in attention)),
            kv_bytes=float(element_bytes * sum(layer.kv_width for layer in attention)),
            state_bytes=4.0 * sum(layer.state_size + layer.heads * layer.key_dim**2 for layer in delta),
            attention_layers=len(attention),
            delta_layers=len(delta),
            query_heads=math.gcd(*(layer.heads for layer in attention)) or 1,
            kv_heads=min((layer.kv_heads for layer in attention), default=1),
            windows=tuple((window, part / pair) for window, part in model.pairs.items()) if pair else ((None, 1.0),),
        )


def imbalance(cp_size: int, method: Method, layout: Layout) -> float:
    """Return the busiest rank's share of the attention pairs of one long sequence, over an even share.

    Contiguous shards give the last rank (2 n - 1) / n^2 of the triangle; zigzag and Ulysses share it evenly.
    """
    if cp_size == 1 or method == "ulysses" or layout == "zigzag":
        return 1.0
    return (2 * cp_size - 1) / cp_size
