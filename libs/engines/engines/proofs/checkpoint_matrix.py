"""The two tables of checkpoints: `python -m engines checkpoints`.

Resumed: a run stops after two steps, is saved in the background while it continues, and is resumed in a new engine of
other weights. It is compared with the run that did not stop: metrics of each step and all bits of weights and moments.

Moved: a run saved by W ranks and loaded by W'. All bits of weights and moments are those that were saved; the next
step's loss is that of the run that did not stop, up to the order in which ranks add (the difference is shown).
"""

import hashlib
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from engines.build import build_engine
from engines.config import EngineConfig
from engines.lora_config import LoraConfig
from engines.proofs.forked_ranks import launch_forked
from engines.tiny import tiny_batch, tiny_model

try:
    from objectives import SFT
except ImportError as error:
    raise ImportError(
        "runs are compared by a loss of tessera-objectives: pip install ./libs/seqpack ./libs/objectives of a checkout"
    ) from error

LENGTHS = (7, 3, 12, 5, 9, 2, 14, 6)
WORLDS = (1, 2, 4)
LOSS = 1e-5
"""Largest difference of a loss between numbers of ranks."""


@dataclass(frozen=True)
class Case:
    """A way to train a tiny model; `ranks` of the resumed run."""

    model: str = "dense"
    batching: str = "packed"
    context_parallel: str = "off"
    weights: str = "sharded"
    copies: int = 1
    """Number of copies of sharded weights, where there are as many ranks."""
    master_dtype: str = "float32"
    gradient_checkpointing: bool = False
    lora: int = 0
    """Rank of adapters."""
    offloaded: bool = False
    """Whether weights and moments were on the host before it was saved, and after it was loaded."""
    on_host: str = ""
    """State kept on the host all along: the moments ("optimizer"), or weights as well ("parameters")."""
    ranks: int = 1

    def __str__(self) -> str:
        extras = [f"{self.copies} copies"] * (self.copies > 1)
        extras += [f"context parallel {self.context_parallel}"] * (self.context_parallel != "off")
        extras += ["gradient checkpointing"] * self.gradient_checkpointing
        extras += [f"LoRA {self.lora}"] * bool(self.lora) + ["offloaded between"] * self.offloaded
        extras += [f"{self.on_host} on the host"] * bool(self.on_host)
        return ", ".join([self.model, self.batching, self.weights, self.master_dtype, *extras])


_MODELS, _WEIGHTS, _LORA = ("dense", "moe"), ("sharded", "replicated"), (0, 2)
_HELD: tuple[dict[str, Any], ...] = ({}, {"offloaded": True}, {"on_host": "optimizer"}, {"on_host": "parameters"})
_TRAINED = tuple(
    {"model": m, "lora": n, **held}
    for m, n, held in product(_MODELS, _LORA, _HELD)
    if not (n and held.get("on_host") == "parameters")  # refused by name
)
RESUMED = tuple(dict.fromkeys((
    *(Case(**trained) for trained in _TRAINED),
    *(Case(context_parallel=c, ranks=2, **trained) for c, trained in product(("off", "dynamic"), _TRAINED)),
    *(Case(m, b, weights=w) for m, b, w in product(_MODELS, ("packed", "padded"), _WEIGHTS)),
    *(Case(m, offloaded=o, weights=w, ranks=n) for m, o, w, n in product(_MODELS, (False, True), _WEIGHTS, (1, 2))),
    *(Case(m, copies=2, ranks=n) for m, n in product(_MODELS, (2, 4))),
    *(Case(m, copies=2, lora=2, ranks=4) for m in _MODELS),
    *(Case(m, context_parallel="static:2", lora=n, ranks=2) for m, n in product(_MODELS, _LORA)),
    *(Case(m, context_parallel="dynamic", weights="replicated", ranks=2) for m in _MODELS),
    *(Case(batching=b, master_dtype="bfloat16") for b in ("packed", "padded")),
    *(Case(m, gradient_checkpointing=True, lora=n) for m, n in product(_MODELS, _LORA)),
    Case(offloaded=True, copies=2, ranks=4),
)))  # fmt: skip
MOVED = tuple(dict.fromkeys((
    *(Case(**trained) for trained in _TRAINED),
    *(Case(m, context_parallel="dynamic", lora=n) for m, n in product(_MODELS, _LORA)),
    *(Case(m, copies=2, lora=n) for m, n in product(_MODELS, _LORA)),
    *(Case(m, weights="replicated") for m in _MODELS),
)))  # fmt: skip


