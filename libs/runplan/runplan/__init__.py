"""The plan of a run on many devices, computed from its settings alone: no GPU, no weights, no processes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from runplan.checks.requirements import Requirement as Requirement
    from runplan.checks.requirements import requirements as requirements
    from runplan.estimates.buffers import Buffer as Buffer
    from runplan.estimates.peak_memory import Peak as Peak
    from runplan.estimates.peak_memory import peak_memory as peak_memory
    from runplan.from_config import memory as memory
    from runplan.from_config import step_time as step_time
    from runplan.layout.grid import Grid as Grid
    from runplan.layout.grid import make_grid as make_grid
    from runplan.model.model_shape import ModelShape as ModelShape
    from runplan.model.model_shape import VisionTower as VisionTower
    from runplan.model.model_shape import count_parameters as count_parameters
    from runplan.model.model_shape import shape_of as shape_of
    from runplan.model.origin import Origin as Origin
    from runplan.plain_settings import PlainCluster as PlainCluster
    from runplan.plain_settings import PlainPools as PlainPools
    from runplan.plain_settings import PlainRollout as PlainRollout
    from runplan.plain_settings import PlainSchedule as PlainSchedule
    from runplan.report.memory_table import memory_table as memory_table
    from runplan.report.plan import Plan as Plan
    from runplan.report.plan import make_plan as make_plan
    from runplan.report.readiness import refuse_unready as refuse_unready
    from runplan.run_spec import RunSpec as RunSpec
    from runplan.samplers.base import SamplerPlan as SamplerPlan
    from runplan.settings import ClusterSettings as ClusterSettings
    from runplan.settings import PoolSettings as PoolSettings
    from runplan.settings import RolloutSettings as RolloutSettings
    from runplan.settings import ScheduleSettings as ScheduleSettings

_EXPORTS = {
    "Requirement": "runplan.checks.requirements",
    "requirements": "runplan.checks.requirements",
    "Buffer": "runplan.estimates.buffers",
    "Peak": "runplan.estimates.peak_memory",
    "peak_memory": "runplan.estimates.peak_memory",
    "memory": "runplan.from_config",
    "step_time": "runplan.from_config",
    "Grid": "runplan.layout.grid",
    "make_grid": "runplan.layout.grid",
    "ModelShape": "runplan.model.model_shape",
    "VisionTower": "runplan.model.model_shape",
    "count_parameters": "runplan.model.model_shape",
    "shape_of": "runplan.model.model_shape",
    "Origin": "runplan.model.origin",
    "PlainCluster": "runplan.plain_settings",
    "PlainPools": "runplan.plain_settings",
    "PlainRollout": "runplan.plain_settings",
    "PlainSchedule": "runplan.plain_settings",
    "memory_table": "runplan.report.memory_table",
    "Plan": "runplan.report.plan",
    "make_plan": "runplan.report.plan",
    "refuse_unready": "runplan.report.readiness",
    "RunSpec": "runplan.run_spec",
    "SamplerPlan": "runplan.samplers.base",
    "ClusterSettings": "runplan.settings",
    "PoolSettings": "runplan.settings",
    "RolloutSettings": "runplan.settings",
    "ScheduleSettings": "runplan.settings",
}
__all__ = [
    "Buffer",
    "ClusterSettings",
    "Grid",
    "ModelShape",
    "Origin",
    "Peak",
    "PlainCluster",
    "PlainPools",
    "PlainRollout",
    "PlainSchedule",
    "Plan",
    "PoolSettings",
    "Requirement",
    "RolloutSettings",
    "RunSpec",
    "SamplerPlan",
    "ScheduleSettings",
    "VisionTower",
    "count_parameters",
    "make_grid",
    "make_plan",
    "memory",
    "memory_table",
    "peak_memory",
    "refuse_unready",
    "requirements",
    "shape_of",
    "step_time",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
