"""Muon's matrices as the engine holds them: their number, and the bytes of all moments."""

from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from engines import EngineConfig, build_engine
from engines.muon.matrices import muon_matrices
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT
from runplan.estimates.peak_memory import Tokens, fsdp_peak
from runplan.estimates.states import fsdp_states, megatron_states, parameters_by_stage
from runplan.layout.grid import make_grid
from runplan.model.matrices import dense_matrices, matrix_parameters
from runplan.model.model_shape import count_parameters, shape_of


@pytest.mark.parametrize("kind", ["dense", "moe", "attention"])
@pytest.mark.parametrize("moments", ["auto", "bfloat16"])
def test_it_is_what_an_engine_holds(kind: str, moments: Any) -> None:
    model: Any = tiny_model(kind)
    shape = shape_of(model.config, kind)
    parameters = dict(model.named_parameters())
    assert matrix_parameters(shape) == sum(
        parameters[name].numel() for name in muon_matrices(EngineConfig(optimizer="muon"), model)
    )
    config = EngineConfig(device="cpu", optimizer="muon", moments_dtype=moments)
    engine: Any = build_engine(config, model)
    engine.train_batch(tiny_batch([9, 5]), SFT())
    held = [t for state in engine.executor.optimizer.state.values() for t in state.values() if t.ndim]
    here = sum((t.to_local() if isinstance(t, DTensor) else t).numel() * t.element_size() for t in held)
    assert fsdp_states(shape, config, 1).optimizer == here


@pytest.mark.parametrize(
    ("sizes", "holders"), [({}, (1, 1)), ({"tp": 2}, (2, 1)), ({"ep": 2}, (1, 2)), ({"pp": 2}, (1, 1))]
)
def test_a_plan_counts_one_moment_of_a_matrix(sizes: dict[str, int], holders: tuple[int, int]) -> None:
    """Over the stages of Megatron, each with the ranks that share its dense parameters and its experts."""
    shape = shape_of(tiny_model("moe").config, "moe")
    experts, dense = count_parameters(shape).experts, dense_matrices(shape)
    adamw, muon = (EngineConfig(backend="megatron", optimizer=name) for name in ("adamw", "muon"))
    grid = make_grid(max([1, *sizes.values()]), **sizes)
    stages = parameters_by_stage(shape, grid, [shape.layers // grid.pp] * grid.pp)
    plain, less = (sum(megatron_states(one, grid, each, 2).optimizer for each in stages) for one in (adamw, muon))
    assert plain - less == pytest.approx(4 * (dense / holders[0] + experts / holders[1]))
    peaks = [fsdp_peak(shape, EngineConfig(optimizer=one), 1, Tokens(1, 1), 4) for one in ("adamw", "muon")]
    assert peaks[0].states - peaks[1].states == 4 * matrix_parameters(shape)
    assert peaks[1].moments["update"] - peaks[1].states >= 2 * matrix_parameters(shape)
