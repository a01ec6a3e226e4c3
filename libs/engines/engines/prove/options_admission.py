"""Which options run together: those that tests have run, and those that a proof of this run admits."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.distributed as dist

from engines.capability import untested_options
from engines.config import EngineConfig
from engines.prove.admission import Mode, keep_certificate
from engines.prove.certificate import Certificate, cached_at, code, place
from engines.prove.options import compared_options, prove_options, small_layout
from seqpack.comm.collectives import broadcast_plain

_PACKAGES = ("engines", "dyncp", "seqpack")
"""Packages whose code an engine's own step runs."""
WAIT = 60.0
"""Seconds that the other ranks wait for the first one's proof."""


def options_certificate(
    config: EngineConfig, model: Any, world_size: int, trainable: bool = True, seconds: float | None = None
) -> Certificate | None:
    """Return the certificate of a run's options over `world_size` ranks, from the cache or made; None where tests have
    run them together, or nothing is to be proven.

    Args:
        config: the run's settings.
        model: the transformers config of its model.
        world_size: number of its ranks.
        trainable: whether it trains.
        seconds: how long the ranks of a new proof may take.

    Raises:
        ValueError: no proof could be made, or kept.
    """
    texts = [*untested_options(config, trainable)]
    if not texts or config.prove == "off":
        return None
    if config.lora.target_parameters:
        raise ValueError(f"{'; '.join(texts)}. A proof has no adapters on experts: leave lora.target_parameters out")
    if config.vision != "off":
        raise ValueError(f"{'; '.join(texts)}. A proof is of text alone: set vision='off' for it")
    return make_options_certificate(config, model, world_size, seconds)


def make_options_certificate(
    config: EngineConfig, model: Any, world_size: int, seconds: float | None = None, mode: Mode | None = None
) -> Certificate:
    """Return the certificate of options, whether tests have run them together or not; see `options_certificate`.

    `mode`: another than `config.prove` of keeping it."""
    path = options_path(config, model, world_size)
    return keep_certificate(path, mode or config.prove, lambda: prove_options(config, model, world_size, seconds))


def options_path(config: EngineConfig, model: Any, world_size: int) -> Path:
    """Return where the certificate of options is kept."""
    small = small_layout(config, world_size)
    depends = {
        **compared_options(small.config),
        "ranks": small.ranks,
        "code": engine_code(),
        **place(small.config.device),
    }
    return cached_at(model, "options", depends)


def admit_options(
    config: EngineConfig, model: Any, world_size: int, trainable: bool = True, seconds: float | None = None
) -> None:
    """Raise ValueError where a proof of the run's options fails, with differences and what to leave out."""
    certificate = options_certificate(config, model, world_size, trainable, seconds)
    if certificate is not None and not certificate.holds:
        raise ValueError(f"{'; '.join(untested_options(config, trainable))}. Its {certificate}")


def admit_on_ranks(config: EngineConfig, model: Any, trainable: bool = True) -> None:
    """Admit options on the ranks of a run: the first rank proves them, on ranks of its own, and tells the others, which
    wait `WAIT` seconds at most. Collective; ValueError on every rank, as `admit_options`."""
    if config.prove == "off" or not [*untested_options(config, trainable)]:
        return
    refusal = None
    if dist.get_rank() == 0:
        allowed = 0.8 * min(WAIT, config.collective_timeout_seconds or WAIT) if dist.get_world_size() > 1 else None
        try:
            admit_options(config, model, dist.get_world_size(), trainable, allowed)
        except ValueError as error:
            refusal = str(error)
    refusal = broadcast_plain(refusal)
    if refusal is not None:
        raise ValueError(refusal)


def engine_code() -> str:
    """Return a digest of the code that an engine's own step runs."""
    specs = [find_spec(name) for name in _PACKAGES]
    return code(*(Path(place) for spec in specs if spec for place in spec.submodule_search_locations or ()))
