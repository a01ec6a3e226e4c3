"""Families whose weights mbridge 0.15.1 knows the way of: its tables and its joins, read off as a map of boxes.

mbridge has, for each family, names of megatron-core's parameters beside those of transformers, and functions that join
tensors and cut them over tensor-parallel ranks. Called with weights they hold whole tensors on one rank. Here they are
called with numbers of rows and columns instead: what comes out says which box of which tensor a parameter is, and that
is all that loading, exports, checkpoints and norms need (`engines.megatron.weights.bridge`). Invariant, tested:
mbridge's own `load_weights` and `export_weights` on the same stages move the same bytes.

What of mbridge is not called, and why: `get_model` asks for Transformer Engine's layers (`NameError: TENorm`), and
`_get_gptmodel_args` reads `rope_theta`, which transformers 5 has no more. Stages, layers and the rotary embedding are
ours. Its tables are attributes of classes, and a tied model changes them for every later one: each bridge here has a
class with tables of its own.
"""

import copy
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from engines.adapters.lora import is_adapter
from engines.megatron.config.model_sizes import ModelSizes
from engines.megatron.weights.bridge import Box, BoxMapping, MappedParameter, Place, Shape
from engines.private_api import bridge_class, bridge_disk_names, bridge_names, bridge_split

FUSED = {
    ".input_layernorm.": ".self_attention.linear_qkv.layer_norm_",
    ".pre_mlp_layernorm.": ".mlp.linear_fc1.layer_norm_",
}
"""Parts of names by ours, and those of mbridge's tables: Transformer Engine's, whose linears have norms in them."""
SAME = {
    "num_layers": "layers", "hidden_size": "hidden", "num_attention_heads": "heads", "num_query_groups": "kv_heads",
    "ffn_hidden_size": "intermediate", "kv_channels": "head_dim", "layernorm_epsilon": "eps",
}  # fmt: skip
"""Fields of mbridge's TransformerConfig, and their names in `ModelSizes`."""


def bridge_of(config: Any, sizes: ModelSizes, tp: int = 1, states: Any = None) -> Any:
    """Make mbridge's bridge for a transformers config, with tables of its own and our layers' names.

    `tp`: the vocabulary's rows are padded to a multiple of it. `states`: its `ParallelStates`, which calling
    `load_weights` or `export_weights` needs; a map needs none. ValueError where it reads other sizes off the config.
    """
    tied = {"output_layer.weight": "model.embed_tokens.weight"} if sizes.tied else {}
    states = states or import_module("mbridge.core.parallel_states").ParallelStates()
    config_copy = copy.deepcopy(config)
    config_copy.head_dim = sizes.head_dim  # where a config lacks it, or has None, it is read in two ways
    kind = bridge_class(config.model_type, tied, FUSED)
    made = kind(config_copy, torch.float32, states, make_vocab_size_divisible_by=tp)
    made.vocab_size, made.padded_vocab_size = sizes.vocab, sizes.vocab_rows(tp) * tp
    for field, name in SAME.items():
        ours = len(sizes.layer_types) if name == "layers" else getattr(sizes, name)
        if (theirs := getattr(made.config, field)) != ours:
            raise ValueError(f"mbridge reads {field}={theirs} off this {config.model_type} config, and {ours} it is")
    return made


@dataclass(frozen=True)
class MbridgeMap:
    """See `engines.megatron.external_mappings.weight_map.WeightMap`."""

    sizes: ModelSizes
    shapes: dict[str, Shape]
    config: Any
    """Config of the transformers model."""

    @staticmethod
    def of(model: nn.Module) -> "MbridgeMap":
        """Make the map of a transformers model; whether layers have query-key norms and biases is read from mbridge's
        config."""
        config: Any = model.config
        sizes = ModelSizes.of(config)
        theirs = bridge_of(config, sizes).config
        sizes = replace(sizes, qk_norm=theirs.qk_layernorm, qkv_bias=theirs.add_qkv_bias)
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if not is_adapter(name)}
        return MbridgeMap(sizes, shapes, config)

    def held(self, stages: Sequence[nn.Module], place: Place, split: Any) -> tuple[MappedParameter, ...]:
        """See `WeightMap`."""
        del split  # layers tell their numbers
        bridge = bridge_of(self.config, self.sizes, place.layout.tp)
        probe = _PlaceProbe(bridge, self.shapes, place)
        out = []
        for chunk, stage in enumerate(stages):
            everywhere = bridge_names(bridge, stage)
            for name, parameter in stage.named_parameters():
                mapped = probe.held(chunk, name, everywhere[name], tuple(parameter.shape))
                copied = self.sizes.tied and name == "output_layer.weight"  # of the first stage's embedding
                out.append(replace(mapped, counts=False) if copied else mapped)
        return tuple(out)


