"""All certificates that a run stands on, from the cache or made: by the process that reads the command line."""

from transformers import PretrainedConfig

from engines.config import EngineConfig
from engines.devices.detect import devices_of
from engines.families.own_family import use_own_family
from engines.families.registry import checked_part
from engines.proofs.device import device_certificate
from engines.prove.admission import make_certificate, needs_proof, refuse_compressed
from engines.prove.certificate import Certificate
from engines.prove.options_admission import options_certificate


def certificates_of(
    config: EngineConfig, model: PretrainedConfig, world_size: int, longest: int = 0
) -> tuple[Certificate, ...]:
    """Return the certificates of an engine over `world_size` ranks; ranks that ask later find them in the cache.

    A type that no registered family describes is proven always, others where `config.prove` is "always" or "full": in
    small, and on a CUDA device at true width with a row as long as the run's `longest`, with "full" on any device. A
    proof that fails is returned with its problems.

    Raises:
        ValueError: no proof could be made, or kept.
    """
    use_own_family(config)
    if config.prove == "off":
        return ()
    certificates: list[Certificate] = []
    wanted = config.prove in ("always", "full") or needs_proof(model)
    if wanted:
        refuse_compressed(model)
        certificates.append(make_certificate(checked_part(model), config.prove))
    if all(certificate.admits(config.batching) for certificate in certificates):
        certificates += filter(None, [options_certificate(config, model, world_size)])
    if (
        wanted
        and all(certificate.admits(config.batching) for certificate in certificates)
        and (config.prove == "full" or _on_cuda(config))
    ):
        certificates.append(device_certificate(config, checked_part(model), longest))
    return tuple(certificates)


def _on_cuda(config: EngineConfig) -> bool:
    devices = devices_of(config.device)
    return devices.kind == "cuda" and devices.missing() is None
