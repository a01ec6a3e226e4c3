"""The map of boxes, without any process: it tiles both sides exactly, over layouts and models."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from engines.adapters.lora import add_adapters, is_adapter
from engines.capability import Unsupported
from engines.families.registry import family_of
from engines.lora_config import LoraConfig
from engines.megatron.config.model_sizes import ModelSizes, supported
from engines.megatron.external_mappings.megatron_bridge import PEER, our_names, peer_names
from engines.megatron.weights.adapter_weights import adapted_linears, with_adapters
from engines.megatron.weights.bridge import Box, Place, held_by, tensor_shapes
from engines.megatron.weights.parameters import flat_boxes
from engines.parallel.layout import ParallelLayout
from engines.parallel.stages import StageSizes
from engines.tiny import tiny_config
from engines.weights.model_weights import ModelWeights, live_tensors

FREE = {"full_attention_interval": 2, "num_hidden_layers": 4}
KINDS = {
    "dense": tiny_config("dense", **FREE),
    "untied": tiny_config("dense", tie_word_embeddings=False, **FREE),
    "moe": tiny_config("moe", **FREE),
    "attention": tiny_config("attention", num_hidden_layers=4, vocab_size=49),
}
UNTIED = {"output_layer.weight": frozenset({"lm_head.weight"})}
small = st.sampled_from([1, 2])
layouts = st.builds(ParallelLayout, dp=small, cp=small, tp=small, pp=st.sampled_from([1, 2]))


def count(shape: Sequence[int], boxes: Iterable[Box]) -> Tensor:
    """How often each element is in a box."""
    seen = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        seen[box.index] += 1
    return seen


ROUTED = Qwen3MoeConfig(
    vocab_size=48, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, intermediate_size=48, pad_token_id=0,
)  # fmt: skip


@pytest.mark.parametrize("config", [*KINDS.values(), ROUTED], ids=[*KINDS, "qwen3_moe"])
def test_it_knows_every_tensor_of_the_stock_model(config: Any) -> None:
    with torch.device("meta"):
        live = live_tensors(AutoModelForCausalLM.from_config(config))
    assert tensor_shapes(ModelSizes.of(config)) == {name: tuple(tensor.shape) for name, tensor in live.items()}


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(sorted(KINDS)),
    layouts,
    st.sampled_from([1, 2, 4]),
    small,
    st.sampled_from([StageSizes(), StageSizes(chunks=2), StageSizes(first=1), StageSizes(last=1)]),
)
def test_owned_boxes_fill_the_model_once_and_held_boxes_fill_their_parameter(
    kind: str, layout: ParallelLayout, ep: int, etp: int, stages: StageSizes
) -> None:
    config = KINDS[kind]
    if config.model_type == "qwen3_5_moe_text" and layout.dp * layout.cp * layout.tp % (ep * etp) == 0:
        layout = replace(layout, ep=ep, etp=etp)
    if layout.pp == 1:
        stages = StageSizes()
    assert supported(config, layout, stages)
    sizes = ModelSizes.of(config)
    split = stages.split(len(sizes.layer_types), layout.pp)
    owned: dict[str, list[Box]] = {name: [] for name in tensor_shapes(sizes)}
    for rank in range(layout.world_size):
        every = held_by(sizes, layout, rank, split)
        assert len({(mapped.chunk, mapped.name) for mapped in every}) == len(every)
        for mapped in every:
            seen = count(mapped.shape, [piece.place for piece in mapped.pieces])
            assert (seen[: mapped.shape[0] - mapped.padding] == 1).all(), mapped.name
            assert (seen[mapped.shape[0] - mapped.padding :] == 0).all(), mapped.name
            for piece in mapped.pieces:
                assert math.prod(piece.source.size) == math.prod(piece.place.size)
                if mapped.owned:
                    owned[piece.tensor].append(piece.source)
    for name, shape in tensor_shapes(sizes).items():
        assert (count(shape, owned[name]) == 1).all(), name


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(sorted(KINDS)), layouts, st.sampled_from([(), ("q_proj",), ("o_proj", "in_proj_qkv")]))
def test_owned_boxes_of_adapters_fill_them_once_and_stand_beside_their_weights(
    kind: str, layout: ParallelLayout, targets: tuple[str, ...]
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(KINDS[kind])
    targets = tuple(t for t in targets if kind != "attention" or t != "in_proj_qkv")
    if kind == "moe" and not targets:
        targets = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv")
    weights = ModelWeights.of(family_of(model.config), model)
    layers = add_adapters(model, LoraConfig(rank=3, targets=targets), weights, torch.float32)
    sizes = ModelSizes.of(KINDS[kind])
    shapes = with_adapters(tensor_shapes(sizes), model)
    assert {name for name in shapes if is_adapter(name)} == {f"{name}.lora_{x}" for name in layers for x in "AB"}
    owned: dict[str, list[Box]] = {name: [] for name in shapes if is_adapter(name)}
    for rank in range(layout.world_size):
        mapped = held_by(sizes, layout, rank, StageSizes().split(4, layout.pp))
        for one in adapted_linears(mapped, shapes, Place.of(layout, rank)):
            weight = next(h for h in mapped if (h.chunk, h.name) == (one.a.chunk, f"{one.linear}.weight"))
            columns = [column for runs in one.columns for run in runs for column in run]
            rows = {}
            for piece in weight.pieces:  # which row of which layer each row of the joined weight is
                for i in range(piece.source.size[0]):
                    rows[piece.place.start[0] + i] = (piece.tensor, piece.source.start[0] + i)
            mine = [
                (piece.tensor.replace(".lora_B", ".weight"), piece.source.start[0] + i)
                for piece in one.b.pieces
                for i in range(piece.source.size[0])
            ]
            assert [rows[column] for column in columns] == mine
            for part in (one.a, one.b):
                assert (count(part.shape, [piece.place for piece in part.pieces]) == 1).all()
                for piece in part.pieces:
                    owned[piece.tensor] += [piece.source] if part.owned else []
    for name, boxes in owned.items():
        assert (count(shapes[name], boxes) == 1).all(), name


@pytest.mark.parametrize("model", PEER)
def test_names_are_those_of_megatron_bridge(model: str) -> None:
    config = {"Qwen3": KINDS["attention"], "Qwen3 MoE": ROUTED, "Qwen3.5": KINDS["untied"], "Qwen3.5 MoE": KINDS["moe"]}
    assert our_names(config[model]) | UNTIED == PEER[model]


def test_a_table_is_read_off_its_source() -> None:
    """As its files have them: dictionaries and calls with f-strings, experts behind names."""
    source = """
