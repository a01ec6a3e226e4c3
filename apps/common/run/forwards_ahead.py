"""The number of micro-batches whose forward pass runs ahead for a router's balancing loss, where it is left open."""

import sys
from collections.abc import Callable
from dataclasses import replace

from engines import EngineConfig
from engines.families.registry import family_of
from engines.loading import LoadedModel
from runplan.checks.machine import device_memory_gib
from runplan.report.forwards_ahead import with_forwards_ahead
from runplan.run_spec import RunSpec
from schedules.runtime.collectives import broadcast_result


def agreed_ahead(engine: EngineConfig, opened: LoadedModel, spec: Callable[[], RunSpec]) -> EngineConfig:
    """Return what `planned_ahead` does on the first rank, on every rank; collective."""
    ahead = planned_ahead(engine, opened, spec).router_forwards_ahead
    return replace(engine, router_forwards_ahead=broadcast_result(ahead))


def planned_ahead(engine: EngineConfig, opened: LoadedModel, spec: Callable[[], RunSpec]) -> EngineConfig:
    """Return the engine's settings with as many forward passes ahead as fit the device by the run's plan.

    Args:
        engine: the settings; what they say already stays.
        opened: the model. One without a balancing loss has none that run ahead.
        spec: returns the run, with the directory of that model.
    """
    if engine.backend != "fsdp2" or engine.router_forwards_ahead is not None:
        return engine
    settings = opened.module.config
    coefficients = engine.router_aux_loss_coef, engine.router_z_loss_coef
    loss = family_of(settings).auxiliary_loss(settings, *coefficients)
    if loss is None or not loss.coefficient:
        return engine
    run = replace(spec(), balancing_loss=True)
    ahead = with_forwards_ahead(run, device_memory_gib(run)).engine.router_forwards_ahead
    return replace(engine, router_forwards_ahead=ahead or 0)


def tell_ahead(engine: EngineConfig, given: EngineConfig) -> None:
    """Print what was chosen for a run, if anything was. `given`: the settings of the user."""
    ahead = engine.router_forwards_ahead
    if ahead == given.router_forwards_ahead:
        return
    rest = "" if ahead else ", so that a pass counts beside them"
    told = f"--trainer.router-forwards-ahead {ahead}, as many forward passes ahead as fit the device{rest}"
    sys.stdout.write(f"router's loss: {told}\n")
    sys.stdout.flush()
