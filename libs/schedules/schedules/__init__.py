"""Schedules of asynchronous training: who waits for whom between sampling and training, and weight sync."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from schedules.backend import SamplerBackend as SamplerBackend
    from schedules.config import ScheduleConfig as ScheduleConfig
    from schedules.fully_async.follower import AsyncFollower as AsyncFollower
    from schedules.fully_async.fully_async import FullyAsyncSchedule as FullyAsyncSchedule
    from schedules.one_step_off import OneStepOffSchedule as OneStepOffSchedule
    from schedules.protocols import SamplerSource as SamplerSource
    from schedules.protocols import Tasks as Tasks
    from schedules.protocols import Trainer as Trainer
    from schedules.protocols import TrainResult as TrainResult
    from schedules.protocols import WeightExport as WeightExport
    from schedules.ray.cluster import RaySettings as RaySettings
    from schedules.ray.cluster import StartPool as StartPool
    from schedules.registry import build_schedule as build_schedule
    from schedules.registry import register_schedule as register_schedule
    from schedules.runtime.interrupts import Runner as Runner
    from schedules.sampling.first_batch import SamplerMismatchError as SamplerMismatchError
    from schedules.sampling.sampler_process import StartProcess as StartProcess
    from schedules.sampling.session import Evaluation as Evaluation
    from schedules.sampling.session import RolloutSession as RolloutSession
    from schedules.sampling.settings import RolloutSettings as RolloutSettings
    from schedules.sampling.settings import RunState as RunState
    from schedules.sampling.transformers_sampler import TransformersSampler as TransformersSampler
    from schedules.schedule import Schedule as Schedule
    from schedules.schedule import TrainStepResult as TrainStepResult
    from schedules.sync import SyncSchedule as SyncSchedule
    from schedules.weights.weight_checks import WeightsNotTakenError as WeightsNotTakenError
    from schedules.weights.weight_sync import sync_weights as sync_weights

_EXPORTS = {
    "AsyncFollower": "schedules.fully_async.follower",
    "Evaluation": "schedules.sampling.session",
    "FullyAsyncSchedule": "schedules.fully_async.fully_async",
    "OneStepOffSchedule": "schedules.one_step_off",
    "RaySettings": "schedules.ray.cluster",
    "RolloutSession": "schedules.sampling.session",
    "RolloutSettings": "schedules.sampling.settings",
    "RunState": "schedules.sampling.settings",
    "Runner": "schedules.runtime.interrupts",
    "SamplerBackend": "schedules.backend",
    "SamplerMismatchError": "schedules.sampling.first_batch",
    "SamplerSource": "schedules.protocols",
    "Schedule": "schedules.schedule",
    "ScheduleConfig": "schedules.config",
    "StartPool": "schedules.ray.cluster",
    "StartProcess": "schedules.sampling.sampler_process",
    "SyncSchedule": "schedules.sync",
    "Tasks": "schedules.protocols",
    "TrainResult": "schedules.protocols",
    "TrainStepResult": "schedules.schedule",
    "Trainer": "schedules.protocols",
    "TransformersSampler": "schedules.sampling.transformers_sampler",
    "WeightExport": "schedules.protocols",
    "WeightsNotTakenError": "schedules.weights.weight_checks",
    "build_schedule": "schedules.registry",
    "register_schedule": "schedules.registry",
    "sync_weights": "schedules.weights.weight_sync",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(_EXPORTS)
