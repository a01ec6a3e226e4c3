"""Samplers by the names that `--rollout.engine` has for them."""

from functools import cache

from rollout.environments.load_object import load_object
from schedules.backend import SamplerBackend

SAMPLERS = {
    "native": "apps.grpo.sampling.native:NativeBackend",
    "vllm": "apps.grpo.sampling.vllm:VllmBackend",
    "openai": "apps.grpo.sampling.openai:OpenAiBackend",
}


def check_sampler(name: str) -> None:
    """Refuse a sampler that nobody knows; those of this project are not loaded for it.

    Raises:
        ValueError: see `sampler_backend`.
    """
    if name not in SAMPLERS:
        sampler_backend(name)


@cache
def sampler_backend(name: str) -> SamplerBackend:
    """Return the backend of a name, or the one that FILE.py:NAME or package.module:NAME is.

    Raises:
        ValueError: there is none; or what has that name is no `SamplerBackend`.
    """
    if name not in SAMPLERS and ":" not in name:
        raise ValueError(
            f"engine must be one of {', '.join(map(repr, SAMPLERS))}, or a schedules.SamplerBackend as FILE.py:NAME or "
            f"package.module:NAME, got {name!r}"
        )
    backend = load_object(SAMPLERS.get(name, name), "sampler")
    if not (isinstance(backend, type) and issubclass(backend, SamplerBackend)):
        raise ValueError(f"engine {name!r} is {backend!r}, which is no subclass of schedules.SamplerBackend")
    return backend()
