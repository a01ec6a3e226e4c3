"""The cost model: counted from a config, overruled by measurements, refused where it makes no sense."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from dyncp.calibrate.calibration import Timing, calibrate_groups, fit, uniform_plan, workloads
from dyncp.planning.cost import Coefficients, CostModel, Topology, imbalance
from dyncp.planning.methods import METHODS, Method
from dyncp.planning.planner import plan
from dyncp.planning.types import DynamicPlan
from seqpack.planning.costs import SequenceCost

CONFIG = SimpleNamespace(
    model_type="qwen3_5_text", num_hidden_layers=4, hidden_size=64, intermediate_size=128, vocab_size=100,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_key_head_dim=8, linear_value_head_dim=8,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_conv_kernel_dim=4,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
)  # fmt: skip
MIXTRAL = SimpleNamespace(
    model_type="mixtral", num_hidden_layers=2, hidden_size=64, intermediate_size=96, vocab_size=100, head_dim=16,
    num_attention_heads=4, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, sliding_window=None,
)  # fmt: skip
GPT_OSS = SimpleNamespace(
    model_type="gpt_oss", num_hidden_layers=2, hidden_size=64, intermediate_size=96, vocab_size=100, sliding_window=8,
    layer_types=["sliding_attention", "full_attention"], num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    num_local_experts=8, num_experts_per_tok=2,
)  # fmt: skip
DEEPSEEK = SimpleNamespace(
    model_type="deepseek_v3", num_hidden_layers=2, hidden_size=64, intermediate_size=96, vocab_size=100,
    num_attention_heads=4, num_key_value_heads=4, first_k_dense_replace=1, moe_intermediate_size=32, n_routed_experts=8,
    num_experts_per_tok=2, n_shared_experts=1, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, kv_lora_rank=32,
    q_lora_rank=24,
)  # fmt: skip


def test_a_config_is_counted_by_layer_type() -> None:
    made = CostModel.from_config(CONFIG, flops=1.0)
    attention = 64 * 16 * (2 * 4 + 2 * 2 + 4)
    linear = 64 * (2 * 2 * 8 + 3 * 4 * 8 + 2 * 4)
    parameters = attention + 3 * linear + 4 * 3 * 64 * 128 + 64 * 100
    assert made.linear == 6 * parameters
    assert made.pair == 3 * 4 * 4 * 16
    assert made.kv_bytes == 2 * 2 * 16 * 2
    assert (made.attention_layers, made.delta_layers) == (1, 3)
    nested = CostModel.from_config(SimpleNamespace(get_text_config=lambda: CONFIG), flops=1.0)
    assert nested == made


@pytest.mark.parametrize("config", [CONFIG, MIXTRAL, GPT_OSS, DEEPSEEK], ids=lambda config: config.model_type)
@pytest.mark.parametrize("length", [64, 640, 4096])
def test_operations_are_those_that_seqpack_counts(config: SimpleNamespace, length: int) -> None:
    cost = CostModel.from_config(config, flops=2.0, fixed=0.5)
    lengths = np.array([length])
    found = cost.coefficients(1, "ring", "contiguous", Topology()).seconds(length, float(cost.pairs(lengths)[0]))
    assert found == pytest.approx(0.5 + 3 * SequenceCost.from_config(config)(length) / 2.0, rel=1e-12)


def test_pairs_are_those_that_seqpack_counts() -> None:
    lengths = np.array([1, 2, 7, 8, 9, 4000])
    cost = CostModel(windows=((None, 0.25), (8, 0.75)))
    counter = SequenceCost(0.0)
    wanted = [0.25 * counter.pairs(n) + 0.75 * counter.pairs(n, 8) for n in lengths.tolist()]
    assert cost.pairs(lengths).tolist() == pytest.approx(wanted)


def test_what_seqpack_does_not_know_is_refused() -> None:
    with pytest.raises(ValueError, match="no count of FLOPs for model_type 'mamba'"):
        CostModel.from_config(SimpleNamespace(model_type="mamba"))


def test_models_with_windows_are_planned_without_groups() -> None:
    cost = CostModel.from_config(GPT_OSS)
    assert not cost.allowed(2, "ring")
    assert {group.cp_size for _, group in plan([50, 60, 20], 2, 64, cost).groups()} == {1}
    with pytest.raises(ValueError, match="no sliding-window attention over several ranks"):
        plan([65], 2, 64, cost)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_imbalance_is_the_busiest_rank_of_a_long_sequence(size: int) -> None:
    share = 240 // size
    busiest = max(sum(range(rank * share + 1, (rank + 1) * share + 1)) for rank in range(size))
    even = 240 * 241 / 2 / size
    assert imbalance(size, "ring", "contiguous") == pytest.approx(busiest / even, rel=0.01)
    assert imbalance(size, "ulysses", "contiguous") == imbalance(size, "ring", "zigzag") == 1


def test_communication_costs_more_across_nodes_and_with_more_ranks() -> None:
    cost, topology = CostModel(), Topology()
    for method in METHODS:
        near = cost.coefficients(8, method, "contiguous", topology)
        far = cost.coefficients(8, method, "contiguous", replace(topology, ranks_per_node=4))
        assert far.token > near.token
        assert cost.coefficients(1, method, "contiguous", topology).base == cost.fixed < near.base


@pytest.mark.parametrize("size", [2, 3, 8, 9])
@pytest.mark.parametrize("method", ["ring", "ulysses", "all_gather"])
def test_a_groups_seconds_are_what_its_ranks_compute_and_send(method: Method, size: int) -> None:
    """Counted block by block: each rank holds an equal part of the stream, and sends it as the method says."""
    cost = replace(CostModel(), query_heads=72, kv_heads=2, attention_layers=5, delta_layers=3)
    topology = Topology(bandwidth=1e9, node_bandwidth=1e8, ranks_per_node=8, latency=1e-4, overlap=0.25)
    block, others = 1 / size, range(size - 1)  # of one token of the stream
    if method == "ring":
        forward = sum(block * cost.kv_bytes for _ in others)
        backward = sum(block * (cost.kv_bytes + 2 * cost.kv_bytes) for _ in others)  # gradients in twice the width
        sent, rounds = 0.75 * (forward + backward), 0.75 * 3 * len(others) * 5
    elif method == "all_gather":
        forward = sum(block * cost.kv_bytes for _ in others)  # and as much to scatter the gradients
        sent, rounds = 2 * forward, 2 * 5
    else:
        repeats = {2: 1.0, 3: 1.5, 8: 4.0, 9: 4.5}[size]  # key heads are repeated until there is one a rank
        to_each = block / size * (cost.q_bytes + cost.q_bytes + repeats * cost.kv_bytes)
        sent, rounds = 2 * sum(to_each for _ in others), 4 * 5
    speed = 1e9 if size <= 8 else 1e8
    states = 2 * len(others) * cost.state_bytes / speed
    base = cost.fixed + states + (rounds + 6 * 3) * 1e-4
    token = (cost.linear + 2 * cost.delta) / size + sent / speed
    pair = cost.pair / size * imbalance(size, method, "contiguous")
    found = cost.coefficients(size, method, "contiguous", topology)
    assert found == pytest.approx((base, token, pair), rel=1e-12)
    plain = replace(cost, delta_layers=0).coefficients(size, method, "contiguous", topology)
    assert plain.base == pytest.approx(base - states - 6 * 3 * 1e-4)
    assert found.seconds(7.0, 11.0) == pytest.approx(base + 7 * token + 11 * pair)


def test_what_a_group_of_one_takes() -> None:
    cost = CostModel()
    assert cost.coefficients(1, "ring", "zigzag", Topology()) == (cost.fixed, cost.linear + cost.delta, cost.pair)
    slower = cost.scaled(3.0)
    assert slower == replace(
        cost, fixed=3 * cost.fixed, linear=3 * cost.linear, pair=3 * cost.pair, delta=3 * cost.delta
    )


def test_which_sizes_a_method_can_run() -> None:
    cost = CostModel(query_heads=12)
    assert [size for size in range(1, 13) if cost.allowed(size, "ulysses")] == [1, 2, 3, 4, 6, 12]
    assert all(cost.allowed(size, "ring") for size in range(1, 13))
    assert replace(cost, attention_layers=0).allowed(5, "ulysses")
    windowed = replace(cost, windows=((None, 0.5), (8, 0.5)))
    assert [size for size in range(1, 5) if windowed.allowed(size, "ring")] == [1]


def test_measurements_overrule_the_formula() -> None:
    cost = CostModel(measured=(("ring", 2, 1.0, 2.0, 3.0), ("ulysses", 1, 4.0, 5.0, 6.0)))
    assert cost.coefficients(2, "ring", "contiguous", Topology()) == (1.0, 2.0, 3.0)
    assert cost.coefficients(1, "ring", "contiguous", Topology()) == (4.0, 5.0, 6.0)
    assert cost.coefficients(2, "ulysses", "contiguous", Topology()).base < 1
    assert CostModel.from_json(cost.to_json()) == cost


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="pair must not be negative"):
        CostModel(pair=-1)
    with pytest.raises(ValueError, match="fixed must not be negative and must be finite, got inf"):
        CostModel(fixed=float("inf"))
    with pytest.raises(ValueError, match="measured ring 2, number 1 must not be negative"):
        CostModel(measured=(("ring", 2, 1.0, -2.0, 3.0),))
    with pytest.raises(ValueError, match="choose one of ring, ulysses, all_gather"):
        CostModel().check("broadcast", "contiguous")
    with pytest.raises(ValueError, match="cannot be cut in zigzag"):
        CostModel().check("ring", "zigzag")
    replace(CostModel(), delta_layers=0).check("ring", "zigzag")
    replace(CostModel(), attention_layers=0, kv_heads=3).check("ring", "contiguous")
    with pytest.raises(ValueError, match="a cost model has no colour"):
        CostModel.from_json('{"colour": 1}')
    with pytest.raises(ValueError, match="multiple of the 3 key heads"):
        CostModel(kv_heads=3).check("ring", "contiguous")


def test_fitting_finds_the_numbers_that_made_the_times() -> None:
    truth = Coefficients(0.01, 2e-6, 3e-11)
    timings = [
        Timing(lengths, truth.seconds(sum(lengths), sum(n * (n + 1) / 2 for n in lengths)))
        for lengths in workloads(4, 8192)
    ]
    assert fit(timings) == pytest.approx(truth, rel=1e-6)
    free = [Timing(t.lengths, 0.5) for t in timings]
    assert fit(free) == pytest.approx((0.5, 0.0, 0.0), abs=1e-4)
    with pytest.raises(ValueError, match="at least three"):
        fit(timings[:2])


def test_calibration_runs_every_size_that_can_run() -> None:
    asked = []

    def run(plan: DynamicPlan) -> float:
        asked.append((plan.method, max(g.cp_size for g in plan.steps[0].groups)))
        return 0.1

    cost = calibrate_groups(run, CostModel(query_heads=4), 4, 64, (1, 2, 3, 4), ("ulysses", "ring"))
    assert {(m, s) for m, s, *_ in cost.measured} == {
        ("ulysses", 1),
        ("ulysses", 2),
        ("ring", 2),
        ("ring", 3),
        ("ulysses", 4),
        ("ring", 4),
    }
    assert len(asked) == 8 * len(cost.measured)
    assert [row[2] for row in cost.measured] == pytest.approx([0.1 / 3] * len(cost.measured), rel=0.01)
    plan = uniform_plan((5, 3), 5, 64, 2, "ring", "contiguous", steps=2)
    assert sorted(plan.sample_order()) == list(range(8))
    assert [g.sample_ids for g in plan.steps[0].groups] == [(0, 1), (2, 3), ()]
