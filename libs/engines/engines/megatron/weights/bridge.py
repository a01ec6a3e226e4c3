"""The map between Megatron's parameters and a transformers model's tensors: which box of one is which box of the other.

Megatron joins what transformers keeps apart (queries, keys and values by group; the two halves of an MLP; the six
inputs of a gated delta net) and every rank holds a part. But nothing is ever computed on the way: a parameter of a rank
is a set of boxes, each a box of one live transformers tensor. So a map of boxes is all that loading, exporting,
checkpoints and the norm of a gradient need, and it is a pure function of sizes, layout and rank.

Invariants, each with a test over many layouts: the boxes of a parameter fill it exactly, but for
`MappedParameter.padding`; those that ranks own (`MappedParameter.owned`) fill every transformers tensor exactly once
over the world; ranks that hold the same box hold equal values.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from engines.megatron.config.model_sizes import ModelSizes
from engines.parallel.layout import Coordinates, ParallelLayout
from engines.parallel.stages import Split, stage_layers
from engines.weights.box import Box as Box
from engines.weights.box import Shape as Shape

MTP_NORMS = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


@dataclass(frozen=True)
class BoxMapping:
    """Equal elements in equal order: box `source` of the transformers tensor `tensor`, box `place` of the parameter."""

    tensor: str
    source: Box
    place: Box


@dataclass(frozen=True)
class MappedParameter:
    """One parameter of a rank: `chunk` is the virtual stage that has it.

    `counts`: whether it counts among the ranks that split a layer, where others have copies of it. `first`: whether the
    rank is the first of those that split a batch and hold the same values. `expert`: its gradient is summed over ranks
    that hold the same experts, not over all that split a batch. `padding`: rows at its end that no tensor has, which
    are zero and stay so.
    """

    chunk: int
    name: str
    shape: Shape
    pieces: tuple[BoxMapping, ...]
    counts: bool
    first: bool
    expert: bool = False
    padding: int = 0

    @property
    def owned(self) -> bool:
        """Whether this rank owns it: exactly one of the ranks that hold the same values does."""
        return self.counts and self.first


@dataclass(frozen=True)
class Place:
    """A rank's place in a layout, as the map needs it."""

    layout: ParallelLayout
    at: Coordinates

    @staticmethod
    def of(layout: ParallelLayout, rank: int) -> "Place":
        """Return the place of `rank`."""
        return Place(layout, layout.coordinates(rank))

    @property
    def first_copy(self) -> bool:
        """Whether it is the first of the ranks that split a batch, which hold equal parameters."""
        return self.at.dp == 0 and self.at.cp == 0

    @property
    def in_stage(self) -> int:
        """The rank's number in its pipeline stage."""
        return (self.at.dp * self.layout.cp + self.at.cp) * self.layout.tp + self.at.tp

    @property
    def etp_rank(self) -> int:
        """The number of its part of an expert's matrices."""
        return self.in_stage % self.layout.etp

    @property
    def ep_rank(self) -> int:
        """The number of its set of experts: ranks of a stage take them in turn, those that share one are neighbours."""
        return self.in_stage // self.layout.etp % self.layout.ep


def held_by(sizes: ModelSizes, layout: ParallelLayout, rank: int, split: Split) -> tuple[MappedParameter, ...]:
    """Return all parameters of a rank; `split` says which layers each stage has (`StageSizes.split`)."""
    place = Place.of(layout, rank)
    stage, out = place.at.pp, []
    chunks = len(split[stage])
    for chunk in range(chunks):
        made = _Maker(sizes, place, chunk)
        first, last = stage == 0 and chunk == 0, stage == layout.pp - 1 and chunk == chunks - 1
        if first:
            out.append(made.vocabulary("embedding.word_embeddings.weight", f"{sizes.decoder}embed_tokens.weight"))
        for local, layer in enumerate(stage_layers(split, stage, chunk)):
            out += made.layer(f"decoder.layers.{local}.", f"{sizes.decoder}layers.{layer}.", sizes.layer_types[layer])
        if last:
            out.append(made.whole("decoder.final_layernorm.weight", f"{sizes.decoder}norm.weight"))
            if not sizes.tied:
                out.append(made.vocabulary("output_layer.weight", "lm_head.weight"))
            elif not first:  # a second copy: its gradient and the first one's are added up, the first is exported
                copy = made.vocabulary("output_layer.weight", f"{sizes.decoder}embed_tokens.weight")
                out.append(replace(copy, counts=False))
            out += made.mtp_head("mtp_head.", "mtp.") if sizes.mtp else ()
    return tuple(out)


