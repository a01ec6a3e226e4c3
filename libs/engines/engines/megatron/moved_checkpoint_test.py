"""A checkpoint goes from TP2·PP2 to TP1·PP1·EP2 and back: the same bits of weights and moments, and the same steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from engines import TrainEngine
from engines.megatron.runtime.process_groups import release
from engines.proofs.forked_ranks import launch_forked
from engines.proofs.megatron_layouts import LENGTHS, STEPS, LayoutCase, engine_of, exported_by
from engines.testing.same_runs import assert_same_bits
from engines.tiny import tiny_batch
from objectives import GRPO

MODEL = "Qwen3.5 MoE"
OBJECTIVE = GRPO(kl_coef=0.1, entropy_coef=0.01, off_policy="mask")
WIDE, NARROW = {"tensor_parallel": 2, "pipeline_parallel": 2}, {"expert_parallel": 2}
RANKS = {"wide": 4, "narrow": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16, shared out": {"dtype": "bfloat16", "distributed_optimizer": True},  # float32 masters are what is saved
}


Weights = dict[str, Tensor]
Step = list[tuple[dict[str, float], Weights]]  # of each rank
Begun = dict[str, tuple[Weights, Step]]
Moved = dict[str, tuple[Weights, Weights, Step]]
Travelled = tuple[Path, Begun, Moved, Moved]


def built(place: str, options: str, seed: int = 0) -> TrainEngine:
    return engine_of(LayoutCase(MODEL, WIDE if place == "wide" else NARROW), seed=seed, **OPTIONS[options])


def next_step(engine: TrainEngine) -> Step:
    """A step's metrics, and the weights after it; what every rank has, so that rank 0 tells of all."""
    metrics = engine.train_batch(tiny_batch(list(LENGTHS), seed=STEPS), OBJECTIVE)
    curve = {key: metrics[key] for key in ("loss", "grad_norm")}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (curve, exported_by(engine)))
    return everyone


def begun(folder: Path) -> Begun:
    """Trains on TP2·PP2, saves, and goes on for a step."""
    out = {}
    for options in OPTIONS:
        engine = built("wide", options)
        for step in range(STEPS):
            engine.train_batch(tiny_batch(list(LENGTHS), seed=step), OBJECTIVE)
        engine.save(folder / options / "begun")
        out[options] = exported_by(engine), next_step(engine)
        release()
    return out


def moved(folder: Path, place: str, read: str, write: str) -> Moved:
    """Loads into other weights on the layout of `place`, saves what it has then, and goes on for a step."""
    out = {}
    for options in OPTIONS:
        engine = built(place, options, seed=1)
        before = exported_by(engine)
        engine.load(folder / options / read)
        engine.save(folder / options / write)
        out[options] = before, exported_by(engine), next_step(engine)
        release()
    return out


@pytest.fixture(scope="module")
def travelled(tmp_path_factory: pytest.TempPathFactory) -> Travelled:
    folder = tmp_path_factory.mktemp("moved")
    first = launch_forked(begun, (folder,), world_size=RANKS["wide"])
    there = launch_forked(moved, (folder, "narrow", "begun", "there"), world_size=RANKS["narrow"])
    back = launch_forked(moved, (folder, "wide", "there", "back"), world_size=RANKS["wide"])
    return folder, first, there, back


def in_file(path: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole, as one process without Megatron reads it."""
    dcp_to_torch_save(path, path.with_suffix(".pt"))
    state = torch.load(path.with_suffix(".pt"))
    tensors = {f"weight of {name}": tensor for name, tensor in state["model"].items()}
    for name, moments in state["optimizer"]["state"].items():
        tensors |= {f"{key} of {name}": moment for key, moment in moments.items()}
    return tensors


@pytest.mark.parametrize("options", OPTIONS)
def test_weights_and_optimizer_state_keep_every_bit_there_and_back(travelled: Travelled, options: str) -> None:
    folder = travelled[0] / options
    want = in_file(folder / "begun")
    kinds = {name.split(" of ")[0] for name in want}
    assert kinds == {"weight", "exp_avg", "exp_avg_sq", "step"}
    assert any(".experts." in name for name in want)
    assert all(tensor.any() for name, tensor in want.items() if name.startswith("exp_avg"))
    assert {float(tensor) for name, tensor in want.items() if name.startswith("step")} == {float(STEPS)}
    for name in ("there", "back"):
        assert_same_bits(want, in_file(folder / name))


@pytest.mark.parametrize("options", OPTIONS)
def test_exports_keep_every_bit_there_and_back(travelled: Travelled, options: str) -> None:
    want = travelled[1][options][0]
    for before, after, _ in (travelled[2][options], travelled[3][options]):
        assert any(not torch.equal(value, want[name]) for name, value in before.items())
        assert_same_bits(want, after)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_next_step_is_the_one_that_was_to_come(travelled: Travelled, options: str) -> None:
    """On the layout that began, to the bit; on the other one, whose sums run in another order, to a rounding."""
    going_on, there, back = travelled[1][options][1], travelled[2][options][2], travelled[3][options][2]
    assert [len(ranks) for ranks in (going_on, there, back)] == [4, 2, 4]
    for (want, weights), (got, loaded) in zip(going_on, back, strict=True):
        assert got == want
        assert_same_bits(weights, loaded)
    loose = 5e-3 if options.startswith("bfloat16") else 1e-6
    for got, _ in there:
        assert got["loss"] == pytest.approx(going_on[0][0]["loss"], rel=loose)
        assert got["grad_norm"] == pytest.approx(going_on[0][0]["grad_norm"], rel=10 * loose)
