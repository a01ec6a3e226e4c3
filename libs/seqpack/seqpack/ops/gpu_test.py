"""Fused kernels against float64, forward and backward. Shapes are fixed: every new one costs kernel tuning."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid
from torch.utils.checkpoint import checkpoint

from seqpack.batches.packed import PackedBatch
from seqpack.ops import attention, backends, causal_conv1d, causal_conv1d_state, gated_delta_rule, gated_delta_rule_step
from seqpack.testing import check_packing

# The tests hand over lists of tensors, whose number a type checker cannot know.
delta_rule: Callable[..., tuple[torch.Tensor, Any]] = gated_delta_rule
delta_step: Callable[..., tuple[torch.Tensor, torch.Tensor]] = gated_delta_rule_step
packed_attention: Callable[..., torch.Tensor] = attention
conv1d: Callable[..., torch.Tensor] = causal_conv1d

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = [700, 5, 333, 1024, 64, 950, 1, 1019]
TOTAL, KEY_HEADS, HEADS, DIM, CHANNELS = sum(LENGTHS), 4, 8, 128, 2048


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def cumulative(lengths: list[int] = LENGTHS) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


def need(op: str, backend: str) -> None:
    found = backends("cuda")[op][backend]
    if not found.available:
        pytest.skip(f"{op} has no {backend} here: {found.reason}")


def doubles(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t.detach().double().requires_grad_() for t in tensors]


def delta_inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    half = [random(TOTAL, h, DIM).bfloat16() for h in (KEY_HEADS, KEY_HEADS, HEADS)]
    return [
        t.requires_grad_() for t in (*half, logsigmoid(random(TOTAL, HEADS)), random(TOTAL, HEADS).sigmoid().bfloat16())
    ]


def compare(call: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor], bound: float) -> None:
    """Run a call as it is and in float64 plain torch; assert each relative error, print all."""
    got, exact = call(tensors), doubles(tensors)
    expected = call(exact, "torch")
    weight = random(*got.shape)
    grads = torch.autograd.grad((got * weight).sum(), tensors)
    expected_grads = torch.autograd.grad((expected * weight).sum(), exact)
    errors = [error(a, b) for a, b in zip((got, *grads), (expected, *expected_grads), strict=True)]
    print("relative errors, output then gradients:", " ".join(f"{e:.1e}" for e in errors))
    assert max(errors) < bound


@pytest.mark.parametrize("backend", ["fla", "flash_qla"])
def test_gated_delta_rule(backend: str) -> None:
    need("gated_delta_rule", backend)
    compare(lambda t, b=backend: delta_rule(*t, cumulative(), backend=b)[0], delta_inputs(), 1e-2)


def test_a_recomputed_layer_keeps_its_inputs_alone() -> None:
    """FlashQLA cuts a long sequence; the states at the cuts must not outlive the forward pass."""
    torch.manual_seed(0)
    q, k, v = (random(8192, 2, DIM).bfloat16().requires_grad_() for _ in range(3))
    g, beta, ends = logsigmoid(random(8192, 2)), random(8192, 2).sigmoid().bfloat16(), cumulative([8192])

    def layer(*operands: torch.Tensor) -> torch.Tensor:
        return delta_rule(*operands, ends)[0].sum()

    layer(q, k, v, g, beta)  # whatever is made once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    total = checkpoint(layer, q, k, v, g, beta, use_reentrant=False)
    assert torch.cuda.memory_allocated() - before < 2**16
    total.backward()


def test_gated_delta_rule_in_plain_torch_and_float32() -> None:
    tensors = [t.detach().float().requires_grad_() for t in delta_inputs()]
    compare(lambda t, b="auto": delta_rule(*t, cumulative(), backend=b)[0], tensors, 2e-5)


@pytest.mark.parametrize("backend", ["fla", "flash_qla"])
def test_states_of_the_gated_delta_rule(backend: str) -> None:
    need("gated_delta_rule", backend)
    tensors = delta_inputs()
    state = random(len(LENGTHS), HEADS, DIM, DIM).requires_grad_()

    def call(operands: list[torch.Tensor], name: str = backend) -> torch.Tensor:
        *operands, start = operands
        final: torch.Tensor
        _, final = delta_rule(*operands, cumulative(), initial_state=start, output_final_state=True, backend=name)
        return final

    # q does not reach the final state: leave it out of the gradients
    compare(lambda t, b=backend: call([tensors[0].detach().to(t[0].dtype), *t], b), [*tensors[1:], state], 2e-2)


@pytest.mark.parametrize("backend", ["causal_conv1d", "fla"])
def test_causal_convolution(backend: str) -> None:
    need("causal_conv1d", backend)
    torch.manual_seed(0)
    tensors = [t.bfloat16().requires_grad_() for t in (random(TOTAL, CHANNELS), random(CHANNELS, 4), random(CHANNELS))]
    compare(lambda t, b=backend: conv1d(*t, cumulative(), "silu", backend=b), tensors, 1e-2)


def test_causal_convolution_with_a_state() -> None:
    need("causal_conv1d", "fla")
    torch.manual_seed(0)
    shapes = ((TOTAL, CHANNELS), (CHANNELS, 4), (len(LENGTHS), CHANNELS, 3))
    tensors = [random(*s).bfloat16().requires_grad_() for s in shapes]
    compare(lambda t, b="fla": conv1d(t[0], t[1], None, cumulative(), None, t[2], b), tensors, 1e-2)


@pytest.mark.parametrize("options", [{}, {"window": 128}, {"causal": False}])
def test_attention(options: dict[str, Any]) -> None:
    need("attention", "varlen")
    torch.manual_seed(0)
    tensors = [random(TOTAL, h, DIM).bfloat16().requires_grad_() for h in (8, 2, 2)]
    compare(lambda t, b="varlen": packed_attention(*t, cumulative(), backend=b, **options), tensors, 1e-2)


def test_nothing_crosses_a_boundary_in_what_auto_takes() -> None:
    cu, (first, last) = cumulative(), (700, 705)
    tensors, x, weight = delta_inputs(), random(TOTAL, CHANNELS).bfloat16(), random(CHANNELS, 4).bfloat16()
    q, k, v = (random(TOTAL, h, DIM).bfloat16() for h in (8, 2, 2))
    runs: dict[str, tuple[Callable[[], torch.Tensor], list[torch.Tensor]]] = {
        "gated_delta_rule": (lambda: delta_rule(*tensors, cu)[0], tensors),
        "causal_conv1d": (lambda: conv1d(x, weight, None, cu, "silu"), [x]),
        "attention": (lambda: packed_attention(q, k, v, cu), [q, k, v]),
    }
    with torch.no_grad():
        for name, (run, operands) in runs.items():
            before = run()
            for t in operands:
                t[first:last] = t[first:last].flip(0) * 0.5
            after = run()
            assert torch.equal(before[:first], after[:first]), name
            assert torch.equal(before[last:], after[last:]), name
            assert not torch.equal(before[first:last], after[first:last]), name


def test_steps_continue_a_prefix() -> None:
    lengths = [64] * 8
    q, k, v, g, beta = (t.detach()[:512].unflatten(0, (8, 64)) for t in delta_inputs())
    exact, _ = delta_rule(*(t.flatten(0, 1).double() for t in (q, k, v, g, beta)), cumulative(lengths))
    exact = exact.unflatten(0, (8, 64))
    with torch.no_grad():
        prefix = [t[:, :60].flatten(0, 1) for t in (q, k, v, g, beta)]
        _, state = delta_rule(*prefix, cumulative([60] * 8), output_final_state=True)
        for t in range(60, 64):
            o, state = delta_step(*(x[:, t] for x in (q, k, v, g, beta)), state)
            assert error(o, exact[:, t]) < 2e-2
    x = random(512, 256).bfloat16()
    assert causal_conv1d_state(x, cumulative(lengths), 4).shape == (8, 256, 3)


def test_empty_sequences_are_allowed() -> None:
    lengths = [64, 0, 448]
    tensors = [t.detach()[:512] for t in delta_inputs()]
    state = random(3, HEADS, DIM, DIM)
    o, final = delta_rule(*tensors, cumulative(lengths), initial_state=state, output_final_state=True)
    expected, expected_final = delta_rule(
        *(t.double() for t in tensors), cumulative(lengths), initial_state=state, output_final_state=True
    )
    assert error(o, expected) < 1e-2
    assert error(final, expected_final) < 1e-2
    x, weight = random(512, CHANNELS).bfloat16(), random(CHANNELS, 4).bfloat16()
    y = conv1d(x, weight, None, cumulative(lengths))
    assert error(y, conv1d(x.double(), weight.double(), None, cumulative(lengths))) < 1e-2
    q = random(512, 8, DIM).bfloat16()
    assert (
        error(packed_attention(q, q, q, cumulative(lengths)), packed_attention(*[q.double()] * 3, cumulative(lengths)))
        < 1e-2
    )


def test_a_row_of_one_token() -> None:
    """What a rank without samples runs, so that collectives match."""
    one = cumulative([1])
    x, weight = random(1, CHANNELS).bfloat16().requires_grad_(), random(CHANNELS, 4).bfloat16().requires_grad_()
    compare(lambda t, b="auto": conv1d(*t, None, one, "silu", backend=b), [x, weight], 1e-2)
    q, k, v, g, beta = (t.detach()[:1].requires_grad_() for t in delta_inputs())
    still = g.detach()  # nothing is there to decay
    compare(lambda t, b="auto": delta_rule(*t[:3], still, t[3], one, backend=b)[0], [q, k, v, beta], 1e-2)
    q, k, v = (random(1, h, DIM).bfloat16() for h in (8, 2, 2))  # only v matters

    def attend(t: list[torch.Tensor], backend: str = "auto") -> torch.Tensor:
        return packed_attention(q.to(t[0].dtype), k.to(t[0].dtype), t[0], one, backend=backend)

    compare(attend, [v.requires_grad_()], 1e-2)


def test_float32_is_refused_by_name_and_served_by_auto() -> None:
    q = random(8, 2, DIM)
    with pytest.raises(ValueError, match="'varlen': its kernels are for bfloat16 and float16, not float32"):
        packed_attention(q, q, q, cumulative([8]), backend="varlen")
    assert packed_attention(q, q, q, cumulative([8])).dtype == torch.float32


def test_stock_qwen_with_fused_kernels_is_isolated_once_it_is_told_the_boundaries() -> None:
    need("gated_delta_rule", "fla")
    need("causal_conv1d", "causal_conv1d")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.Qwen3_5TextConfig(
        vocab_size=2048, hidden_size=256, intermediate_size=768, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_num_key_heads=KEY_HEADS, linear_num_value_heads=HEADS, layer_types=["linear_attention"] * 3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForCausalLM(config).to("cuda", torch.bfloat16)

    def packed(model: Any, row: PackedBatch, seq_idx: bool = True) -> Any:
        call = {
            "cu_seq_lens_q": row.cu_seqlens,
            "cu_seq_lens_k": row.cu_seqlens,
            "position_ids": row.position_ids[None],
        }
        if seq_idx:
            number = torch.arange(row.num_sequences, device="cuda", dtype=torch.int32)
            call["seq_idx"] = torch.repeat_interleave(number, row.cu_seqlens.diff().long())[None]
        return model(input_ids=row.values["input_ids"][None], use_cache=False, **call).logits

    report = check_packing(model, packed, lengths=LENGTHS)
    print(report)
    assert report.isolated
    without = check_packing(model, lambda m, row: packed(m, row, seq_idx=False), lengths=LENGTHS)
    print(without)
    assert not without.isolated