def tensor_shapes(sizes: ModelSizes) -> dict[str, Shape]:
    """Return the shape of every tensor of the transformers model that the map covers."""
    hidden = sizes.hidden
    out: dict[str, Shape] = {
        f"{sizes.decoder}embed_tokens.weight": (sizes.vocab, hidden),
        f"{sizes.decoder}norm.weight": (hidden,),
    }
    if not sizes.tied:
        out["lm_head.weight"] = (sizes.vocab, hidden)
    for number, kind in enumerate(sizes.layer_types):
        out |= _layer_shapes(sizes, f"{sizes.decoder}layers.{number}.", kind)
    if sizes.mtp:
        out |= {f"mtp.{name}.weight": (hidden,) for name in MTP_NORMS} | {"mtp.fc.weight": (hidden, 2 * hidden)}
        out |= _layer_shapes(sizes, "mtp.layers.0.", "full_attention")
    return out


def _layer_shapes(sizes: ModelSizes, layer: str, kind: str) -> dict[str, Shape]:
    hidden, heads = sizes.hidden, sizes.heads * sizes.head_dim
    out: dict[str, Shape] = {f"{layer}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
    if kind == "linear_attention":
        out |= {f"{layer}linear_attn.{name}": shape for name, shape in _delta_shapes(sizes).items()}
    else:
        attention = f"{layer}self_attn."
        out |= {f"{attention}{x}_norm.weight": (sizes.head_dim,) for x in "qk"}
        out |= {f"{attention}{x}_proj.weight": (sizes.kv_heads * sizes.head_dim, hidden) for x in "kv"}
        out[f"{attention}q_proj.weight"] = (heads * (2 if sizes.gated else 1), hidden)
        out[f"{attention}o_proj.weight"] = (hidden, heads)
    return out | {f"{layer}mlp.{name}": shape for name, shape in _mlp_shapes(sizes).items()}


def _delta_shapes(sizes: ModelSizes) -> dict[str, Shape]:
    delta, hidden = sizes.delta, sizes.hidden
    assert delta is not None
    return {
        "in_proj_qkv.weight": (2 * delta.keys + delta.values, hidden),
        "in_proj_z.weight": (delta.values, hidden),
        "in_proj_b.weight": (delta.value_heads, hidden),
        "in_proj_a.weight": (delta.value_heads, hidden),
        "conv1d.weight": (2 * delta.keys + delta.values, 1, delta.taps),
        "A_log": (delta.value_heads,),
        "dt_bias": (delta.value_heads,),
        "norm.weight": (delta.value_dim,),
        "out_proj.weight": (hidden, delta.values),
    }


def _mlp_shapes(sizes: ModelSizes) -> dict[str, Shape]:
    hidden, experts = sizes.hidden, sizes.experts
    if experts is None:
        return _gated_mlp("", sizes.intermediate, hidden)
    out: dict[str, Shape] = {
        "gate.weight": (experts.experts, hidden),
        "experts.gate_up_proj": (experts.experts, 2 * experts.intermediate, hidden),
        "experts.down_proj": (experts.experts, hidden, experts.intermediate),
    }
    if experts.shared:
        out |= _gated_mlp("shared_expert.", experts.shared, hidden) | {"shared_expert_gate.weight": (1, hidden)}
    return out


def _gated_mlp(before: str, inner: int, hidden: int) -> dict[str, Shape]:
    up: dict[str, Shape] = {f"{before}{x}_proj.weight": (inner, hidden) for x in ("gate", "up")}
    return up | {f"{before}down_proj.weight": (hidden, inner)}


class _Maker:
    """The parameters of one virtual stage of one rank, and how they are made."""

    def __init__(self, sizes: ModelSizes, place: Place, chunk: int) -> None:
        self.sizes = sizes
        self.place = place
        self.chunk = chunk
        self.tp, self.tp_rank = place.layout.tp, place.at.tp
        self.shapes = tensor_shapes(sizes)

    def whole(self, name: str, tensor: str) -> MappedParameter:
        """Return the map of a tensor with a copy on every tensor-parallel rank."""
        box = Box((0,) * len(self.shapes[tensor]), self.shapes[tensor])
        pieces = (BoxMapping(tensor, box, box),)
        return MappedParameter(self.chunk, name, self.shapes[tensor], pieces, self.tp_rank == 0, self.place.first_copy)

    def vocabulary(self, name: str, tensor: str) -> MappedParameter:
        """Return the map of a matrix with a row a token, as many on each rank: the last one's may be padded."""
        rows = self.sizes.vocab_rows(self.tp)
        start = self.tp_rank * rows
        joined = self.joined(name, [(tensor, start, min(rows, self.sizes.vocab - start))])
        return replace(joined, shape=(rows, self.sizes.hidden), padding=rows - joined.shape[0])

    def rows(self, name: str, parts: list[str | tuple[str, int, int]]) -> MappedParameter:
        """Return the map of parts that are sharded along dimension 0, each on its own, then joined. A part is a tensor
        or (tensor, start, stop)."""
        runs = []
        for part in parts:
            tensor, start, stop = (part, 0, self.shapes[part][0]) if isinstance(part, str) else part
            size = (stop - start) // self.tp
            runs.append((tensor, start + self.tp_rank * size, size))
        return self.joined(name, runs)

    def joined(self, name: str, runs: list[tuple[str, int, int]]) -> MappedParameter:
        """Return the map of runs of rows (tensor, start, size), one below the other."""
        pieces, at = [], 0
        for tensor, start, size in runs:
            rest = self.shapes[tensor][1:]
            zeros = (0,) * len(rest)
            pieces.append(BoxMapping(tensor, Box((start, *zeros), (size, *rest)), Box((at, *zeros), (size, *rest))))
            at += size
        shape = (at, *self.shapes[runs[0][0]][1:])
        return MappedParameter(self.chunk, name, shape, tuple(pieces), True, self.place.first_copy)

    def columns(self, name: str, tensor: str) -> MappedParameter:
        """Return the map of a matrix that is sharded along dimension 1."""
        rows, columns = self.shapes[tensor]
        size = columns // self.tp
        source, place = Box((0, self.tp_rank * size), (rows, size)), Box((0, 0), (rows, size))
        return MappedParameter(
            self.chunk, name, (rows, size), (BoxMapping(tensor, source, place),), True, self.place.first_copy
        )

    def mtp_head(self, to: str, head: str) -> Iterator[MappedParameter]:
        """Yield the maps of the parameters of a head for multi-token prediction."""
        for name in (*MTP_NORMS, "fc"):
            yield self.whole(f"{to}{name}.weight", f"{head}{name}.weight")
        yield from self.layer(f"{to}layer.", f"{head}layers.0.", "full_attention")

    def layer(self, to: str, layer: str, kind: str) -> Iterator[MappedParameter]:
        """Yield the maps of one decoder layer's parameters."""
        yield self.whole(f"{to}input_layernorm.weight", f"{layer}input_layernorm.weight")
        if kind == "linear_attention":
            yield from self._delta(f"{to}self_attention.", f"{layer}linear_attn.")
        else:
            yield from self._attention(f"{to}self_attention.", f"{layer}self_attn.")
        yield self.whole(f"{to}pre_mlp_layernorm.weight", f"{layer}post_attention_layernorm.weight")
        if self.sizes.experts is None:
            yield from self._mlp(f"{to}mlp.", f"{layer}mlp.")
        else:
            yield from self._experts(f"{to}mlp.", f"{layer}mlp.")

    def _attention(self, to: str, layer: str) -> Iterator[MappedParameter]:
        """Yield attention's, in groups of one key head: its query heads, their gates, the key head, the value head."""
        sizes = self.sizes
        dim, each, gated = sizes.head_dim, sizes.heads // sizes.kv_heads, 2 if sizes.gated else 1
        q, k, v = (f"{layer}{x}_proj.weight" for x in "qkv")
        groups, runs = sizes.kv_heads // self.tp, []
        for group in range(self.tp_rank * groups, (self.tp_rank + 1) * groups):
            heads = range(group * each, (group + 1) * each)
            for part in range(gated):  # transformers: a head's query, then its gate
                runs += [(q, (head * gated + part) * dim, dim) for head in heads]
            runs += [(k, group * dim, dim), (v, group * dim, dim)]
        yield self.joined(f"{to}linear_qkv.weight", runs)
        yield self.columns(f"{to}linear_proj.weight", f"{layer}o_proj.weight")
        for x in "qk":
            yield self.whole(f"{to}{x}_layernorm.weight", f"{layer}{x}_norm.weight")

    def _delta(self, to: str, layer: str) -> Iterator[MappedParameter]:
        """Yield a delta net's: queries, keys and values, the gate, and the two numbers of a head."""
        delta = self.sizes.delta
        assert delta is not None
        bounds = [0, delta.keys, 2 * delta.keys, 2 * delta.keys + delta.values]
        qkv, conv = f"{layer}in_proj_qkv.weight", f"{layer}conv1d.weight"
        edges = list(pairwise(bounds))
        yield self.rows(
            f"{to}in_proj.weight", [(qkv, a, b) for a, b in edges] + [f"{layer}in_proj_{x}.weight" for x in "zba"]
        )
        yield self.rows(f"{to}conv1d.weight", [(conv, a, b) for a, b in edges])
        for x in ("A_log", "dt_bias"):
            yield self.rows(f"{to}{x}", [f"{layer}{x}"])
        yield self.whole(f"{to}out_norm.weight", f"{layer}norm.weight")
        yield self.columns(f"{to}out_proj.weight", f"{layer}out_proj.weight")

    def _mlp(self, to: str, layer: str) -> Iterator[MappedParameter]:
        yield self.rows(f"{to}linear_fc1.weight", [f"{layer}gate_proj.weight", f"{layer}up_proj.weight"])
        yield self.columns(f"{to}linear_fc2.weight", f"{layer}down_proj.weight")

    def _experts(self, to: str, layer: str) -> Iterator[MappedParameter]:
        """Yield the router's and the shared expert's as others, and each routed expert's on the ranks that have it."""
        experts = self.sizes.experts
        assert experts is not None
        yield self.whole(f"{to}router.weight", f"{layer}gate.weight")
        yield from self._every_expert(f"{to}experts.", f"{layer}experts.")
        if experts.shared:
            yield from self._mlp(f"{to}shared_experts.", f"{layer}shared_expert.")
            yield self.whole(f"{to}shared_experts.gate_weight", f"{layer}shared_expert_gate.weight")

    def _every_expert(self, to: str, layer: str) -> Iterator[MappedParameter]:
        """Yield this rank's experts, one below the other: rows of gate and up are sharded each on its own, columns of
        down."""
        experts, hidden = self.sizes.experts, self.sizes.hidden
        assert experts is not None
        first = self.place.in_stage < self.place.layout.ep * self.place.layout.etp
        number = experts.experts // self.place.layout.ep
        size = experts.intermediate // self.place.layout.etp
        start, own = self.place.etp_rank * size, range(self.place.ep_rank * number, (self.place.ep_rank + 1) * number)
        halves = [
            BoxMapping(
                f"{layer}gate_up_proj",
                Box((expert, half * experts.intermediate + start, 0), (1, size, hidden)),
                Box(((2 * local + half) * size, 0), (size, hidden)),
            )
            for local, expert in enumerate(own)
            for half in range(2)
        ]
        columns = [
            BoxMapping(
                f"{layer}down_proj",
                Box((expert, 0, start), (1, hidden, size)),
                Box((local * hidden, 0), (hidden, size)),
            )
            for local, expert in enumerate(own)
        ]
        for name, pieces, rows in (
            ("gate_up_proj", halves, 2 * size * number),
            ("down_proj", columns, hidden * number),
        ):
            shape = (rows, hidden if name == "gate_up_proj" else size)
            yield MappedParameter(self.chunk, f"{to}{name}", shape, tuple(pieces), True, first, expert=True)
