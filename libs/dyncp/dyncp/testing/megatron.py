"""Megatron models small enough for a test, run three ways: Megatron alone, one sequence at a time; Megatron's own
static context parallelism; the groups of a plan. For tests only; needs megatron-core."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn
from torch.overrides import TorchFunctionMode

from dyncp.comm.process_groups import ProcessGroups
from dyncp.megatron.adapt import adapt, count_trained, micro_batches, with_core_attention
from dyncp.planning.cost import CostModel
from dyncp.planning.methods import Method
from dyncp.planning.planner import static_plan
from dyncp.planning.sizes import Layout
from dyncp.planning.types import DynamicPlan, Group, Step
from seqpack.batches.batch import make_batch

Grads = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Tiny:
    """Sizes of a model. kinds: one letter a layer, a for attention, d for gated delta net."""

    kinds: str = "aa"
    hidden: int = 24
    heads: int = 12
    kv_heads: int = 4
    head_dim: int = 4
    delta_key_heads: int = 2
    delta_value_heads: int = 4
    delta_dim: int = 4
    vocab: int = 19
    dtype: torch.dtype = torch.float64
    device: str = "cpu"


LENGTHS = (13, 1, 7, 31, 5, 2)


@contextmanager
def without_cuda() -> Iterator[None]:
    """Run Megatron on a machine without CUDA. Five facts of megatron-core 0.16.1 and 0.19.2 are changed, all of them
    about devices, none about what is tested: tensors are made on torch.cuda.current_device(), in the schedules on
    "cuda"; 0.19 asks for the current stream; random numbers come from a tracker of CUDA states (Megatron's tracker for
    inference does nothing); GatedDeltaNet refuses to be built where fla is missing, though its deterministic mode needs
    of it only the l2norm, given here from its definition. And float64 models compute in float64 throughout (see
    `_Float64Stays`)."""
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    def l2norm(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)

    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    where = getattr(gated_delta_net, "common", gated_delta_net)  # 0.19 has a package in the module's place
    with (
        mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")),
        mock.patch("torch.cuda.current_stream"),
        mock.patch.object(where, "HAVE_FLA", True),
        mock.patch.object(where, "l2norm", l2norm, create=True),
        _CudaMeansCpu(),
        _Float64Stays(),
    ):
        yield


class _CudaMeansCpu(TorchFunctionMode):
    """A mode in which device="cuda" means the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class _Float64Stays(TorchFunctionMode):
    """A mode in which `x.float()` and `x.to(torch.float32)` leave float64 as it is.

    Megatron computes its output gate (`torch.sigmoid(gate.float())`) and its gated delta net in float32 whatever the
    weights are. In float32 an element's last bit depends on its place in the tensor: vectorized loops compute whole
    vectors by one formula and what is left over by another, with AVX-512 from other places on than with AVX2. A shard
    puts tokens elsewhere than a whole sequence does, so that only float64 tells a wrong exchange from that rounding.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        named = kwargs.get("dtype") is torch.float32 or torch.float32 in args[1:]
        narrows = func is torch.Tensor.float or (func is torch.Tensor.to and named)
        if narrows and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **kwargs)


def build(tiny: Tiny, method: Method | None, cp_size: int = 1) -> Any:
    """Return a GPTModel of the local spec, the same weights in every process. method: None for Megatron's attention."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    config = _config(tiny, cp_size)
    attention_layer = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    if method is not None:
        attention_layer = with_core_attention(attention_layer, method)
    layers = [attention_layer if kind == "a" else _delta_layer(attention_layer) for kind in tiny.kinds]
    spec = TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm)
    torch.manual_seed(3)
    model = GPTModel(config, spec, tiny.vocab, 4096, position_embedding_type="rope", rotary_base=100)
    # A table in float64 too: the cosine of a float32 angle may depend on its place, as `_Float64Stays` says.
    rotary = model.rotary_pos_emb
    rotary.inv_freq = rotary.inv_freq.to(torch.promote_types(tiny.dtype, torch.float32))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            noise *= 0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            # Decays that let a state live on for some ten tokens; norms around one.
            noise += {"A_log": -2.0, "dt_bias": 0.0}.get(name.split(".")[-1], 1.0 if parameter.dim() == 1 else 0.0)
            parameter.copy_(noise.bfloat16())  # the same in every dtype
    return model.to(device=tiny.device, dtype=tiny.dtype)  # torch norms are float32 whatever params_dtype says


