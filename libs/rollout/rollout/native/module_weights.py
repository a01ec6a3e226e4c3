"""The tensors of a module that a weight sync replaces, and how a stream of them is staged."""

from collections import deque
from collections.abc import Iterable

from torch import Tensor, nn

from rollout.sync.manifest import Manifest
from rollout.sync.pieces import Piece
from rollout.sync.staging import WeightStaging


def named_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """Return the tensors to load by name, other names of tied ones, and the optional names (persistent buffers)."""
    targets: dict[str, Tensor] = dict(model.named_parameters())
    aliases: dict[str, str] = {}
    first = {id(p): name for name, p in targets.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in targets:
            aliases[name] = first[id(parameter)]
    optional = []
    state = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in state:
            targets[name] = buffer
            optional.append(name)
    return targets, aliases, optional


def stage(weights: WeightStaging, version: int, pieces: Iterable[Piece]) -> None:
    """Collect a whole version in the calling thread (an export may be bound to it), or raise and keep nothing."""
    stream, whole = iter(pieces), False
    try:
        weights.prepare(Manifest(version))
        weights.receive(stream)
        whole = True
    finally:
        if not whole:
            deque(stream, maxlen=0)  # other ranks of a collective export wait for this one
            weights.abort()
