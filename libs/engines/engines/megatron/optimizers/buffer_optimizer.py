"""AdamW over Megatron's gradient buffers, with norms that count every parameter of the model once.

What a rank updates is a `Part` of each parameter: all of it, or under the distributed optimizer those of its elements
that are in the rank's share of megatron-core's buffers, which add gradients up there (reduce-scatter) and hand updated
weights back to all ranks (all-gather). What is in between is torch's AdamW here (`TorchUpdates`), or megatron-core's
own optimizer (`engines.megatron.optimizers.core_optimizer`). Norm, clipping and files are ours (`Updates`) under both:
the files of megatron-core's are of its own layout, and its norm trusts marks on parameters that it does not check.

A part has a master of its own where the model computes in bfloat16 (float32), or where the optimizer is on the host;
otherwise its master is the parameter's memory.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engines.config import EngineConfig
from engines.execution.muon import MOMENTS as MOMENTS
from engines.execution.muon import Held, Place, moments_of
from engines.execution.optimizer import Updated, name_of, optimizer_of, set_adam
from engines.execution.reductions import reduce_float64
from engines.megatron.weights.bridge import Shape
from engines.megatron.weights.parameters import HeldParameter, Part, boxed, boxes_of


@dataclass(frozen=True, eq=False)
class Stepped:
    """The master of a part in the shape that its optimizer uses, and that optimizer."""

    master: Tensor
    optimizer: torch.optim.Optimizer

    @property
    def flat(self) -> Tensor:
        """The elements of the master [stop - start]: a view."""
        return self.master.detach().view(-1)

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state of it, empty before its first step."""
        state: dict[str, Any] = self.optimizer.state[self.master]
        return state

    @property
    def moments(self) -> tuple[str, ...]:
        """Names of its moments."""
        return moments_of(self.optimizer, self.master)

    def ensure_state(self) -> dict[str, Tensor]:
        """Return moments and `step` f32[], zeros before the first step; a checkpoint is read into them."""
        if not self.state:
            self.state["step"] = torch.zeros((), dtype=torch.float32, device=self.master.device)
            self.state.update({name: torch.zeros_like(self.master.detach()) for name in self.moments})
        return self.state

    @property
    def steps(self) -> float:
        """The number of steps so far, as read from a checkpoint."""
        return float(self.ensure_state()["step"])

    def go_on(self, steps: float) -> None:
        """Set the number of steps."""
        self.ensure_state()["step"].fill_(steps)


class Updates(ABC):
    """An optimizer's state and step for the parameters of one rank."""

    stepped: tuple[Stepped, ...]
    """Masters with their optimizers, one for each part."""

    def __init__(
        self, config: EngineConfig, chunks: Sequence[Any], parameters: Sequence[HeldParameter], world: dist.ProcessGroup
    ) -> None:
        """Find this rank's parts. `chunks`: the stages in megatron-core's DistributedDataParallel."""
        self.world = world
        self.chunks = chunks
        self.shared = config.distributed_optimizer
        ranges = _own_ranges(chunks) if self.shared else None
        self.parts = tuple(_parts(parameters, ranges))

    @abstractmethod
    def _update(self, lr: float, adam: EngineConfig) -> None:
        """Step by the gradients in megatron-core's buffers, and copy the new values to the parameters."""

    @property
    def masters(self) -> tuple[Tensor, ...]:
        """The masters, flat, one for each part."""
        return tuple(one.flat for one in self.stepped)

    def updated(self) -> Iterator[tuple[Part, Tensor]]:
        """Return each part with its master."""
        return zip(self.parts, self.masters, strict=True)

    def step(self, lr: float, loss: Tensor, adam: EngineConfig) -> Tensor:
        """Clip and update where the norm is finite on all ranks; return the norm before clipping, a scalar.

        `loss` is this rank's share of the step's.
        """
        norm = self._norm(loss)
        known = float(norm)
        if math.isfinite(known):
            scale = 1.0 if adam.grad_clip is None or known <= adam.grad_clip else adam.grad_clip / known
            for part in self.parts:
                gradient_of(part).mul_(scale)
            self._update(lr, adam)
        return norm

    def take_loaded(self) -> None:
        """Resume from a checkpoint that was read into masters and `state`.

        All parameters have had the same number of steps, so what was read for some holds for all.
        """
        most = max((one.steps for one in self._step_owners().values()), default=0.0)
        for one in self.stepped:
            one.go_on(most)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy masters to the parameters, on all ranks that hold them."""
        for part, master in self.updated():
            if not _same_memory(part.values, master):
                part.values.copy_(master)
        for chunk in self.chunks if self.shared else ():
            chunk.start_param_sync()

    def _norm(self, loss: Tensor) -> Tensor:
        """Return the norm of the whole gradient, NaN where a rank's loss is not finite. Collective over the world."""
        squares = 0.0 * loss.detach().double()
        for part in self.parts:
            if part.owned:
                gradient = gradient_of(part)
                squares = squares + gradient.to(torch.promote_types(gradient.dtype, torch.float32)).square().sum()
        return reduce_float64(squares, self.world).sqrt()

    def tensors(self) -> list[Tensor]:
        """Return masters and moments, for moves to another device."""
        moments = [one.state[name] for one in self.stepped for name in one.moments if name in one.state]
        return [*self.masters, *moments]

    def state(self, shapes: Mapping[str, Shape]) -> dict[str, dict[str, Any]]:
        """Return moments and step of every transformers tensor that this rank updates; loading writes into them."""
        moments = {part: one.ensure_state() for part, one in zip(self.parts, self.stepped, strict=True)}
        out: dict[str, dict[str, Any]] = {}
        for moment in dict.fromkeys(name for one in self.stepped for name in one.moments):
            stored = {part: state[moment].view(-1) for part, state in moments.items() if moment in state}
            for name, tensor in boxed([*stored], shapes, stored.__getitem__).items():
                out.setdefault(name, {})[moment] = tensor
        states = dict(zip(self.stepped, moments.values(), strict=True))
        for name, one in self._step_owners().items():
            out[name]["step"] = states[one]["step"]
        return out

    def _step_owners(self) -> dict[str, Stepped]:
        """Return, by transformers tensor, one of its parts: the one whose number of steps a file holds."""
        parts = zip(self.parts, self.stepped, strict=True)
        return {name: one for part, one in parts for name, _, _ in boxes_of(part, one.flat)}


