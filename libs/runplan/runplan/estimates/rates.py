"""Measured shares of a device's peak in a training step, by kind of layers, each row of one small model.

Shares are operations as `step_time` counts them over seconds that docs/engines-speed.md (FSDP2) and
docs/engines-megatron.md say, 8,192 packed tokens a device; `step_time_test` compares them with the rows. Larger models
have larger matrices and may reach more; ranks that talk over a network reach less.
"""

from dataclasses import dataclass

from engines import EngineConfig
from runplan.estimates.logits import has_fused_pieces, is_compiled
from runplan.estimates.states import width_of
from runplan.model.model_shape import ModelShape

PEAK = {"cuda": 989e12}
"""Operations a second in bfloat16, dense: NVIDIA's data sheet of H100 SXM and H200. NPUs: no figure of ours."""


@dataclass(frozen=True)
class Rate:
    """`share` of the peak, and the model and device that reached it."""

    share: float
    model: str
    where: str

    def __str__(self) -> str:
        return f"as {self.model} reached {self.where}"


COMPILED = Rate(0.47, "a dense 0.67B hybrid, layers compiled,", "under FSDP2 on one H200")
COMPILED_SHARDED = Rate(0.37, "a dense 0.67B hybrid, layers compiled,", "under FSDP2, weights sharded, on H200s")
PLAIN = Rate(0.25, "a dense 0.67B hybrid, not compiled,", "under FSDP2 on one H200")
EXPERTS = Rate(0.20, "a 1.0B hybrid with 16 experts, not compiled,", "under FSDP2 on one H200")
FUSED = Rate(0.33, "a dense 0.67B hybrid, pieces fused,", "under Megatron on one H100")
MEGATRON = Rate(0.24, "a dense 0.67B hybrid, nothing fused,", "under Megatron on one H100")


def rate_of(shape: ModelShape, engine: EngineConfig, ranks: int) -> Rate:
    """Return the measured row whose layers compute as this run's do, or the nearest one: see `not_measured`."""
    width = width_of(engine)
    if shape.experts:
        return EXPERTS
    if engine.backend == "megatron":
        return FUSED if has_fused_pieces(shape, engine, width) else MEGATRON
    if not is_compiled(shape, engine, width):
        return PLAIN
    sharded = engine.weights == "sharded" or (engine.weights == "auto" and ranks > 1)
    return COMPILED_SHARDED if sharded else COMPILED


def not_measured(shape: ModelShape, engine: EngineConfig) -> list[str]:
    """Return the properties of this run that no row was measured with, besides its size."""
    differences = []
    if shape.experts and engine.backend == "megatron":
        differences.append("experts under Megatron")
    if not shape.linear_layers:
        differences.append("attention alone")
    if width_of(engine) > 2:
        differences.append("float32")
    return differences