def _config(tiny: Tiny, cp_size: int) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=len(tiny.kinds), hidden_size=tiny.hidden, ffn_hidden_size=2 * tiny.hidden,
        num_attention_heads=tiny.heads, num_query_groups=tiny.kv_heads, kv_channels=tiny.head_dim,
        params_dtype=tiny.dtype, pipeline_dtype=tiny.dtype, bf16=tiny.dtype == torch.bfloat16,
        use_cpu_initialization=tiny.device == "cpu", context_parallel_size=cp_size, calculate_per_token_loss=True,
        normalization="RMSNorm", qk_layernorm=True, add_bias_linear=False, gated_linear_unit=True,
        activation_func=nn.functional.silu, attention_dropout=0.0, hidden_dropout=0.0, attention_output_gate=True,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        gradient_accumulation_fusion=False, persist_layer_norm=False, deterministic_mode=tiny.dtype != torch.bfloat16,
        experimental_attention_variant="gated_delta_net" if "d" in tiny.kinds else None, linear_attention_freq=2,
        linear_key_head_dim=tiny.delta_dim, linear_value_head_dim=tiny.delta_dim, linear_conv_kernel_dim=4,
        linear_num_key_heads=tiny.delta_key_heads, linear_num_value_heads=tiny.delta_value_heads,
    )  # fmt: skip