class TorchUpdates(Updates):
    """Updates by torch's AdamW. With `config.optimizer_on_host` masters are in host memory: gradients go there and
    weights come back once a step."""

    def __init__(
        self,
        config: EngineConfig,
        chunks: Sequence[Any],
        parameters: Sequence[HeldParameter],
        world: dist.ProcessGroup,
        scales: Mapping[str, float],
        matrices: Collection[str] = (),
    ) -> None:
        """Make the optimizer; see `Updates`. By transformers name: `scales`, multiples of the learning rate, and
        `matrices` that Muon updates."""
        super().__init__(config, chunks, parameters, world)
        masters = [_master(part, config) for part in self.parts]
        updated = [
            Updated(master, part.one.parameter.ndim >= 2, _scale(part.one, scales), _held(part, matrices))
            for part, master in zip(self.parts, masters, strict=True)
        ]
        self.optimizer = optimizer_of(updated, config, Place(world, next(chunks[0].parameters()).device))
        self.stepped = tuple(Stepped(master, self.optimizer) for master in masters)

    def __str__(self) -> str:
        """Return the optimizer's name for logs."""
        return name_of(self.optimizer)

    def _update(self, lr: float, adam: EngineConfig) -> None:
        set_adam(self.optimizer, lr, adam)
        for part, one in zip(self.parts, self.stepped, strict=True):
            one.master.grad = gradient_of(part).to(one.master.device)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.publish()


def _held(part: Part, matrices: Collection[str]) -> Held | None:
    """Return what a part holds of matrices; None where AdamW updates it. ValueError where it is both."""
    names = {piece.tensor for piece in part.one.held.pieces}
    if names.isdisjoint(matrices):
        return None
    if other := sorted(names.difference(matrices)):
        raise ValueError(
            f"optimizer='muon': {other[0]} is no matrix, and Megatron holds it in one parameter with one: set "
            "backend='fsdp2', or optimizer='adamw'"
        )
    return Held(lambda flat: [*boxes_of(part, flat)], part.owned)


def _scale(one: HeldParameter, scales: Mapping[str, float]) -> float:
    """Return a parameter's multiple of the learning rate; ValueError where its tensors have different ones."""
    multiples = {piece.tensor: scales.get(piece.tensor, 1.0) for piece in one.held.pieces}
    if len(set(multiples.values())) > 1:
        raise ValueError(
            f"learning_rates give {' and '.join(multiples)} different rates, and Megatron holds them as one parameter: "
            "name them alike, or set backend='fsdp2'"
        )
    return next(iter(multiples.values()), 1.0)


def _parts(
    parameters: Sequence[HeldParameter], ranges: Mapping[nn.Parameter, tuple[int, int]] | None
) -> Iterator[Part]:
    for one in parameters:
        if ranges is None:
            yield Part.whole(one)
        elif one.parameter in ranges:
            yield Part(one, *ranges[one.parameter], owned=one.held.counts)


def _own_ranges(chunks: Sequence[Any]) -> dict[nn.Parameter, tuple[int, int]]:
    """Return each parameter's elements in this rank's share of the buckets, which are split evenly over ranks."""
    ranges = {}
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for bucket in buffer.buckets:
                size = bucket.grad_data.numel() // buffer.data_parallel_group.size()
                low = bucket.offset + buffer.data_parallel_group.rank() * size
                for parameter in bucket.params_list:
                    start, stop, _ = buffer.param_index_map[parameter]
                    first, last = max(start, low), min(stop, low + size)
                    if first < last:
                        ranges[parameter] = (first - start, last - start)
    return ranges


def gradient_of(part: Part) -> Tensor:
    """Return a part's elements of megatron-core's gradient buffer: a view."""
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
