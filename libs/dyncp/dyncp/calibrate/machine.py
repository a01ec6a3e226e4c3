"""The measurement behind `python -m dyncp calibrate`: this machine's operations and links, in a minute."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dyncp.comm.collectives import Shift
from dyncp.planning.cost import CostModel, Topology
from seqpack.ops.delta_rule import gated_delta_rule
from seqpack.ops.varlen_attention import attention
from seqpack.planning.family_flops import model_flops
from seqpack.planning.flops import LayerFlops


def median_seconds(run: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    """Return the median seconds of a call, after two calls to warm up."""
    times = []
    for index in range(repeats + 2):
        _wait(device)
        begin = time.perf_counter()
        run()
        _wait(device)
        if index >= 2:
            times.append(time.perf_counter() - begin)
    return float(np.median(times))


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def forward_backward(run: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Return a call that runs forward and backward of `run(*inputs)`."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    grad = torch.randn_like(run(*leaves))

    def both() -> None:
        torch.autograd.grad(run(*leaves), leaves, grad)

    return both


def measure_cost(config: Any, device: torch.device, dtype: torch.dtype, tokens: int) -> CostModel:
    """Return the cost model of a Hugging Face text config, its compute terms measured on this device.

    tokens: of one rank's micro-batch; 8192 suits a GPU, 256 a laptop.
    """
    model = model_flops(config)
    made = CostModel.of(model, element_bytes=dtype.itemsize)
    width = 1024
    rows = torch.randn(tokens, width, device=device, dtype=dtype)
    weight = torch.randn(width, 4 * width, device=device, dtype=dtype)
    product = median_seconds(forward_backward(torch.matmul, [rows, weight]), device)
    linear = product / tokens / (4 * width * width) * model.linear / 2
    launch = median_seconds(forward_backward(torch.matmul, [rows[:16, :16], weight[:16, :16]]), device)
    made = replace(made, linear=linear, fixed=20 * launch * len(model.layers))
    attention_layer = next((layer for layer in model.layers if layer.kind != "linear_attention"), None)
    if attention_layer is not None:
        share = sum(model.pairs.values()) / attention_layer.pair
        made = replace(made, pair=_pair_seconds(attention_layer, device, dtype, tokens) * share)
    delta_layer = next(iter(model.of_kind("linear_attention")), None)
    if delta_layer is not None:
        made = replace(made, delta=_delta_seconds(delta_layer, device, dtype, tokens) * made.delta_layers)
    return made


def _pair_seconds(layer: LayerFlops, device: torch.device, dtype: torch.dtype, tokens: int) -> float:
    """Return the seconds of a (query, key) pair in one layer, from a long sequence and many short ones."""
    heads = (layer.heads, layer.kv_heads, layer.kv_heads)
    q, k, v = (torch.randn(tokens, h, layer.value_dim, device=device, dtype=dtype) for h in heads)
    times, pairs = [], []
    for count in (1, 8):
        each = tokens // count
        cu = torch.arange(0, each * count + 1, each, dtype=torch.int32, device=device)

        run = partial(attention, cu_seqlens=cu, max_seqlen=each)
        times.append(median_seconds(forward_backward(run, [x[: each * count] for x in (q, k, v)]), device))
        pairs.append(count * each * (each + 1) / 2)
    return max(times[0] - times[1], 0.1 * times[0]) / (pairs[0] - pairs[1])


def _delta_seconds(layer: LayerFlops, device: torch.device, dtype: torch.dtype, tokens: int) -> float:
    """Return the seconds of a token in one layer's recurrence."""
    q, k = (torch.randn(tokens, layer.kv_heads, layer.key_dim, device=device, dtype=dtype) for _ in range(2))
    v = torch.randn(tokens, layer.heads, layer.value_dim, device=device, dtype=dtype)
    g = -torch.rand(tokens, layer.heads, device=device)
    beta = torch.rand(tokens, layer.heads, device=device, dtype=dtype)
    cu = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    rule = partial(gated_delta_rule, cu_seqlens=cu)
    run = forward_backward(lambda *operands: rule(*operands)[0], [q, k, v, g, beta])
    return median_seconds(run, device, repeats=3) / tokens


def measure_links(group: dist.ProcessGroup, device: torch.device) -> Topology:
    """Measure latency and bandwidth of a neighbour exchange over this group. Collective."""
    seconds = []
    sizes = (2**10, 2**24)
    for size in sizes:
        x = torch.zeros(size, dtype=torch.uint8, device=device)
        seconds.append(median_seconds(lambda x=x: Shift(x, group).wait(), device))  # type: ignore[misc]
    latency = seconds[0]
    bandwidth = (sizes[1] - sizes[0]) / max(seconds[1] - seconds[0], 1e-9)
    worst = torch.tensor([latency, -bandwidth], dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return Topology(bandwidth=-worst[1].item(), latency=worst[0].item(), ranks_per_node=dist.get_world_size(group))
