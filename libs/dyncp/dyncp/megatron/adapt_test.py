"""Megatron-Core over the groups of plans, float64 on gloo processes: equal to Megatron's own layers, one sequence at a
time, and to its own static context parallelism.

What Megatron computes in float32 whatever the weights are (its output gate, its delta net) is kept in float64 in both
(`_Float64Stays`): float32 rounds an element by its place in a tensor, from another place on for each vector width.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from dyncp.comm.process_groups import ProcessGroups
from dyncp.exactness.processes import run_world
from dyncp.megatron.adapt import adapt, cost_model, count_trained, with_core_attention
from dyncp.megatron.layers import CoreAttention
from dyncp.planning.methods import METHODS, Method
from dyncp.planning.planner import plan
from dyncp.planning.sizes import Layout
from dyncp.planning.types import DynamicPlan
from dyncp.testing.megatron import (
    LENGTHS,
    Difference,
    Tiny,
    alone,
    build,
    difference,
    make,
    plans,
    under_megatron,
    under_plan,
    under_schedule,
    without_cuda,
)

WORLD = 4
WAYS: list[tuple[Layout, Method]] = [(layout, method) for layout in get_args(Layout) for method in METHODS]


def once(made: list[DynamicPlan]) -> list[DynamicPlan]:
    """Groups of one rank know neither method nor layout: they are taken once."""
    return made if (made[0].layout, made[0].method) == WAYS[0] else made[1:]


def attention_cells(groups: ProcessGroups) -> dict[str, Difference]:
    tiny = Tiny("aa")
    batch, found = make(tiny), {}
    trained, expected = count_trained(batch), alone(tiny, batch)
    for layout, method in WAYS:
        for made in once(plans(LENGTHS, WORLD, trained, method, layout)):
            found[f"{layout} {method} {made.name}"] = difference(under_plan(tiny, batch, made, groups), expected)
    *static, dynamic = plans(LENGTHS, WORLD, trained, "ring", "zigzag")
    for made in static:
        for own_group in (False, True):
            row = difference(under_megatron(tiny, batch, made, own_group), expected)
            found[f"Megatron's groups {made.name} {own_group}"] = row
    found["overlapped reduction"] = difference(under_plan(tiny, batch, dynamic, groups, overlap=True), expected)
    found["schedule"] = difference(under_schedule(tiny, batch, dynamic, groups), expected)
    return found


def hybrid_cells(groups: ProcessGroups) -> tuple[dict[str, Difference], dict[str, Difference]]:
    tiny = Tiny("dad")
    batch, found, among = make(tiny), {}, {}
    trained, expected = count_trained(batch), alone(tiny, batch)
    first = None
    for method in METHODS:
        for made in once(plans(LENGTHS, WORLD, trained, method, "contiguous")):
            result = under_plan(tiny, batch, made, groups)
            first = first or result
            found[f"{method} {made.name}"] = difference(result, expected)
            among[f"{method} {made.name}"] = difference(result, first)
    whole = plans(LENGTHS, WORLD, trained, "ring", "contiguous")[0]
    assert first is not None
    among["packed by Megatron"] = difference(under_megatron(tiny, batch, whole, own_group=False), first)
    return found, among


def rows_of_one_sequence() -> float:
    """The largest error of core attention on rows [s, b, heads, dim] in zigzag over Megatron's static groups."""
    generator = torch.Generator().manual_seed(1)
    s, b = 4 * WORLD, 3
    whole = [torch.randn(s, b, heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    chunks = torch.arange(s).chunk(2 * WORLD)
    mine = torch.cat([chunks[dist.get_rank()], chunks[-1 - dist.get_rank()]])
    config = SimpleNamespace(attention_dropout=0.0)
    expected = CoreAttention(config, 1, "causal", "self")(*whole)
    core = CoreAttention(config, 1, "causal", "self", pg_collection=SimpleNamespace(cp=dist.group.WORLD))
    return float((core(*(x[mine] for x in whole)) - expected[mine]).abs().max())


def refusals() -> dict[str, str]:
    """What is refused, by name: the message."""
    tiny, told = Tiny("da"), {}

    def refused(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except (ValueError, NotImplementedError, AssertionError) as error:  # the last: Megatron's of 0.19
            told[name] = f"{type(error).__name__}: {error}"

    changes = {
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 2,
        "num_moe_experts": 4,
        "multi_latent_attention": True,
        "mtp_num_layers": 1,
    }
    for name, value in changes.items():
        model = build(tiny, "ring")
        setattr(model.config, name, value)
        refused(name, partial(adapt, model))
    refused("foreign attention", lambda: adapt(build(tiny, None)))
    zigzag = plans(LENGTHS, WORLD, 1, "ring", "zigzag")[-1]
    refused("zigzag", lambda: under_plan(tiny, make(tiny), zigzag, ProcessGroups()))
    model = build(tiny, "ring")
    ids = torch.arange(5)[None]
    before = model(ids, ids, None)
    undone = adapt(model)
    told["changes"] = " | ".join(undone.changes)
    told["without params"] = str(torch.equal(model(ids, ids, None), before))
    undone.undo()
    undone.undo()
    same = torch.equal(model(ids, ids, None), before)
    told["undone"] = str(same and not any("forward" in m.__dict__ for m in model.modules()))
    cu = torch.tensor([0, 5])
    packed = SimpleNamespace(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_q_padded=None, cp_group=None)
    layer = next(m for m in model.modules() if type(m).__name__ == "GatedDeltaNet")
    refused("stock", lambda: layer(torch.zeros(5, 1, 24, dtype=torch.float64), None, packed_seq_params=packed))
    return told


def costs() -> dict[str, str]:
    """What plans for a Megatron model refuse, and its matrices as the cost model counts them."""
    model, told = build(Tiny("dad"), "ulysses"), {}
    cost = cost_model(model, flops=6.0)
    counted = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "word_embeddings" not in name)
    told["counted"] = f"{cost.linear / counted:.6f}, {cost.delta_layers} + {cost.attention_layers}"
    cases: list[tuple[Layout, int]] = [("zigzag", 2), ("contiguous", 5)]
    for layout, world in cases:
        try:
            plan([10 * world], world, 10, cost, method="ulysses", layout=layout)
        except ValueError as error:
            told[f"planned {layout}"] = str(error)
    return told


Rows = dict[str, tuple[Any, ...]]  # of a Difference each
Found = tuple[Rows, Rows, Rows, float, dict[str, str]]


def four_ranks() -> Found:
    from megatron.core import jit, parallel_state

    jit.disable_jit_fuser()  # before the layers are imported: nothing is compiled
    parallel_state.initialize_model_parallel()
    groups = ProcessGroups()
    with without_cuda():
        found, among = hybrid_cells(groups)
        one, two, three = (
            {name: tuple(row) for name, row in cells.items()} for cells in (attention_cells(groups), found, among)
        )
        return one, two, three, rows_of_one_sequence(), refusals() | costs()


@pytest.fixture(scope="module")
def ranks() -> list[Found]:
    return run_world(WORLD, four_ranks)


def test_attention_is_exact_under_every_plan(ranks: list[Found]) -> None:
    assert len(ranks[0][0]) == 1 + 6 * 3 + 3 * 2 + 2
    for rank in ranks:
        for name, row in rank[0].items():
            # Megatron's own schedule adds up the ranks' token counts and scales gradients in float32.
            bound = 1e-6 if name == "schedule" else 1e-10
            assert max(Difference(*row).loss, Difference(*row).worst) <= bound, (name, row)


def test_hybrids_are_exact_under_every_plan(ranks: list[Found]) -> None:
    assert len(ranks[0][1]) == 1 + 3 * 3
    assert len(ranks[0][2]) == 1 + 3 * 3 + 1
    for rank in ranks:
        for name, row in rank[1].items():
            assert max(Difference(*row).loss, Difference(*row).worst) <= 1e-10, (name, row)
        for name, row in rank[2].items():
            assert max(Difference(*row).loss, Difference(*row).worst) <= 1e-10, (name, row)


def test_rows_of_one_sequence_are_exact(ranks: list[Found]) -> None:
    assert max(rank[3] for rank in ranks) <= 1e-12


def test_plans_know_the_model(ranks: list[Found]) -> None:
    for *_, told in ranks:
        assert told["counted"] == "1.000000, 2 + 1"
        assert "2 gated delta net layers, which cannot be cut in zigzag" in told["planned zigzag"]
        assert "Ulysses cannot deal 12 heads over 5 ranks" in told["planned contiguous"]


def test_what_is_refused_and_what_is_undone(ranks: list[Found]) -> None:
    for *_, told in ranks:
        assert "tensor_model_parallel_size is 2: set it to 1" in told["tensor_model_parallel_size"]
        assert "context_parallel_size is 2: set it to 1" in told["context_parallel_size"]
        assert "mixtures of experts" in told["num_moe_experts"]
        assert "latent attention" in told["multi_latent_attention"]
        assert "multi-token prediction" in told["mtp_num_layers"]
        assert "core_attention is a DotProductAttention" in told["foreign attention"]
        assert "cannot be cut in the zigzag layout" in told["zigzag"]
        assert re.search("does not support packed sequence|Packed sequence does not support", told["stock"])
        assert told["changes"].startswith("rotary_pos_emb: follows the shard's positions | decoder.layers.0.")
        assert told["without params"] == told["undone"] == "True"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_type": "cross"}, "does not do cross attention"),
        ({"attn_mask_type": "padding"}, "does not do mask padding"),
        ({"attention_dropout": 0.1}, "does not do attention_dropout 0.1"),
        ({"cp_comm_type": "p2p"}, "choose `method` here"),
        ({"config": SimpleNamespace(attention_dropout=0.0, window_size=(4, 0))}, "sliding windows"),
        ({"config": SimpleNamespace(attention_dropout=0.0, softmax_type="learnable")}, "attention sinks"),
    ],
)
def test_core_attention_says_what_it_does_not_do(changes: dict[str, Any], message: str) -> None:
    given = {"config": SimpleNamespace(attention_dropout=0.0), "layer_number": 3, "attn_mask_type": "causal"}
    with pytest.raises(ValueError, match=message):
        CoreAttention(**{**given, "attention_type": "self", **changes})


def test_a_bias_or_another_mask_in_the_call_is_refused() -> None:
    core = CoreAttention(SimpleNamespace(attention_dropout=0.0), 1, "causal", "self")
    x = torch.zeros(2, 1, 1, 4)
    with pytest.raises(ValueError, match="no attention bias"):
        core(x, x, x, attention_bias=x)
    with pytest.raises(ValueError, match="is causal, the call says arbitrary"):
        core(x, x, x, attn_mask_type="arbitrary")


def test_a_spec_without_attention_is_refused() -> None:
    layer = SimpleNamespace(submodules=SimpleNamespace(self_attention=SimpleNamespace(submodules=None)))
    with pytest.raises(ValueError, match="no layer of this spec has a core_attention"):
        with_core_attention(layer)


def test_importing_needs_no_megatron() -> None:
    code = "import sys, dyncp, dyncp.megatron.adapt, dyncp.megatron.layers; sys.exit('megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
