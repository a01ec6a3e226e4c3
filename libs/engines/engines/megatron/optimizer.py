"""AdamW over Megatron's gradient buffers: torch's, with norms that count every parameter of the model once.

What a rank updates is a `Part` of each parameter: all of it, or under the distributed optimizer those of its elements
that are in the rank's share of megatron-core's buffers, which add gradients up there (reduce-scatter) and hand updated
weights back to all ranks (all-gather). megatron-core's own DistributedOptimizer is not used for what is in between: its
files are of its own layout, and its norm trusts marks on parameters that it does not check.

A part has a master of its own where the model computes in bfloat16 (float32), or where the optimizer is on the host;
otherwise its master is the parameter's memory.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.config import EngineConfig
from engines.execution.optimizer import Updated, adamw, set_rates
from engines.execution.reductions import reduce_float64
from engines.megatron.bridge import Shape
from engines.megatron.parameters import HeldParameter, Part, boxed, boxes_of


class Updates:
    """An optimizer's state and step for the parameters of one rank.

    With `config.optimizer_on_host` masters are in host memory: gradients go there and weights come back once a step.
    """

    def __init__(
        self,
        config: EngineConfig,
        chunks: Sequence[Any],
        parameters: Sequence[HeldParameter],
        world: dist.ProcessGroup,
        scales: Mapping[str, float],
    ) -> None:
        """`chunks`: the stages in megatron-core's DistributedDataParallel. `scales`: multiples of the learning rate, by
        the names of transformers' parameters."""
        self.limit = config.grad_clip
        self.world = world
        self.chunks = chunks
        self.shared = config.distributed_optimizer
        ranges = _own_ranges(chunks) if self.shared else None
        self.parts = tuple(_parts(parameters, ranges))
        self.masters = tuple(_master(part, config) for part in self.parts)
        updated = [
            Updated(master, part.one.parameter.ndim >= 2, _scale(part.one, scales)) for part, master in self.updated()
        ]
        self.optimizer = adamw(updated, config)

    def updated(self) -> Iterator[tuple[Part, Tensor]]:
        """Parts with their masters."""
        return zip(self.parts, self.masters, strict=True)

    def step(self, lr: float, loss: Tensor) -> Tensor:
        """Clip and update where the norm is finite on all ranks: a scalar, the norm before clipping.

        `loss` is this rank's share of the step's.
        """
        norm = self._norm(loss)
        known = float(norm)
        if math.isfinite(known):
            set_rates(self.optimizer, lr)
            scale = 1.0 if self.limit is None or known <= self.limit else self.limit / known
            for part, master in self.updated():
                master.grad = _gradient(part).mul_(scale).to(master.device)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.publish()
        return norm

    def take_loaded(self) -> None:
        """Go on from a checkpoint that was read into masters and `state`.

        All parameters step alike, but one of a tensor's has its number of steps there: it is that of all.
        """
        kept = [state["step"] for state in self.optimizer.state.values()]
        most = max((float(step) for step in kept), default=0.0)
        for step in kept:
            step.fill_(most)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Hand masters to the parameters, on all ranks that hold them."""
        for part, master in self.updated():
            if not _same_memory(part.values, master):
                part.values.copy_(master)
        for chunk in self.chunks if self.shared else ():
            chunk.start_param_sync()

    def _norm(self, loss: Tensor) -> Tensor:
        """The norm of the whole gradient, NaN where a rank's loss is not finite. Collective over the world."""
        squares = 0.0 * loss.detach().double()
        for part in self.parts:
            if part.owned:
                gradient = _gradient(part)
                squares = squares + gradient.to(torch.promote_types(gradient.dtype, torch.float32)).square().sum()
        return reduce_float64(squares, self.world).sqrt()

    def tensors(self) -> list[Tensor]:
        """Masters and moments, for who moves them."""
        moments = [value for state in self.optimizer.state.values() for value in state.values() if value.ndim]
        return [master.detach() for master in self.masters] + moments

    def state(self, shapes: Mapping[str, Shape]) -> dict[str, dict[str, Any]]:
        """Moments and step of every transformers tensor that this rank updates a part of; loading writes into them."""
        kept: dict[Part, dict[str, Tensor]] = {part: self.optimizer.state[master] for part, master in self.updated()}
        for part, master in self.updated():
            if not kept[part]:
                kept[part]["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
                kept[part] |= {name: torch.zeros_like(master.detach()) for name in ("exp_avg", "exp_avg_sq")}
        out: dict[str, dict[str, Any]] = {}
        for moment in ("exp_avg", "exp_avg_sq"):
            stored = {part: state[moment] for part, state in kept.items()}
            for name, tensor in boxed(self.parts, shapes, stored.__getitem__).items():
                out.setdefault(name, {})[moment] = tensor
        for part, master in self.updated():
            for name, _, _ in boxes_of(part, master.detach()):
                out[name]["step"] = kept[part]["step"]
        return out


def _scale(one: HeldParameter, scales: Mapping[str, float]) -> float:
    """The multiple of the learning rate of what a parameter is made of; ValueError where that differs."""
    found = {piece.tensor: scales.get(piece.tensor, 1.0) for piece in one.held.pieces}
    if len(set(found.values())) > 1:
        raise ValueError(
            f"learning_rates give {' and '.join(found)} different rates, and Megatron holds them as one parameter: "
            "name them alike, or set backend='fsdp2'"
        )
    return next(iter(found.values()), 1.0)


def _parts(
    parameters: Sequence[HeldParameter], ranges: Mapping[nn.Parameter, tuple[int, int]] | None
) -> Iterator[Part]:
    for one in parameters:
        if ranges is None:
            yield Part.whole(one)
        elif one.parameter in ranges:
            yield Part(one, *ranges[one.parameter], owned=one.held.speaks)


def _own_ranges(chunks: Sequence[Any]) -> dict[nn.Parameter, tuple[int, int]]:
    """The elements of each parameter in this rank's share of a bucket: as many of each bucket for every rank."""
    found = {}
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel() // buffer.data_parallel_group.size()
                low = bucket.offset + buffer.data_parallel_group.rank() * size
                for parameter in bucket.params_list:
                    start, stop, _ = buffer.param_index_map[parameter]
                    first, last = max(start, low), min(stop, low + size)
                    if first < last:
                        found[parameter] = (first - start, last - start)
    return found


def _gradient(part: Part) -> Tensor:
    main: Tensor = part.one.parameter.main_grad  # type: ignore[attr-defined]
    return part.of(main)


def _master(part: Part, config: EngineConfig) -> nn.Parameter:
    values = part.values
    wide = torch.promote_types(values.dtype, torch.float32)
    device = torch.device("cpu") if config.optimizer_on_host else values.device
    own = config.optimizer_on_host or wide != values.dtype
    return nn.Parameter(values.to(device, wide, copy=True) if own else values)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and one.data_ptr() == other.data_ptr()
