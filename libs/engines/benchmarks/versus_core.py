"""megatron-core's side of `megatron_vs_core.py`: its own model, gradient buffers, schedule and optimizer."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import step_gpu
import torch
import torch.distributed as dist
from torch import Tensor
from versus_steps import CLIP, EPS, LR, Run, batch_of, in_use, keep, lengths, measure

from engines import EngineConfig
from engines.megatron.config.model_sizes import ModelSizes
from engines.megatron.external_mappings.megatron_bridge import FUSED
from engines.megatron.weights.bridge import held_by
from engines.parallel.layout import ParallelLayout


def core(run: Run) -> None:
    """Save the gradients of the first step, and time steps. RuntimeError where the optimizer skips one."""
    if run.device != "cuda":
        raise SystemExit("megatron-core's own layers need CUDA: --side ours runs on a CPU")
    name_kernels()
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=run.tensor_parallel)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    trained(run, torch.bfloat16)


def trained(run: Run, dtype: torch.dtype) -> None:
    """Run `core` once the process groups are set up."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    before = in_use(run)
    made, names = core_model(run, dtype)
    config = made.config
    if dtype == torch.bfloat16:
        made = Float16Module(config, made)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), made)
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(optimizer_config(dtype), [ddp], use_gloo_process_groups=False)
    forward_step, count = forward_of(run)

    def accumulate() -> float:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        said = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([None]),
            model=[ddp],
            num_microbatches=1,
            seq_length=run.tokens,
            micro_batch_size=1,
            forward_only=False,
        )
        total = said[0]["sum"]
        if run.copies > 1:
            dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return float(total) / count

    def step() -> dict[str, float]:
        loss = accumulate()
        updated, norm, _ = optimizer.step()
        if not updated:
            raise RuntimeError("megatron-core's optimizer skipped a step")
        return {"loss": loss, "grad_norm": float(norm)}

    loss = accumulate()
    keep(run, "core", loss, {name: p.main_grad.float().cpu().reshape(p.shape) for name, p in names.items()})
    measure(run, "core", step, before, parameters=sum(p.numel() for p in names.values()))


def name_kernels() -> None:
    """Give flash-linear-attention 0.6's kernels the names of 0.4 too, by which megatron-core 0.19.2 imports them.

    Without this its delta net says that flash-linear-attention is not installed.
    """
    from fla.modules.causal_conv1d.ops import causal_conv1d
    from fla.modules.norm.l2norm import l2norm

    for name, kernel in {"convolution": causal_conv1d, "l2norm": l2norm}.items():
        module = ModuleType(f"fla.modules.{name}")
        setattr(module, kernel.__name__, kernel)
        sys.modules.setdefault(module.__name__, module)


