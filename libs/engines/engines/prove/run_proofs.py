"""All certificates that a run stands on, from the cache or made: by the process that reads the command line."""

from transformers import PretrainedConfig

from engines.config import EngineConfig
from engines.prove.admission import make_certificate, needs_proof, refuse_compressed
from engines.prove.certificate import Certificate


def certificates_of(config: EngineConfig, model: PretrainedConfig, world_size: int) -> tuple[Certificate, ...]:
    """Return the certificates of an engine over `world_size` ranks; ranks that ask later find them in the cache.

    A type that no registered family describes is proven always, others where `config.prove` is "always". A proof that
    fails is returned with its problems.

    Raises:
        ValueError: no proof could be made, or kept.
    """
    if config.prove == "off":
        return ()
    found: list[Certificate] = []
    if config.prove == "always" or needs_proof(model):
        refuse_compressed(model)
        found.append(make_certificate(model.get_text_config(), config.prove))
    # Further proofs of a run are appended here: its options over `world_size` ranks, its device.
    del world_size
    return tuple(found)
