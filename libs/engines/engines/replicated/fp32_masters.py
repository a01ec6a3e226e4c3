"""The share of one rank in weights that every rank holds whole: exact float32 values and AdamW's moments.

A weight is cut along dimension 0 as `torch.chunk` does (as FSDP2 shards it), so that checkpoints fit both. The rank
keeps, for its rows, the moments and, where weights are computed with in bfloat16, the rest that makes them exact
(`engines.fast.adamw.split`). States leave as float32 DTensors, by the names and in the nesting that torch's
`get_optimizer_state_dict` gives.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from engines.config import EngineConfig
from engines.execution.learning_rates import LR_SCALE
from engines.execution.optimizer import DECAYS
from engines.fast.adamw import AdamW, join, split, update
from engines.weights.disk_weights import DiskWeights
from engines.weights.row_shards import rows_of


@dataclass
class Master:
    """One parameter, whole, and this rank's share of its exact value and moments (None before it is trained)."""

    name: str
    parameter: nn.Parameter
    rows: slice
    rest: Tensor | None
    moments: tuple[Tensor, Tensor] | None
    scale: float = 1.0
    """Multiple of the learning rate."""

    @staticmethod
    def of(
        name: str,
        parameter: nn.Parameter,
        dtype: torch.dtype,
        mesh: DeviceMesh,
        train: bool,
        disk: DiskWeights | None = None,
        scale: float = 1.0,
    ) -> "Master":
        """Take a float32 parameter over, rounded to the compute dtype. `disk`: where its value is, `scale`: its
        multiple of the learning rate."""
        if disk is None:
            exact = parameter.detach()
        else:
            parameter.data = exact = disk.whole(name.removeprefix("model."), torch.float32, parameter.device)
        rows = rows_of(exact.shape[0], mesh.size(), mesh.get_local_rank())
        rest = None
        if dtype == torch.bfloat16:
            rounded, rests = split(exact.contiguous())
            parameter.data, rest = rounded, rests[rows].clone()
        moments = None
        if train:
            zeros = torch.zeros_like(exact[rows], dtype=torch.float32)
            moments = zeros, torch.zeros_like(zeros)
        return Master(name, parameter, rows, rest, moments, scale)

    @property
    def weight(self) -> Tensor:
        """This rank's rows of the weight, in place."""
        return self.parameter.detach()[self.rows]

    def exact(self) -> Tensor:
        """Return this rank's rows in float32, exactly; a copy where they are kept in two parts."""
        return self.weight if self.rest is None else join(self.weight, self.rest)

    def set_exact(self, value: Tensor) -> None:
        """Set this rank's rows from float32."""
        if self.rest is None:
            self.weight.copy_(value)
            return
        rounded, rest = split(value.contiguous())
        self.weight.copy_(rounded)
        self.rest.copy_(rest)

    def update(self, grad: Tensor, controls: Tensor, settings: AdamW, weight_decay: float) -> None:
        """Make a step of AdamW on this rank's rows; matrices alone decay."""
        assert self.moments is not None, "the engine refuses to train without an optimizer"
        decay = weight_decay if self.parameter.ndim >= 2 else 0.0
        update(self.weight, self.rest, self.moments, grad, controls, settings, decay)

    def beside(self) -> list[Tensor]:
        """Return the tensors kept beside the weight: the rest and the moments."""
        return [*(() if self.rest is None else (self.rest,)), *(self.moments or ())]

    def move(self, take: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensors beside the weight by their moved copies."""
        self.rest = None if self.rest is None else take(self.rest)
        self.moments = None if self.moments is None else (take(self.moments[0]), take(self.moments[1]))

    def spread(self, rows: Tensor, mesh: DeviceMesh) -> DTensor:
        """Return the sharded tensor of which this rank holds these rows."""
        whole = self.parameter
        return DTensor.from_local(rows, mesh, (Shard(0),), run_check=False, shape=whole.shape, stride=whole.stride())


class ExactRows:
    """A master's rows in float32, of which an index makes a part, and no more."""

    dtype = torch.float32

    def __init__(self, master: Master) -> None:
        self._master = master

    def __getitem__(self, index: Any) -> Tensor:
        """Return a part of the rows, exactly."""
        weight, rest = self._master.weight[index], self._master.rest
        return weight if rest is None else join(weight, rest[index])


def optimizer_state(masters: list[Master], config: EngineConfig, mesh: DeviceMesh, step: Tensor) -> dict[str, Any]:
    """Return the moments as torch's distributed checkpoint takes them, like those of a torch.optim.AdamW."""
    state: dict[str, Any] = {}
    for one in masters:
        assert one.moments is not None, "the engine refuses to train without an optimizer"
        first, second = (one.spread(moment, mesh) for moment in one.moments)
        state[one.name] = {"step": step.float(), "exp_avg": first, "exp_avg_sq": second}
    kinds = [
        (scale, decays) for scale in {1.0: None} | {one.scale: None for one in masters} for decays in (True, False)
    ]
    names = [
        [one.name for one in masters if (one.scale, one.parameter.ndim >= 2) == (scale, decays)]
        for scale, decays in kinds
    ]
    groups = [
        {
            "lr": config.lr * scale,
            LR_SCALE: scale,
            DECAYS: float(decays),
            "betas": config.betas,
            "eps": config.eps,
            "weight_decay": config.weight_decay if decays else 0.0,
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": True,
            "decoupled_weight_decay": True,
            "params": group,
        }
        for group, (scale, decays) in zip(names, kinds, strict=True)
        if group
    ]
    return {"state": state, "param_groups": groups}
