"""A native engine whose module computes with a trainer's own tensors, so that one process holds the weights once.

    in use --propose(version, weights)--> proposed --commit--> in use, of the new version
                                              |
                                              +-----abort----> in use, of the version before

A weight sync copies nothing: the trainer has written its update into the tensors already. So there is no way back to
old values, and the two phases are: `propose` checks all tensors (names, shapes, types, devices, finite values) and
changes nothing, `commit` gives the present values their version and renews all that was derived from the old ones.
Until then the values have no version and nothing is sampled: a request raises `StaleWeightsError`. `abort` drops a
proposal; after a commit it takes the version back, and again nothing is sampled before the next one. A step without an
update (its gradient was not finite) leaves values and version as they were, and sampling goes on.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from rollout.capability import NATIVE, feature_of
from rollout.errors import NotFiniteError
from rollout.native.engine import NativeEngine
from rollout.native.module_weights import named_tensors
from rollout.sync.assembler import is_good
from rollout.sync.manifest import Manifest, TensorSpec
from rollout.sync.pieces import Piece
from rollout.sync.staging import WeightStaging
from seqpack.capability import Supported, Unsupported
from seqpack.renamed import renamed, renamed_arguments

SHARED_IN_PLACE = (
    "this sampler computes with the trainer's own tensors, into which nothing is copied: use propose and commit"
)
COPIES = ("two_phase_weights", "in_process_weights", "weights_under_way")


class TrainerWeights(Protocol):
    """A trainer's weights in place (`engines.SharedParameters`, or anything of this shape)."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Parameters (of tied ones one name is enough) and persistent buffers, by the names of the sampler's module."""
        ...

    @property
    def updates(self) -> Callable[[], int]:
        """Function that returns a count which changes whenever the trainer has changed the values."""
        ...


class StaleWeightsError(RuntimeError):
    """The trainer has changed the weights that a sampler shares, and has not synced them."""


class SharingEngine(NativeEngine):
    """A `NativeEngine` over a module that may be empty (on the meta device): it takes the trainer's tensors as its own.

    Args:
        model: the module. Its parameters and persistent buffers are replaced, tied ones stay tied; other buffers are
            moved to the device of the trainer's tensors.
        weights: the trainer's weights.
        version: their version.
        options: of `NativeEngine`.

    Raises ValueError for tensors that are not the module's: names what is missing, foreign, or of another shape, type
    or device; NotFiniteError for values that are not finite. The module is then as it was.
    """

    @renamed_arguments(lent="weights")
    def __init__(self, model: nn.Module, weights: TrainerWeights, version: int = 0, **options: Any) -> None:
        in_place = InPlaceWeights(model, weights, version)
        super().__init__(model, version=version, **options)
        self._weights: InPlaceWeights = in_place

    def supports(self, feature: str) -> Supported | Unsupported:
        """See `NativeEngine`; weights are not copied here."""
        answer = feature_of(NATIVE, feature)
        return Unsupported(SHARED_IN_PLACE) if feature in COPIES else answer

    @renamed_arguments(lent="weights")
    async def propose(self, version: int, weights: TrainerWeights) -> None:
        """Check new weights and change nothing. Raise ValueError as the constructor does, or for a used version."""
        self._weights.propose(version, weights)

    offer = renamed("propose")

    def _step(self) -> None:
        if self._batch.has_work:
            self._weights.check()
        super()._step()


class InPlaceWeights(WeightStaging):
    """The weights of a module that are the trainer's tensors; see the module's docstring. Not locked."""

    def __init__(self, model: nn.Module, weights: TrainerWeights, version: int) -> None:
        super().__init__(*named_tensors(model), version=version)
        self._model = model
        self._proposed: tuple[int, TrainerWeights] | None = None
        self._earlier: int | None = None
        self._lost: str | None = None
        self._check_tensors(weights.tensors)
        self._take(weights)

    def check(self) -> None:
        """Raise StaleWeightsError where the present values are not those of the version in use."""
        if self._lost is not None:
            raise StaleWeightsError(self._lost)
        if self._updates() != self._at:
            raise StaleWeightsError(
                f"the trainer has changed the weights that this sampler shares since version {self.version} was handed "
                "over: hand them over before anything is sampled"
            )

    def propose(self, version: int, weights: TrainerWeights) -> None:
        """Check new weights. Raise ValueError, and propose nothing, for unfit weights or a used version."""
        self._proposed = self._earlier = None
        if version <= self._newest:
            raise ValueError(f"weights {version} are not newer than {self._newest}, the newest so far; count upwards")
        self._check_tensors(weights.tensors)
        self._proposed = version, weights

    def commit(self, version: int) -> None:
        """Make the proposed weights `version`. Raise ValueError where another version was proposed, or none."""
        if self._proposed is None or self._proposed[0] != version:
            raise ValueError(f"cannot commit weights {version}: propose them first")
        self._take(self._proposed[1])
        self._proposed, self._earlier = None, self._version
        self._version = self._newest = version

    def abort(self) -> None:
        """Drop a proposal; after a commit that is not settled take its version back, and refuse sampling."""
        self._proposed = None
        if self._earlier is not None:
            self._lost = (
                f"weights {self._version} were taken back, and those of version {self._earlier} are gone, for the "
                "trainer's memory is shared: hand over again before anything is sampled"
            )
            self._version, self._earlier = self._earlier, None

    def settle(self) -> None:
        """Make a commit final; no old weights were kept."""
        self._earlier = None

    def prepare(self, manifest: Manifest) -> None:
        """Raise ValueError: copies would be written over the trainer's weights."""
        raise ValueError(f"weights {manifest.version} are not taken: {SHARED_IN_PLACE}")

    def receive(self, pieces: Iterable[Piece]) -> int:
        """Raise ValueError; see `prepare`."""
        del pieces
        raise ValueError(SHARED_IN_PLACE)

    def _take(self, weights: TrainerWeights) -> None:
        adopt(self._model, weights.tensors)
        self._targets, _, _ = named_tensors(self._model)
        self._expected, self._assembler = self._targets, self._new_assembler()  # they keep no earlier tensor
        self._updates, self._at, self._lost = weights.updates, weights.updates(), None

    def _check_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError with the first tensor that the module can't share."""
        assembler, first = self._new_assembler(), next(iter(tensors.values()), None)
        seen: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            assembler.check(TensorSpec(name, tuple(tensor.shape), tensor.dtype))
            own = self._aliases.get(name, name)
            target = self._targets[own]
            if tensor.dtype != target.dtype:
                raise ValueError(f"{name}: {tensor.dtype} can't be shared by a module that computes in {target.dtype}")
            device = target.device if target.device.type != "meta" or first is None else first.device
            if tensor.device != device:
                raise ValueError(f"{name} is on {tensor.device}, and is to be shared on {device}")
            if seen.setdefault(own, tensor).data_ptr() != tensor.data_ptr():
                raise ValueError(f"{name} is tied to {own}, but two tensors are lent for them")
            if not is_good(tensor, infinities=own in self._optional):
                raise NotFiniteError(f"{name} has values that are not finite: such weights are not taken")
        assembler.check_complete(tensors)


def adopt(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Make tensors the parameters and buffers of a module, in place of those of their names; tied ones stay tied.

    Where they are the module's own already nothing changes. Other buffers are moved to their device.
    """
    targets, aliases, _ = named_tensors(model)
    replaced = {name: (targets[aliases.get(name, name)], tensor.detach()) for name, tensor in tensors.items()}
    if all(old.device == new.device and old.data_ptr() == new.data_ptr() for old, new in replaced.values()):
        return
    # By whether a matrix asks for a gradient torch chooses between products that differ in the last bit, even in
    # no_grad: what the module's own would be asked stays.
    new_of: dict[int, Tensor] = {
        id(old): nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        for old, new in replaced.values()
    }
    device = next(iter(new_of.values())).device
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, new_of.get(id(parameter), parameter))
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(module, name, new_of[id(buffer)] if id(buffer) in new_of else buffer.to(device))