def _delta_layer(attention_layer: Any) -> Any:
    """Return the attention layer's spec with its attention replaced by a GatedDeltaNet of local linears and norm."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    inner = GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear)
    mixer = ModuleSpec(module=GatedDeltaNet, submodules=inner)
    return replace(attention_layer, submodules=replace(attention_layer.submodules, self_attention=mixer))


def make(tiny: Tiny, lengths: Sequence[int] = LENGTHS) -> TensorDict:
    """Return a batch of random tokens, about two thirds of them trained, never the first of a sequence."""
    generator = torch.Generator().manual_seed(len(lengths))
    rows = [
        {
            "input_ids": torch.randint(0, tiny.vocab, (n,), generator=generator),
            "loss_mask": (torch.rand(n, generator=generator) > 0.3) & (torch.arange(n) > 0),
        }
        for n in lengths
    ]
    return make_batch(rows)


def alone(tiny: Tiny, batch: TensorDict) -> tuple[float, Grads]:
    """Return (loss, gradients) of Megatron's own layers, one whole sequence after another, nothing of dyncp in it."""
    model, trained, total = build(tiny, None), count_trained(batch), 0.0
    for ids, mask in zip(batch["input_ids"].unbind(), batch["loss_mask"].unbind(), strict=True):
        row = ids[None].to(tiny.device)
        hidden = torch.ones(len(ids), len(ids), dtype=torch.bool, device=tiny.device).triu(1)[None, None]
        logits = model(row, torch.arange(len(ids), device=tiny.device)[None], hidden)
        loss = token_losses(logits[:, :-1], row[:, 1:])[0, mask[1:].to(tiny.device)].sum() / trained
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return each token's cross entropy in float32 at least; Megatron's own uses float32 even for float64."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return nn.functional.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def wrapped(model: Any, overlap: bool = False) -> Any:
    """Return the model in Megatron's DistributedDataParallel; overlap: buckets are reduced during the backward."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = {"overlap_grad_reduce": True, "bucket_size": 500} if overlap else {}
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=model.config.bf16, **options)
    ddp = DistributedDataParallel(model.config, ddp_config, model)
    ddp.zero_grad_buffer()
    return ddp


def reduced(ddp: Any, losses: list[torch.Tensor]) -> tuple[float, Grads]:
    """Return (loss summed over ranks, gradients as Megatron's DDP reduces them)."""
    ddp.finish_grad_sync()
    total = torch.stack(losses).sum()
    dist.all_reduce(total)
    grads = {name.removeprefix("module."): p.main_grad.clone() for name, p in ddp.named_parameters()}
    return total.item(), grads


def under_plan(
    tiny: Tiny, batch: TensorDict, made: DynamicPlan, groups: ProcessGroups, overlap: bool = False
) -> tuple[float, Grads]:
    """Return (loss, gradients) of the plan's steps: the loop of `dyncp.megatron.adapt`'s docstring."""
    model = build(tiny, made.method)
    adapt(model)
    ddp, losses = wrapped(model, overlap), []
    groups.prepare(made)
    last = len(made.steps) - 1
    for index, micro in enumerate(micro_batches(batch, made, groups, dist.get_rank(), tiny.device)):
        with nullcontext() if index == last else ddp.no_sync():
            logits = ddp(micro.input_ids, micro.position_ids, None, packed_seq_params=micro.params)
            loss = (token_losses(logits, micro.labels) * micro.loss_mask).sum() / made.trained_tokens
            loss.backward()
        losses.append(loss.detach())
    return reduced(ddp, losses)


def under_schedule(tiny: Tiny, batch: TensorDict, made: DynamicPlan, groups: ProcessGroups) -> tuple[float, Grads]:
    """Return (loss, gradients) by Megatron's own schedule and loss, which divides by the trained tokens it counts."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    model = build(tiny, made.method)
    adapt(model)
    ddp = wrapped(model)
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.no_sync_func = ddp.no_sync
    losses = []

    def step(micros: Iterator[Any], ddp: Any) -> tuple[torch.Tensor, Any]:
        micro = next(micros)
        out = ddp(micro.input_ids, micro.position_ids, None, labels=micro.labels, packed_seq_params=micro.params)

        def loss(per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            total = (per_token * micro.loss_mask).sum()
            losses.append(total.detach() / made.trained_tokens)
            return total, micro.loss_mask.sum().int(), {"loss": total.detach()}

        return out, loss

    groups.prepare(made)
    get_forward_backward_func()(
        forward_step_func=step, data_iterator=micro_batches(batch, made, groups, dist.get_rank(), tiny.device),
        model=[ddp], num_microbatches=len(made.steps), seq_length=1, micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    total = torch.stack(losses).sum()
    dist.all_reduce(total)
    return total.item(), {name.removeprefix("module."): p.main_grad.clone() for name, p in ddp.named_parameters()}


def under_megatron(tiny: Tiny, batch: TensorDict, made: DynamicPlan, own_group: bool) -> tuple[float, Grads]:
    """Return (loss, gradients) of a static zigzag plan of one step, as Megatron's own static context parallelism: its
    process groups, its rotary embedding, its PackedSeqParams (own_group: they name the group); only the attention is
    dyncp's, and the delta nets, which take groups of one rank here."""
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    cp_size = made.steps[0].groups[0].cp_size
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
    try:
        model = build(tiny, made.method, cp_size)
        if "d" in tiny.kinds:
            adapt(model)
        ddp = wrapped(model)
        group = parallel_state.get_context_parallel_group()
        assert tuple(dist.get_process_group_ranks(group)) == made.steps[0].group_of(dist.get_rank()).ranks
        groups = ProcessGroups()
        groups.prepare(made)
        (micro,) = micro_batches(batch, made, groups, dist.get_rank(), tiny.device)
        cu, longest = micro.params.cu_seqlens_q, micro.params.max_seqlen_q
        named = {"local_cp_size": cp_size, "cp_group": group} if own_group else {}
        params = PackedSeqParams("thd", cu, cu, max_seqlen_q=longest, max_seqlen_kv=longest, **named)
        logits = ddp(micro.input_ids, micro.position_ids, None, packed_seq_params=params)
        loss = (token_losses(logits, micro.labels) * micro.loss_mask).sum() / made.trained_tokens
        loss.backward()
        groups.close()
        return reduced(ddp, [loss.detach()])
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel()


def plans(lengths: Sequence[int], world: int, trained: int, method: Method, layout: Layout) -> list[DynamicPlan]:
    """Return static plans of every size that divides the world; for six sequences over four ranks one more: groups of
    sizes 1, 2 and 3, others in each step, one of two ranks without samples."""
    cost = CostModel(delta_layers=0, query_heads=12, kv_heads=4)
    shared: dict[str, Any] = {"cost": cost, "method": method, "layout": layout, "trained_tokens": trained}
    sizes = [size for size in range(1, world + 1) if world % size == 0]
    made = [static_plan(lengths, world, 2 * max(lengths), size, **shared) for size in sizes]
    if world == 4 and len(lengths) == 6:
        steps = (
            Step((Group((0, 1, 2), (3,)), Group((3,), (0,)))),
            Step((Group((0, 1), (2, 4)), Group((2, 3), ()))),
            Step((Group((0,), (1,)), Group((1, 2, 3), (5,)))),
        )
        made.append(DynamicPlan(tuple(lengths), 4, max(lengths), steps, layout, method, trained, "dynamic"))
    return made


class Difference(NamedTuple):
    """Relative errors: of the loss, of all gradients as one vector, of the worst parameter's gradient, and its name."""

    loss: float
    gradient: float
    worst: float
    name: str


def difference(result: tuple[float, Grads], expected: tuple[float, Grads]) -> Difference:
    """Return the relative errors between two results of the functions above."""
    assert result[1].keys() == expected[1].keys(), result[1].keys() ^ expected[1].keys()
    off = {name: (result[1][name].double() - want.double()).norm().item() for name, want in expected[1].items()}
    size = {name: want.double().norm().item() for name, want in expected[1].items()}
    worst, name = max((off[name] / max(size[name], 1e-12), name) for name in off)
    whole = math.hypot(*off.values()) / math.hypot(*size.values())
    return Difference(abs(result[0] - expected[0]) / abs(expected[0]), whole, worst, name)