class _PlaceProbe:
    """A probe of mbridge's functions: numbers of rows and columns in place of weights show where each one goes."""

    def __init__(self, bridge: Any, shapes: dict[str, Shape], place: Place) -> None:
        self.shapes = shapes
        self.place = place
        self.bridge = copy.copy(bridge)
        self.bridge.dtype = torch.int64  # what it casts weights to
        self.bridge.hf_config = copy.deepcopy(bridge.hf_config)
        self.bridge.hf_config.hidden_size = 1  # of a matrix one column is sent

    def held(self, chunk: int, name: str, everywhere: str, shape: Shape) -> MappedParameter:
        """Return the map of parameter `name` of a stage, called `everywhere` in the whole model."""
        tensors = bridge_disk_names(self.bridge, everywhere)
        wholes = [self.shapes[tensor] for tensor in tensors]
        rows = self._rows(everywhere, wholes, shape)
        columns = self._columns(everywhere, wholes, shape)
        starts = [0, *accumulate(whole[0] for whole in wholes)]
        pieces, at = [], 0
        for first, size in _runs([row for row in rows if row], starts):
            which = bisect_right(starts, first) - 1
            source = Box((first - starts[which], *columns), (size, *shape[1:]))
            pieces.append(BoxMapping(tensors[which], source, Box((at, *(0 for _ in columns)), (size, *shape[1:]))))
            at += size
        padding = shape[0] - at
        assert not any(rows[at:]), f"{everywhere}: padding stands before rows"
        whole = len(wholes) == 1 and wholes[0] == shape  # each tensor-parallel rank has a copy, or there is one
        counts = not whole or self.place.at.tp == 0
        return MappedParameter(chunk, name, shape, tuple(pieces), counts, self.place.first_copy, padding=padding)

    def _rows(self, name: str, wholes: Sequence[Shape], shape: Shape) -> list[int]:
        """Return for each row of the parameter its row in the tensors, counted from 1 through all of them; 0: none."""
        first, numbered = 1, []
        for rows, *rest in wholes:
            numbers = torch.arange(first, first + rows)
            numbered.append(numbers.unsqueeze(1) if rest else numbers)
            first += rows
        return self._own(name, numbered, (shape[0], *(1 for _ in shape[1:])))

    def _columns(self, name: str, wholes: Sequence[Shape], shape: Shape) -> tuple[int, ...]:
        """Return the first column of the tensor that the parameter has, in a tuple that is empty for a vector."""
        if len(shape) == 1:
            return ()
        if shape[1] == wholes[0][1]:
            return (0,)
        columns = self._own(name, [torch.arange(wholes[0][1]).unsqueeze(0)], (1, shape[1]))
        assert columns == list(range(columns[0], columns[0] + shape[1])), f"{name}: its columns are no run"
        return (columns[0],)

    def _own(self, name: str, numbers: list[Tensor], shape: Shape) -> list[int]:
        """Return this rank's part of the numbers, of shape `shape`, once mbridge has joined and split them."""
        parts = bridge_split(self.bridge, name, numbers, torch.empty(shape, device="meta"), self.place.layout.tp)
        own: list[int] = parts[self.place.at.tp].flatten().tolist()
        return own


def _runs(rows: Sequence[int], starts: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, size) of each run of consecutive rows within a tensor; rows count from 1, `first` from 0."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        number = row - 1
        if runs and number == sum(runs[-1]) and number not in starts:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((number, 1))
    return runs
