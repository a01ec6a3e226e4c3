import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from seqpack.planning.costs import SequenceCost
from seqpack.planning.family_flops import model_flops
from seqpack.planning.flops import GDN_CHUNK

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "head_dim": 8,  # of the rotary part
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **EXPERTS,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "qwen2": {},
    "qwen3": {},
    "gemma2": ALTERNATING,
    "gemma3_text": ALTERNATING,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, **EXPERTS, "decoder_sparse_step": 3},
    "qwen3_next": {"num_experts": 4, **EXPERTS, **GDN, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **ALTERNATING},
    "qwen3_5_text": GDN,
    "qwen3_5_moe_text": {"num_experts": 4, **EXPERTS, **GDN, "shared_expert_intermediate_size": 40},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**LATENT, "q_lora_rank": 20},
}


OPERATIONS = (
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
)


@pytest.fixture(autouse=True)
def torch_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count transformers' own PyTorch code, not the kernels that it calls where causal_conv1d or fla are installed."""
    for family in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        module = import_module(f"transformers.models.{family}.modeling_{family}")
        for name in OPERATIONS:
            function = inspect.unwrap(getattr(module, name))
            known = frozenset(inspect.signature(function).parameters)
            monkeypatch.setattr(module, name, with_known(function, known))


def with_known(function: Callable[..., Any], known: frozenset[str]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **{name: x for name, x in kwargs.items() if name in known})


def config_of(family: str) -> Any:
    return CONFIG_MAPPING[family](**{**SIZES, **FAMILIES[family]})


def counted(model: torch.nn.Module, length: int) -> int:
    solve = torch.ops.aten.linalg_solve_triangular  # torch's counter leaves it out

    def flops(matrix: Any, right: Any, *_: Any, **__: Any) -> int:
        return int(torch.Size(matrix).numel() * right[-1])

    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping={solve: flops}) as counter:
        model(torch.arange(length).unsqueeze(0) % 90, use_cache=False)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_flop_counter_on_a_real_model(family: str) -> None:
    config = config_of(family)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    cost = SequenceCost.from_config(config, whole_square=True)
    for length in (64, 192, 448):
        assert cost(length) == pytest.approx(counted(model.eval(), length), rel=0.0005), length


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "gpt_oss", "llama"])
def test_pairs_equal_the_mask_of_the_real_model(family: str) -> None:
    config = config_of(family)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for length in (1, 15, 16, 17, 40):
        with torch.no_grad():
            out = model(torch.arange(length).unsqueeze(0) % 90, output_attentions=True, use_cache=False)
        cost = SequenceCost.from_config(config)
        per_pair = 4 * 4 * 32
        seen = sum(int((layer[0, 0] > 0).sum()) for layer in out.attentions)
        assert cost(length) - cost.per_token * length == per_pair * seen


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_equal_what_the_real_model_hands_to_attention_and_keeps_as_state(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, seen = config_of(family), []

    def recorded(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        seen.append((q.shape[1], k.shape[1], v.shape[1], q.shape[3], k.shape[3], v.shape[3]))
        return v.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3]), None

    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    name = type(model).__module__
    monkeypatch.setattr(sys.modules[name], "eager_attention_forward", recorded)
    with torch.no_grad():
        cache = model(torch.arange(12).unsqueeze(0), use_cache=True).past_key_values
    flops = model_flops(config)
    assert len(flops.layers) == len(cache.layers) == config.num_hidden_layers
    attention = [layer for layer in flops.layers if layer.kind != "linear_attention"]
    assert seen == [(x.heads, x.kv_heads, x.kv_heads, x.key_dim, x.key_dim, x.value_dim) for x in attention]
    for layer in attention:
        assert layer.query_width == layer.heads * layer.key_dim
        assert layer.kv_width == layer.kv_heads * (layer.key_dim + layer.value_dim)
        assert layer.state_size == 0
    for layer, kept in zip(flops.layers, cache.layers, strict=True):
        if layer.kind == "linear_attention":
            assert kept.recurrent_states[0].shape == (1, layer.heads, layer.key_dim, layer.value_dim)
            assert layer.state_size == kept.recurrent_states[0].numel()
            mixed = 2 * layer.kv_heads * layer.key_dim + layer.heads * layer.value_dim
            assert kept.conv_states[0].shape[1] == mixed


def test_the_layers_add_up_to_the_cost_of_a_sequence() -> None:
    for family in FAMILIES:
        flops, cost = model_flops(config_of(family)), SequenceCost.from_config(config_of(family))
        whole = 10 * GDN_CHUNK  # whole chunks, so that a token's share of a chunk is a whole one
        pairs = sum(flop * cost.pairs(whole, window) for window, flop in flops.pairs.items())
        assert cost(whole) == pytest.approx((flops.linear + flops.recurrent) * whole + pairs)
        assert sum(len(flops.of_kind(kind)) for kind in {layer.kind for layer in flops.layers}) == len(flops.layers)


def test_a_short_sequence_is_linear_and_a_long_one_quadratic() -> None:
    cost = SequenceCost.from_config(config_of("llama"))
    assert cost(2000) / cost(1000) > 3
    sliding = SequenceCost.from_config(config_of("mistral"))
    assert sliding(4000) / sliding(2000) == pytest.approx(2, rel=0.01)
    hybrid = SequenceCost.from_config(config_of("qwen3_5_text"))
    full = SequenceCost.from_config(
        CONFIG_MAPPING["qwen3_5_text"](**{**SIZES, **GDN, "layer_types": ["full_attention"] * 4})
    )
    # A quarter of the layers is quadratic, so counting all of them would be four times too much.
    assert sum(f for _, f in full.attention) == 4 * sum(f for _, f in hybrid.attention)


def test_head_and_text_part_of_a_multimodal_config() -> None:
    config = config_of("qwen3")
    outer = SimpleNamespace(get_text_config=lambda: config)
    assert SequenceCost.from_config(outer) == SequenceCost.from_config(config)
    with_head, without = SequenceCost.from_config(config), SequenceCost.from_config(config, lm_head=False)
    assert with_head.per_token - without.per_token == 2 * 64 * 96


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (SimpleNamespace(model_type="gpt2"), "no count of FLOPs for model_type 'gpt2'"),
        (SimpleNamespace(), "no count of FLOPs for model_type None"),
        (SimpleNamespace(model_type="llama", layer_types=["mamba"]), r"no cost model for layer_types\[0\] = 'mamba'"),
        (
            SimpleNamespace(model_type="llama", layer_types=["sliding_attention"], sliding_window=None),
            r"layer_types\[0\] is 'sliding_attention', but sliding_window is not set",
        ),
        (
            SimpleNamespace(model_type="llama", layer_types=["full_attention"], num_hidden_layers=2),
            "layer_types names 1 layers, num_hidden_layers is 2",
        ),
        (
            SimpleNamespace(**SIZES | {"num_hidden_layers": 1}, model_type="llama", layer_types=["linear_attention"]),
            "llama has no linear attention",
        ),
        (
            SimpleNamespace(
                model_type="deepseek_v3", layer_types=["sliding_attention"], sliding_window=4, num_hidden_layers=1
            ),
            "deepseek_v3 has latent attention alone",
        ),
    ],
)
def test_unknown_architectures_are_refused_by_name(config: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SequenceCost.from_config(config)


def test_bad_length_is_named() -> None:
    with pytest.raises(ValueError, match="length must be a positive integer, got 0"):
        SequenceCost(1.0)(0)
