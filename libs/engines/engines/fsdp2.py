"""The FSDP2 engine: every layer sharded over the data-parallel ranks, packed micro-batches, one optimizer step."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from engines.capability import No, Yes
from engines.capability import supports as capability
from engines.checkpoint import load_checkpoint, replace_directory, save_checkpoint
from engines.config import EngineConfig, parse_context_parallel
from engines.launch import ensure_group
from engines.loading import compute_dtype, load_model, resolve_device
from engines.metrics import MetricSum, check_agreement
from engines.optimizer import build_optimizer, clip_gradients
from engines.packing.model import adapt_for_packing
from engines.protocol import Objective, StepTotals
from engines.schedule import learning_rate
from engines.scorer import TokenScorer
from engines.strategy import PackedRows, PaddedRows, Strategy
from engines.weights.pieces import WeightPiece, pieces

if TYPE_CHECKING:
    from tensordict import TensorDict

    from seqpack.batches.packed import PackedBatch

PIECE_BYTES = 64 * 2**20


class FSDP2Engine:
    """See `engines.protocol.TrainEngine`; made by `build_engine`."""

    def __init__(
        self, config: EngineConfig, model: Any = None, trainable: bool = True, strategy: Strategy | None = None
    ) -> None:
        ensure_group(config.device)
        self.config = config
        self.device = resolve_device(config)
        self.dtype = compute_dtype(config, self.device)
        self.trainable = trainable
        self.step = 0
        self._offloaded = False
        self.model: Any = load_model(config, model).to(self.device)
        if config.batching == "packed":
            adapt_for_packing(self.model)
        if config.gradient_checkpointing:
            _recompute_layers(self.model)
        self.model.train(trainable)
        self.model.requires_grad_(trainable)
        self.scorer: Any = TokenScorer(self.model, config.logit_chunk)
        self._shard()
        self.optimizer = build_optimizer(self.scorer, config) if trainable else None
        self.strategy = strategy or self._default_strategy()

    def _default_strategy(self) -> Strategy:
        config, rank, world = self.config, dist.get_rank(), dist.get_world_size()
        if parse_context_parallel(config.context_parallel) != 1:
            from engines.context_parallel import ContextParallelRows

            return ContextParallelRows(config, self.model.config, rank, world)
        rows = PackedRows if config.batching == "packed" else PaddedRows
        return rows(config.max_tokens_per_rank, rank, world)

    def _shard(self) -> None:
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        for layer in _layers(self.model):
            fully_shard(layer, reshard_after_forward=self.config.reshard_after_forward, **options)
        fully_shard(self.scorer, reshard_after_forward=False, **options)
        for module in self.scorer.modules():
            if isinstance(module, FSDPModule):
                # The loss is divided by global counts already: gradients are summed over ranks, not averaged.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    # ------------------------------------------------------------------ training

    def train_batch(self, batch: "TensorDict", objective: Objective) -> dict[str, float]:
        """One optimizer step: plan, pack, accumulate over micro-batches, clip, update.

        Every rank gets the same global batch; the plan says which rows it computes. Besides the objective's metrics:
        loss, grad_norm, lr, step, tokens, sequences, trained_tokens, computed_tokens and computed_sequences (what
        `skip_zero_gradient_rows` left), micro_batches (of a rank), fill, plan_hash and skipped (1 where the gradient
        was not finite and no update was made).
        """
        if self.optimizer is None:
            raise ValueError("this engine was built with trainable=False: it can only score")
        self._check_onloaded()
        _require(batch, ("loss_mask", *getattr(objective, "required_keys", ())))
        totals = StepTotals.of(batch)
        if not totals.tokens:
            raise ValueError("no token of the batch is trained: loss_mask is False everywhere")
        given, batch = _counts(batch), self._without_zero_gradient_rows(batch, objective)
        lengths, plan = self._plan(batch)
        entropy = bool(getattr(objective, "needs_entropy", False))
        collected = MetricSum()
        for packed in self._micro_batches(batch, plan.micro_batches):
            collected.add(*self._backward(packed, objective, totals, entropy))
        norm = clip_gradients(self.scorer, self.config.grad_clip)
        rate = self._update(norm)
        metrics = collected.reduce()
        return metrics | {
            "grad_norm": norm,
            "lr": rate,
            "step": float(self.step),
            **given,
            "trained_tokens": float(totals.tokens),
            "computed_tokens": float(sum(lengths)),
            "computed_sequences": float(len(lengths)),
            "micro_batches": float(len(plan.micro_batches)),
            "fill": plan.fill,
            "plan_hash": float(plan.hash),
            "skipped": float(not math.isfinite(norm)),
        }

    def _backward(
        self, packed: "PackedBatch", objective: Objective, totals: StepTotals, entropy: bool
    ) -> tuple[dict[str, Tensor], float]:
        """Forward and backward of one micro-batch; its metrics and this rank's share of them."""
        wanted = packed.values["loss_mask"]
        inputs = self.strategy.inputs(packed, wanted)
        scores, entropies = self.scorer(inputs, self.config.temperature, entropy)
        log_probs = self.strategy.collect(scores, inputs)
        spread = self.strategy.collect(entropies, inputs) if entropies is not None else None
        loss, metrics = objective(log_probs, spread, packed, totals)
        if not loss.requires_grad:  # an objective that ignored the log-probs of an empty micro-batch
            loss = loss + 0.0 * log_probs.sum()
        loss.backward()
        return {**metrics, "loss": loss}, self.strategy.share(inputs)

    def _update(self, norm: float) -> float:
        """One optimizer step at the scheduled rate; none where the gradient is not finite. The rate used."""
        assert self.optimizer is not None
        rate = learning_rate(self.config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if math.isfinite(norm):
            self.optimizer.step()
            self.step += 1
        self.optimizer.zero_grad(set_to_none=True)
        return rate

    # ------------------------------------------------------------------ scoring

    @torch.no_grad()
    def forward(self, batch: "TensorDict", entropy: bool = False, temperature: float | None = None) -> "TensorDict":
        """Log-probs (and entropies) of every token but the first of each row, for the whole batch on every rank.

        `temperature` overrides the configuration's. Returns jagged float32 (B, j), on the batch's device.
        """
        self._check_onloaded()
        lengths, plan = self._plan(batch)
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        flat = torch.zeros((2 if entropy else 1, starts[-1]), dtype=torch.float32, device=self.device)
        for packed in self._micro_batches(batch, plan.micro_batches, ("input_ids", "position_ids")):
            scored = self._score(packed, self.config.temperature if temperature is None else temperature, entropy)
            for row, begin, length in zip(packed.indices, packed.cu_seqlens.tolist(), packed.lengths, strict=False):
                flat[:, starts[row] : starts[row] + length] = scored[:, begin : begin + length]
        self.scorer.reshard()  # without a backward pass the outermost weights would stay gathered
        if dist.get_world_size() > 1:
            dist.all_reduce(flat)
        return _scored_batch(flat.to(batch["input_ids"].device), lengths, entropy)

    def _score(self, packed: "PackedBatch", temperature: float, entropy: bool) -> Tensor:
        """f32[1 or 2, T]; zeros for a micro-batch that stands in for none."""
        wanted = packed.token_mask
        wanted[packed.cu_seqlens[:-1].to(torch.int64)] = False
        if "stand_in" in packed.extras:
            wanted = torch.zeros_like(wanted)
        inputs = self.strategy.inputs(packed, wanted)
        scores, entropies = self.scorer(inputs, temperature, entropy)
        rows = [scores] if entropies is None else [scores, entropies]
        # Ranks that share a micro-batch all have its scores, and `forward` adds over ranks: each adds its share.
        share = self.strategy.share(inputs)
        return torch.stack([self.strategy.collect(row, inputs).float() for row in rows]) * share

    # ------------------------------------------------------------------ weights and files

    def export_weights(self, max_bytes: int = PIECE_BYTES) -> Iterator[WeightPiece]:
        """Hugging Face names, tied weights once; all ranks iterate to the end together."""
        self._check_onloaded()
        return pieces(self._full_tensors(), max_bytes)

    def save(self, directory: str | Path) -> None:
        """Write model, optimizer, step and random state; `directory` appears whole or not at all."""
        self._check_onloaded()
        save_checkpoint(Path(directory), self.scorer, self.optimizer, self.step)

    def load(self, directory: str | Path) -> None:
        """Read what `save` wrote, by this or another number of ranks."""
        self._check_onloaded()
        self.step = load_checkpoint(Path(directory), self.scorer, self.optimizer)

    def save_hf(self, directory: str | Path) -> None:
        """Write a directory for AutoModelForCausalLM.from_pretrained; rank 0 holds all weights once in host memory."""
        self._check_onloaded()
        target = Path(directory)
        weights = {}
        for name, tensor in self._full_tensors():
            if dist.get_rank() == 0:
                weights[name] = tensor.detach().to("cpu", copy=True)
        if dist.get_rank() == 0:
            beside = target.with_name(target.name + ".writing")
            self.model.save_pretrained(beside, state_dict=weights)
            replace_directory(beside, target)
        dist.barrier()

    def offload(self) -> None:
        """Move weights and optimizer states to host memory; nothing else works until `onload`."""
        self._move(torch.device("cpu"))
        self._offloaded = True

    def onload(self) -> None:
        """Move them back to the device."""
        self._move(self.device)
        self._offloaded = False

    def supports(self, feature: str) -> Yes | No:
        """See `engines.capability`."""
        return capability(self.config, feature)

    def state_summary(self) -> dict[str, Any]:
        """Plain facts for logs."""
        count = sum(p.numel() for p in self.scorer.parameters())
        return {
            "backend": self.config.backend,
            "batching": self.config.batching,
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "parameters": count,
            "step": self.step,
            "world_size": dist.get_world_size(),
        }

    # ------------------------------------------------------------------ inside

    def _without_zero_gradient_rows(self, batch: "TensorDict", objective: Objective) -> "TensorDict":
        """The rows that matter, at least one; the given batch where all do."""
        zero_gradient_rows = getattr(objective, "zero_gradient_rows", None)
        if zero_gradient_rows is None or not self.config.skip_zero_gradient_rows:
            return batch
        idle = zero_gradient_rows(batch)
        if not bool(idle.any()):
            return batch
        from seqpack.batches.algebra import index_select

        return index_select(batch, (~idle).nonzero().squeeze(1).tolist() or [0])

    def _plan(self, batch: "TensorDict") -> tuple[list[int], Any]:
        from seqpack.batches.batch import lengths as batch_lengths

        lengths = batch_lengths(batch)
        plan = self.strategy.plan(lengths)
        check_agreement(plan.hash, "the plan of this step", self.device)
        return lengths, plan

    def _micro_batches(
        self, batch: "TensorDict", rows: Sequence[Sequence[int]], keys: Sequence[str] | None = None
    ) -> Iterator["PackedBatch"]:
        """Packed micro-batches on the device. An empty one becomes the shortest row with nothing to train or score."""
        from seqpack.batches.packed import pack_each

        chosen = None if keys is None else [key for key in keys if key in batch.keys()]  # noqa: SIM118
        packed = pack_each(batch, [indices for indices in rows if indices], keys=chosen)
        for indices in rows:
            yield (next(packed) if indices else _stand_in(batch, chosen)).to(self.device)

    def _full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def _move(self, device: torch.device) -> None:
        self.scorer.to(device)
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    state[key] = value.to(device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _check_onloaded(self) -> None:
        if self._offloaded:
            raise ValueError("the engine is offloaded: call onload() first")


def _recompute_layers(model: Any) -> None:
    """Gradient checkpointing, under the name this transformers release has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers, each of which becomes a unit of sharding."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{type(model).__name__} has no base_model.layers to shard")
    return list(layers)


def _stand_in(batch: "TensorDict", keys: Sequence[str] | None) -> "PackedBatch":
    from dataclasses import replace

    from seqpack.batches.batch import lengths as batch_lengths
    from seqpack.batches.packed import pack_sequences

    sizes = batch_lengths(batch)
    packed = pack_sequences(batch, [sizes.index(min(sizes))], keys=keys)
    extras = {**packed.extras, "stand_in": [True]}
    if "loss_mask" in packed.values:
        silent = torch.zeros_like(packed.values["loss_mask"])
        return replace(packed.with_values(loss_mask=silent), extras=extras)
    return replace(packed, extras=extras)


def _counts(batch: "TensorDict") -> dict[str, float]:
    from seqpack.batches.batch import lengths

    sizes = lengths(batch)
    return {"tokens": float(sum(sizes)), "sequences": float(len(sizes))}


def _require(batch: "TensorDict", keys: Sequence[str]) -> None:
    missing = [key for key in keys if key not in batch.keys()]  # noqa: SIM118
    if missing:
        raise ValueError(f"the batch lacks {', '.join(missing)}; it has {', '.join(sorted(map(str, batch.keys())))}")


def _scored_batch(flat: Tensor, lengths: Sequence[int], entropy: bool) -> "TensorDict":
    from tensordict import TensorDict

    from seqpack.batches.batch import jagged

    names = ("log_probs", "entropy") if entropy else ("log_probs",)
    columns = {name: jagged(list(flat[i].split(list(lengths)))) for i, name in enumerate(names)}
    return TensorDict(columns, batch_size=[len(lengths)])
