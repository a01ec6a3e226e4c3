"""Sizes of a model's layers that the ranks must divide: heads, widths, experts; each failure has a fix."""

from engines import EngineConfig
from runplan.model.model_shape import ModelShape


def head_counts(shape: ModelShape) -> dict[str, int]:
    """Count the heads of each kind, by name."""
    counted = {"heads": shape.heads, "key-value heads": shape.kv_heads}
    if shape.linear_layers:
        counted |= {"delta-net key heads": shape.linear_key_heads, "delta-net value heads": shape.linear_value_heads}
    return counted


def divisibility_problems(shape: ModelShape, engine: EngineConfig) -> list[str]:
    """Return all sizes that tensor and expert parallelism do not divide; an engine would refuse them one by one."""
    tp, ep, etp = engine.tensor_parallel, engine.expert_parallel, engine.expert_tensor_parallel
    problems = [
        f"{count} {name} do not divide over tp = {tp}: lower tp to a divisor of {count} (--parallel.tensor)"
        for name, count in head_counts(shape).items()
        if count % tp
    ]
    width = shape.shared_expert_intermediate if shape.experts else shape.intermediate
    if width % tp:
        what = "a shared expert" if shape.experts else "the MLP"
        problems.append(
            f"{what} of width {width} does not divide over tp = {tp}: lower tp to a divisor of {width} "
            "(--parallel.tensor)"
        )
    if not shape.experts:
        if ep * etp > 1:
            problems.append(
                "--parallel.expert and --parallel.expert-tensor are for mixtures of experts, "
                "this model is dense: leave both at 1"
            )
        return problems
    if shape.experts % ep:
        problems.append(
            f"{shape.experts} experts do not divide over ep = {ep}: choose ep from the divisors of {shape.experts} "
            "(--parallel.expert)"
        )
    if shape.expert_intermediate % etp:
        problems.append(
            f"experts of width {shape.expert_intermediate} do not divide over etp = {etp}: lower etp to a divisor of "
            f"{shape.expert_intermediate} (--parallel.expert-tensor)"
        )
    return problems
