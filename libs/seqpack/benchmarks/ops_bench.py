"""Time the packed operations: fused kernels against plain torch on a GPU, plain torch against transformers on a CPU.

    PYTHONPATH=libs/seqpack python libs/seqpack/benchmarks/ops_bench.py            # CUDA where there is a GPU, else CPU
    PYTHONPATH=libs/seqpack OMP_NUM_THREADS=1 python libs/seqpack/benchmarks/ops_bench.py --device cpu

The other side on a CPU is what transformers 5 runs without fused kernels, made correct: its gated delta rule and
convolution know no boundaries, so they get one padded row per sequence; its attention gets the block mask of the packed
row. Contestants take turns within one process; the least of five runs is printed: CUDA events on a GPU, the process's
CPU time elsewhere (that of the wall is worth nothing on a busy machine).
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import logsigmoid, scaled_dot_product_attention

from seqpack.ops import attention, backends, causal_conv1d, gated_delta_rule

REPEATS = 5
Run = Callable[[], torch.Tensor]
# Handed lists of tensors, whose number a type checker cannot know.
delta_rule: Callable[..., tuple[torch.Tensor, Any]] = gated_delta_rule
packed_attention: Callable[..., torch.Tensor] = attention


def cumulative(lengths: list[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)


def leaf(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype).requires_grad_()


def delta_operands(
    lengths: list[int], key_heads: int, heads: int, dim: int, device: str, dtype: torch.dtype
) -> list[torch.Tensor]:
    total = sum(lengths)
    operands = [leaf(total, h, dim, device=device, dtype=dtype) for h in (key_heads, key_heads, heads)]
    g = logsigmoid(torch.randn(total, heads, device=device)).requires_grad_()
    return [*operands, g, torch.rand(total, heads, device=device).to(dtype).requires_grad_()]


def once(run: Run, leaves: Sequence[torch.Tensor], backward: bool, device: str) -> float:
    """Return the milliseconds of one call."""
    with torch.set_grad_enabled(backward):
        if device == "cuda":
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            out = run()
            if backward:
                torch.autograd.grad(out, leaves, torch.ones_like(out))
            events[1].record()
            torch.cuda.synchronize()
            return float(events[0].elapsed_time(events[1]))
        start = time.process_time()
        out = run()
        if backward:
            torch.autograd.grad(out, leaves, torch.ones_like(out))
        return (time.process_time() - start) * 1e3


def race(title: str, contestants: Mapping[str, Run], leaves: Sequence[torch.Tensor], device: str, base: str) -> None:
    """Time the contestants in turn, and print the least time of each and its speed-up over `base`."""
    print(f"\n{title}")
    columns = {}
    for backward in (False, True):
        times: dict[str, list[float]] = {name: [] for name in contestants}
        for run in contestants.values():  # first use compiles and tunes
            once(run, leaves, backward, device)
        for _ in range(REPEATS):
            for name, run in contestants.items():
                times[name].append(once(run, leaves, backward, device))
        columns[backward] = {name: min(runs) for name, runs in times.items()}
    for name in contestants:
        forward, both = columns[False][name], columns[True][name]
        print(
            f"  {name:<24} forward {forward:9.2f} ms ({columns[False][base] / forward:6.2f}x)   "
            f"forward + backward {both:9.2f} ms ({columns[True][base] / both:6.2f}x)"
        )


def available(op: str, device: str, *names: str) -> list[str]:
    entries = backends(device)[op]
    for name in names:
        if not entries[name].available:
            print(f"  {op}: no {name}: {entries[name].reason}")
    return [name for name in names if entries[name].available]


def rule_over(operands: list[torch.Tensor], cu: torch.Tensor, backend: str) -> torch.Tensor:
    return delta_rule(*operands, cu, backend=backend)[0]


def on_gpu() -> None:
    device, dtype = "cuda", torch.bfloat16
    print(torch.cuda.get_device_name(), "torch", torch.__version__, dtype)
    torch.manual_seed(0)
    for name, lengths in {"8 mixed sequences": [700, 5, 333, 1024, 64, 950, 1, 1019], "8 x 1024": [1024] * 8}.items():
        cu = cumulative(lengths, device)
        operands = delta_operands(lengths, 4, 8, 128, device, dtype)
        runs: dict[str, Run] = {
            b: partial(rule_over, operands, cu, b)
            for b in ["torch", *available("gated_delta_rule", device, "fla", "flash_qla")]
        }
        race(f"gated delta rule, {name}, heads 4/8, dim 128", runs, operands, device, "torch")
        x, weight = leaf(sum(lengths), 2048, device=device, dtype=dtype), leaf(2048, 4, device=device, dtype=dtype)
        runs = {
            b: partial(causal_conv1d, x, weight, None, cu, "silu", backend=b)
            for b in ["torch", *available("causal_conv1d", device, "causal_conv1d", "fla")]
        }
        race(f"causal convolution, {name}, 2048 channels, 4 taps", runs, [x, weight], device, "torch")
        longest = max(lengths)
        qkv = [leaf(sum(lengths), h, 128, device=device, dtype=dtype) for h in (16, 4, 4)]
        runs = {
            b: partial(packed_attention, *qkv, cu, max_seqlen=longest, backend=b)
            for b in ["torch", *available("attention", device, "varlen")]
        }
        race(f"causal attention, {name}, heads 16/4, dim 128", runs, qkv, device, "torch")


def padded(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Return packed tokens as one padded row per sequence."""
    return torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True)