def _moe_routed_expert_mappings(hf_prefix, megatron_prefix, packed):
    fc2 = f"{megatron_prefix}decoder.layers.*.mlp.experts.local_experts.*.linear_fc2.weight"
    if packed:
        down = f"{hf_prefix}layers.*.mlp.experts.down_proj"
        return [FusedExpertMapping(megatron_param=fc2, hf_param=down)]
    down = f"{hf_prefix}layers.*.mlp.experts.*.down_proj.weight"
    return [AutoMapping(megatron_param=fc2, hf_param=down)]

class Bridge:
    def _get_moe_lm_mappings(hf_prefix="model.", megatron_prefix=""):
        names = {
            f"{megatron_prefix}decoder.layers.*.mlp.linear_fc1.layer_norm_weight":
            f"{hf_prefix}layers.*.post_attention_layernorm.weight"}
        return [Separate(megatron_param=f"{megatron_prefix}decoder.layers.*.self_attention.in_proj.weight",
                         b=f"{hf_prefix}layers.*.linear_attn.in_proj_b.weight", a="model.a")]
"""
    assert peer_names(source, "_get_moe_lm_mappings") == {
        "decoder.layers.*.mlp.experts.local_experts.*.linear_fc2.weight": {
            "model.layers.*.mlp.experts.*.down_proj.weight"
        },
        "decoder.layers.*.pre_mlp_layernorm.weight": {"model.layers.*.post_attention_layernorm.weight"},
        "decoder.layers.*.self_attention.in_proj.weight": {"model.layers.*.linear_attn.in_proj_b.weight", "model.a"},
    }


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.data())
def test_any_run_of_elements_is_cut_into_boxes(size: list[int], data: st.DataObject) -> None:
    """As ranks share a buffer out: a run begins and ends anywhere."""
    start = data.draw(st.integers(0, math.prod(size)))
    stop = data.draw(st.integers(start, math.prod(size)))
    numbers = torch.arange(math.prod(size)).view(size)
    runs = [(numbers[box.index].flatten().tolist(), at) for box, at in flat_boxes(tuple(size), start, stop)]
    assert [number for own, _ in runs for number in own] == list(range(start, stop))
    assert all(own[0] == at for own, at in runs)
    assert len(runs) <= 2 * len(size) - 1


def test_attention_by_hand() -> None:
    """A group of two heads: transformers has [q0 g0 q1 g1 | q2 g2 q3 g3], Megatron [q0 q1 g0 g1 k v]."""
    sizes = ModelSizes.of(KINDS["dense"])
    mapped = {one.name: one for one in held_by(sizes, ParallelLayout(tp=2), 1, ((4,),))}
    rows = [
        (piece.tensor.split(".")[-2], piece.source.start[0] // 16)
        for piece in mapped["decoder.layers.1.self_attention.linear_qkv.weight"].pieces
    ]
    assert rows == [("q_proj", 4), ("q_proj", 6), ("q_proj", 5), ("q_proj", 7), ("k_proj", 1), ("v_proj", 1)]
    assert mapped["decoder.layers.1.mlp.linear_fc2.weight"].pieces[0].source == Box((0, 24), (32, 24))
    assert [piece.source.start[0] for piece in mapped["decoder.layers.0.self_attention.in_proj.weight"].pieces] == [
        *(8, 16 + 8, 32 + 16),
        *(16, 2, 2),
    ]


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "factor": 2.0,
}


@pytest.mark.parametrize(
    ("kind", "changes", "layout", "reason"),
    [
        ("attention", {"attention_bias": True}, {}, "attention_bias=True"),
        ("attention", {"use_sliding_window": True, "sliding_window": 5}, {}, "sliding-window"),
        ("next", {}, {}, "'qwen3_next' has no Megatron layer"),
        ("attention", {"rope_parameters": LONG_ROPE}, {}, "rope type 'longrope' is not handled"),
        ("dense", {}, {"tp": 4}, "key-value heads 2 cannot be split over tensor_parallel=4"),
        ("dense", {}, {"tp": 3}, "attention heads 4 cannot be split"),
        ("attention", {"vocab_size": 1}, {"tp": 2}, "vocabulary 1 leaves a rank of tensor_parallel=2 without rows"),
        ("dense", {}, {"pp": 3}, "4 layers do not divide over 3 stages"),
        ("dense", {}, {"dp": 2, "ep": 2}, "need a model with experts"),
        ("dense", {}, {"dp": 2, "etp": 2}, "need a model with experts"),
        ("moe", {"moe_intermediate_size": 15}, {"tp": 2, "etp": 2}, "experts of width 15 cannot be split"),
        ("moe", {}, {"dp": 3, "ep": 3}, "4 experts cannot be split"),
        ("moe", {"num_experts_per_tok": 1}, {}, "one expert a token whose weight is made one"),
        ("moe", {"shared_expert_intermediate_size": 15}, {"tp": 2}, "shared expert's size 15"),
    ],
)
def test_what_has_not_run_is_a_no_with_the_reason(
    kind: str, changes: dict[str, Any], layout: dict[str, int], reason: str
) -> None:
    answer = supported(tiny_config(kind, **changes), ParallelLayout(**layout))
    assert not answer
    assert isinstance(answer, Unsupported)
    assert reason in answer.reason