def main(resumed: Sequence[Case] = RESUMED, moved: Sequence[Case] = MOVED, worlds: Sequence[int] = WORLDS) -> int:
    """Print both tables; return 1 where a cell is wrong."""
    bad = 0
    print("| resumed | ranks | metrics | weights and moments |\n| --- | --- | --- | --- |")
    for case, metrics, state in resume_all(resumed):
        print(f"| {case} | {case.ranks} | {_word(metrics)} | {_word(state)} |")
        bad += not (metrics and state)
    print("\n| moved | saved by | loaded by | weights and moments | next loss differs by |\n" + "| --- " * 5 + "|")
    for case, saved, loaded, state, difference in move_all(moved, worlds):
        print(f"| {case} | {saved} | {loaded} | {_word(state)} | {difference:.1e} |")
        bad += not state or difference > LOSS
    print(f"\n{len(resumed)} runs resumed, {len(moved)} moved {len(worlds) ** 2} times each; {bad} cells are wrong")
    return int(bool(bad))


def resume_all(cases: Sequence[Case]) -> Iterator[tuple[Case, bool, bool]]:
    """Yield (case, equal metrics, equal state): whether the resumed run has the bits of the one that did not stop."""
    for ranks in sorted({case.ranks for case in cases}):
        own = [case for case in cases if case.ranks == ranks]
        with _folder() as folder:
            for case, equal in zip(own, launch_forked(_resume, (own, folder), ranks), strict=True):
                yield case, *equal


def move_all(cases: Sequence[Case], worlds: Sequence[int]) -> Iterator[tuple[Case, int, int, bool, float]]:
    """Yield (case, W, W', whether all bits are those saved, difference of the next loss)."""
    with _folder() as folder:
        saved = {ranks: launch_forked(_save, (cases, folder / str(ranks)), ranks) for ranks in worlds}
        for loaded in worlds:
            results = launch_forked(_load, (cases, [folder / str(ranks) for ranks in worlds]), loaded)
            for ranks, row in zip(worlds, results, strict=True):
                for case, (digest, loss), (want, next_loss) in zip(cases, row, saved[ranks], strict=True):
                    yield case, ranks, loaded, digest == want, abs(loss - next_loss)


def _engine(case: Case, seed: int = 0) -> Any:
    config = EngineConfig(
        device="cpu", lr=1e-2, warmup_steps=3, weight_decay=0.1, eps=1e-3, max_tokens_per_rank=20,
        batching=case.batching, context_parallel=case.context_parallel, weights=case.weights,  # type: ignore[arg-type]
        master_dtype=case.master_dtype, gradient_checkpointing=case.gradient_checkpointing,  # type: ignore[arg-type]
        shard_ranks=None if case.copies == 1 else max(1, dist.get_world_size() // case.copies),
        lora=LoraConfig(rank=case.lora) if case.lora else LoraConfig(),
        optimizer_on_host=bool(case.on_host), parameters_on_host=case.on_host == "parameters",
    )  # fmt: skip
    torch.manual_seed(seed)  # of adapters, which begin anew; the base under them is the same
    model = tiny_model(case.model, seed=0 if case.lora else seed, scale=2.0, num_hidden_layers=2)
    return build_engine(config, model)


def _run(built: Any, first: int, last: int) -> list[dict[str, float]]:
    return [built.train_batch(tiny_batch(list(LENGTHS), seed=seed), SFT()) for seed in range(first, last)]


def _resume(cases: Sequence[Case], folder: Path) -> list[tuple[bool, bool]]:
    results = []
    for number, case in enumerate(cases):
        built, resumed = _engine(case), _engine(case, seed=7)
        _run(built, 0, 2)
        _move_out_and_in(case, built)
        built.save(folder / str(number), wait=False)
        want = _run(built, 2, 4)
        built.wait_for_saves()
        resumed.load(folder / str(number))
        _move_out_and_in(case, resumed)
        results.append((_run(resumed, 2, 4) == want, _digest(resumed) == _digest(built)))
    return results


def _move_out_and_in(case: Case, built: Any) -> None:
    if case.offloaded:
        built.offload()
        built.onload()


def _save(cases: Sequence[Case], folder: Path) -> list[tuple[str, float]]:
    results = []
    for number, case in enumerate(cases):
        built = _engine(case)
        _run(built, 0, 2)
        _move_out_and_in(case, built)
        built.save(folder / str(number))
        results.append((_digest(built), _run(built, 2, 3)[0]["loss"]))
    return results


def _load(cases: Sequence[Case], folders: Sequence[Path]) -> list[list[tuple[str, float]]]:
    results: list[list[tuple[str, float]]] = []
    for folder in folders:
        results.append([])
        for number, case in enumerate(cases):
            built = _engine(case, seed=7)
            built.load(folder / str(number))
            _move_out_and_in(case, built)
            results[-1].append((_digest(built), _run(built, 2, 3)[0]["loss"]))
    return results


def _digest(built: Any) -> str:
    """Return the SHA-256 of all weights and moments, whole. Collective."""
    state = built.executor.state()
    tensors = dict(state["model"])
    for name, moments in state["optimizer"]["state"].items():
        tensors |= {f"{name}.{key}": value for key, value in moments.items()}
    digest = hashlib.sha256(str(built.step).encode())
    for name in sorted(tensors):
        digest.update(name.encode() + _whole(tensors[name]).contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _word(same: bool) -> str:
    return "equal" if same else "DIFFERENT"


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)