def unpadded(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return torch.cat([row[:n] for row, n in zip(x, lengths, strict=True)])


def on_cpu() -> None:
    import transformers
    from transformers.models.qwen3_5 import modeling_qwen3_5 as stock

    print("CPU, torch", torch.__version__, "transformers", transformers.__version__, "threads", torch.get_num_threads())
    generator = torch.Generator().manual_seed(0)
    cases = {
        "512 x 12-20": torch.randint(12, 21, (512,), generator=generator).tolist(),
        "32 x 16-256": torch.randint(16, 257, (32,), generator=generator).tolist(),
        "4 x 1024": [1024] * 4,
    }
    for name, lengths in cases.items():
        cu = cumulative(lengths, "cpu")
        operands = delta_operands(lengths, 4, 4, 16, "cpu", torch.float32)

        def stock_rule(operands: list[torch.Tensor] = operands, lengths: list[int] = lengths) -> torch.Tensor:
            rows = [padded(t, lengths) for t in operands]
            o, _ = stock.torch_chunk_gated_delta_rule(*rows[:3], g=rows[3], beta=rows[4], use_qk_l2norm_in_kernel=True)
            return unpadded(o, lengths)

        def rule(operands: list[torch.Tensor] = operands, cu: torch.Tensor = cu) -> torch.Tensor:
            return rule_over(operands, cu, "torch")

        torch.testing.assert_close(rule(), stock_rule(), rtol=1e-3, atol=1e-4)
        race(f"gated delta rule, {name}, heads 4, dim 16", {"transformers, padded": stock_rule, "seqpack": rule},
             operands, "cpu", "transformers, padded")  # fmt: skip
        x, weight = leaf(sum(lengths), 192, device="cpu"), leaf(192, 4, device="cpu")

        def stock_conv(
            x: torch.Tensor = x, weight: torch.Tensor = weight, lengths: list[int] = lengths
        ) -> torch.Tensor:
            rows = padded(x, lengths).transpose(1, 2)
            return unpadded(stock.causal_conv1d_fn(rows, weight, None, activation="silu").transpose(1, 2), lengths)

        def conv(x: torch.Tensor = x, weight: torch.Tensor = weight, cu: torch.Tensor = cu) -> torch.Tensor:
            return causal_conv1d(x, weight, None, cu, "silu", backend="torch")

        torch.testing.assert_close(conv(), stock_conv(), rtol=1e-4, atol=1e-4)
        race(f"causal convolution, {name}, 192 channels", {"transformers, padded": stock_conv, "seqpack": conv},
             [x, weight], "cpu", "transformers, padded")  # fmt: skip
        qkv = [leaf(sum(lengths), h, 16, device="cpu") for h in (4, 2, 2)]
        number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        mask = (number[:, None] == number) & torch.ones(sum(lengths), sum(lengths), dtype=torch.bool).tril()

        def stock_attention(qkv: list[torch.Tensor] = qkv, mask: torch.Tensor = mask) -> torch.Tensor:
            q, k, v = (t.transpose(0, 1)[None] for t in qkv)
            o = scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None], enable_gqa=True)
            return o[0].transpose(0, 1)

        def varlen(qkv: list[torch.Tensor] = qkv, cu: torch.Tensor = cu) -> torch.Tensor:
            return packed_attention(*qkv, cu, backend="torch")

        torch.testing.assert_close(varlen(), stock_attention(), rtol=1e-3, atol=1e-4)
        race(f"attention, {name}, heads 4/2, dim 16", {"one row, block mask": stock_attention, "seqpack": varlen},
             qkv, "cpu", "one row, block mask")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        on_gpu()
    else:
        on_cpu()


if __name__ == "__main__":
    main()
