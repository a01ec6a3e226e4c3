"""Weights, optimizer and step of an engine: where they are, and the files that they are written to and read from."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engines.adapters.resume import adapter_metadata, check_adapter
from engines.config import EngineConfig
from engines.execution.executor import Executor
from engines.mtp.head import is_of_head
from engines.nonfinite import FiniteGuard, finite_tensors
from engines.scoring.rechecks import Rechecks
from engines.scoring.router_counts import ScoredCounts
from engines.storage.checkpoint import load_checkpoint
from engines.storage.directories import fresh_temporary, replace_directory
from engines.storage.writer import CheckpointWriter
from engines.weights.model_weights import ModelWeights
from engines.weights.saving import save_configuration, save_weights
from engines.weights.shard_export import ShardedExecutor, WeightShard, export_shards
from engines.weights.sizes import PIECE_BYTES
from engines.weights.weight_pieces import WeightPiece, pieces


class EngineState:
    """The state of an `engines.step.Engine`."""

    def __init__(self, config: EngineConfig, executor: Executor, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        self.executor = executor
        self.groups = executor.groups
        self.device = executor.device
        self.step = 0
        self.guard = FiniteGuard(config)
        self.rechecks = Rechecks(config)
        self._offloaded = False
        self._writer = CheckpointWriter()
        self._accumulated: Tensor | None = None
        """This rank's share of the losses whose gradient waits for an update, f64[]; None where none does."""
        self.scored_counts: ScoredCounts | None = None
        """What routers chose in the last whole batch that these weights scored, where they add a balancing loss."""

    def export_weights(self, max_bytes: int = PIECE_BYTES, live: bool = False) -> Iterator[WeightPiece]:
        """Yield the weights as a checkpoint holds them, tied ones once; all ranks iterate to the end together.

        Names, split experts and dtypes are those of the checkpoint that the model came from, and what it held besides
        is carried along; `live` gives names, shapes and dtypes of the module that is trained, for a sampler over the
        same transformers class (which has no head for multi-token prediction). A piece may be a view of the weights:
        read it before the next step.
        `NonFiniteError` for a weight that is not finite.
        """
        self._check_onloaded()
        tensors = finite_tensors(self.executor.tensors())
        if not live:
            return pieces(self.weights.export(tensors), max_bytes)
        return pieces((pair for pair in tensors if not is_of_head(self.executor.model, pair[0])), max_bytes)

    def export_shards(self, live: bool = False) -> Iterator[WeightShard]:
        """Yield what this rank holds of `export_weights`, in place and without any collective: it may be read until the
        next step. Each element is some rank's, and ranks that hold the same have equal values.

        ValueError for an executor that cannot say, and for one with adapters.
        """
        self._check_onloaded()
        if self.config.lora.rank:
            raise ValueError("weights with adapters are not sent in shards: send the adapters (adapter_pieces)")
        if not isinstance(self.executor, ShardedExecutor):
            raise ValueError(f"{type(self.executor).__name__} has no shards(): use export_weights")
        held = self.executor.shards()
        if live:
            held = (one for one in held if not is_of_head(self.executor.model, one.name))
        return export_shards(self.weights, held, dist.get_rank(), live)

    def save(
        self,
        directory: str | Path,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
        also: Sequence[str | Path] = (),
    ) -> None:
        """Write model, optimizer, step and random state; `directory` appears whole or not at all.

        `extra`: plain JSON of the caller's, such as where its data is, which `load` returns. Without `wait` this
        returns when the state has been copied to host memory, and the rest is written while training goes on; the
        directory appears later. `wait_for_saves`, `load` and the next save wait for it, and raise what went wrong.
        `also`: directories that hold the same (its files under further names): each appears after those before it.
        """
        self._check_onloaded()
        self._check_stepped("save")
        metadata = {"step": self.step, "skipped_steps": self.guard.skipped} | adapter_metadata(self.config.lora)
        metadata["recheck_waited"] = self.rechecks.waited
        metadata["extra"] = dict(extra or {})
        self._writer.save(Path(directory), self.executor.state(), metadata, wait, [Path(path) for path in also])

    def saves_done(self) -> bool:
        """Return whether what `save` began is whole on disk. Local; `wait_for_saves` raises its errors."""
        return self._writer.done

    def wait_for_saves(self) -> None:
        """Wait until what `save` began is on disk; RuntimeError or OSError where it could not be written."""
        self._writer.wait()

    def load(self, directory: str | Path) -> dict[str, Any]:
        """Read what `save` wrote, by this or another number of ranks, and return its `extra`.

        ValueError for one that is damaged, or of another model, base or scale of adapters; all is then as it was.
        """
        self._check_onloaded()
        self._writer.wait()
        state = self.executor.state()
        shared = self.groups.layout.pp > 1 or self.config.distributed_optimizer
        check = partial(check_adapter, self.config, state)
        metadata = load_checkpoint(Path(directory), state, self.groups.world if shared else None, check)
        self.executor.load_state(state)
        self.step, self._accumulated, self.scored_counts = int(metadata["step"]), None, None
        self.guard = FiniteGuard(self.config, skipped=int(metadata.get("skipped_steps", 0)))
        self.rechecks = Rechecks(self.config, metadata.get("recheck_waited"), loaded=True)
        return dict(metadata.get("extra", {}))

    def save_hf(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write a directory for AutoModelForCausalLM.from_pretrained, in the dtypes of the source or in `dtype`.

        Weights are gathered one tensor at a time; rank 0 holds one file of them in host memory. `NonFiniteError` for
        a weight that is not finite, and after a step that ended a run; the directory is then as it was.
        """
        self._check_onloaded()
        self.guard.check_export()
        target = Path(directory)
        writes = dist.get_rank() == 0
        tensors = self.weights.export(finite_tensors(self.executor.tensors()), dtype, carried=writes)
        if writes:
            made = fresh_temporary(target)
            save_weights(tensors, made)
            save_configuration(self.weights, self.executor.model, made, dtype)
            replace_directory(made, target)
        else:
            deque(tensors, maxlen=0)
        dist.barrier()

    def offload(self) -> None:
        """Move weights and optimizer states to host memory; nothing else works until `onload`."""
        self._check_stepped("offload")
        if not self._offloaded:
            self._offloaded = True  # also where the move fails: `onload` brings back what has moved
            self.executor.move(torch.device("cpu"))

    def onload(self) -> None:
        """Move weights and optimizer states back to the device."""
        if self._offloaded:
            self.executor.move(self.device)
            self._offloaded = False

    def _check_onloaded(self) -> None:
        if self._offloaded:
            raise ValueError("the engine is offloaded: call onload() first")

    def _check_stepped(self, what: str) -> None:
        if self._accumulated is not None:
            raise ValueError(f"{what} would lose the gradient of forward_backward: call optimizer_step first")