def core_model(run: Run, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Make GPTModel by megatron-core's hybrid specification, with the seed's weights; and name its parameters."""
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_transformer_block_with_experimental_attention_variant_spec as hybrid_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel

    net = step_gpu.model()
    text, config = net.config, core_config(net.config, dtype, run.tensor_parallel)
    rope = step_gpu.SHAPE["rope_parameters"]
    made = GPTModel(
        config,
        hybrid_spec(config),
        text.vocab_size,
        run.tokens,
        share_embeddings_and_output_weights=text.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_percent=rope["partial_rotary_factor"],
        rotary_base=int(rope["rope_theta"]),
    ).to(run.device)
    return made, fill(made, net, run.layout, dist.get_rank())


def optimizer_config(dtype: torch.dtype) -> Any:
    """Return megatron-core's settings for the AdamW of our side."""
    from megatron.core.optimizer import OptimizerConfig

    defaults = EngineConfig()
    return OptimizerConfig(
        optimizer="adam",
        lr=LR,
        min_lr=LR,
        weight_decay=defaults.weight_decay,
        adam_beta1=defaults.betas[0],
        adam_beta2=defaults.betas[1],
        adam_eps=EPS,
        clip_grad=CLIP,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
    )


def core_config(text: Any, dtype: torch.dtype, tensor_parallel: int = 1) -> Any:
    """Return megatron-core's TransformerConfig of the hybrid, with the fusions that its training scripts turn on.

    Sequence parallel goes with tensor parallel, as it does in our backend.
    """
    from megatron.core.transformer.transformer_config import TransformerConfig

    fusions = dtype == torch.bfloat16
    return TransformerConfig(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        kv_channels=text.head_dim,
        ffn_hidden_size=text.intermediate_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=text.rms_norm_eps,
        layernorm_zero_centered_gamma=True,
        qk_layernorm=True,
        attention_output_gate=True,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[int(kind == "linear_attention") for kind in text.layer_types],
        linear_conv_kernel_dim=text.linear_conv_kernel_dim,
        linear_key_head_dim=text.linear_key_head_dim,
        linear_value_head_dim=text.linear_value_head_dim,
        linear_num_key_heads=text.linear_num_key_heads,
        linear_num_value_heads=text.linear_num_value_heads,
        transformer_impl="transformer_engine",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=tensor_parallel,
        sequence_parallel=tensor_parallel > 1,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,
        bias_activation_fusion=fusions,
        bias_dropout_fusion=fusions,
        apply_rope_fusion=fusions,
        cross_entropy_loss_fusion=fusions,
        gradient_accumulation_fusion=False,  # its output layer asks apex for that
    )


def forward_of(run: Run) -> tuple[Callable[..., Any], int]:
    """Return the step's forward function over this copy's packed tokens, and the number of trained tokens of all
    copies."""
    from megatron.core.packed_seq_params import PackedSeqParams

    sizes = lengths(run)
    batch, first = batch_of(run), run.layout.coordinates(dist.get_rank()).dp * run.tokens
    own = slice(first, first + run.tokens)
    ids = batch["input_ids"].values().to(run.device)
    mask = batch["loss_mask"].values().to(run.device)
    edges = torch.tensor([0, *sizes]).cumsum(0).to(run.device, torch.int32)
    positions = torch.cat([torch.arange(size) for size in sizes]).to(run.device)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=edges,
        cu_seqlens_kv=edges,
        max_seqlen_q=max(sizes),
        max_seqlen_kv=max(sizes),
    )
    # A sequence's first token is never trained, so no label reaches over a boundary.
    labels, counted = ids.roll(-1), mask.roll(-1)
    counted[-1] = False
    everything = int(counted.sum())
    ids, labels, counted = ids[own], labels[own], counted[own]
    count = counted.sum().int()

    def loss(values: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = (values.reshape(-1).float() * counted).sum()
        return total, count.clone(), {"sum": total.detach().clone()}

    def forward_step(iterator: Iterator[None], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        next(iterator)
        output = model(ids[None], positions[None], None, labels=labels[None], packed_seq_params=packed)
        return output, loss

    return forward_step, everything


@torch.no_grad()
def fill(made: torch.nn.Module, net: Any, layout: ParallelLayout, rank: int) -> dict[str, torch.nn.Parameter]:
    """Give `made` a rank's part of a transformers model's weights, and return its parameters by our names. RuntimeError
    where names differ.

    Transformer Engine has a norm inside the linear after it; and its gated delta net's norm, as all others, is kept as
    the distance from one.
    """
    sizes, stock = ModelSizes.of(net.config), net.state_dict()
    live, named = dict(made.named_parameters()), {}
    for mapped in held_by(sizes, layout, rank, ((len(sizes.layer_types),),)):
        name = next((name for name in (mapped.name, *fused(mapped.name)) if name in live), None)
        if name is None:
            raise RuntimeError(f"megatron-core's model has no {mapped.name}; it has {sorted(live)}")
        value = torch.zeros(mapped.shape)
        for piece in mapped.pieces:
            value[piece.place.index] = stock[piece.tensor][piece.source.index].reshape(piece.place.size).float()
        if name.endswith("out_norm.weight"):
            value -= 1
        parameter = live.pop(name)
        if parameter.shape != value.shape:
            raise RuntimeError(f"{name} has shape {tuple(parameter.shape)}, not {tuple(value.shape)}")
        parameter.copy_(value)
        named[mapped.name] = parameter
    if live:
        raise RuntimeError(f"parameters of megatron-core's model that got no weights: {sorted(live)}")
    return named


def fused(name: str) -> list[str]:
    """Return the names under which Transformer Engine's specification may have a norm."""
    parts = name.split(".")
    if parts[:2] != ["decoder", "layers"]:
        return []
    plain = ".".join(["decoder", "layers", "*", *parts[3:]])
    return [other.replace("*", parts[2]) for other, own in FUSED.items() if own == plain]
