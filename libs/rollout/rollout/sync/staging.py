"""A receiver's side of a weight sync: new weights are staged beside the old ones, swapped in whole, and swapped back.

    idle --prepare--> staging --receive...--> staging --commit--> committed --settle--> idle
                         |                                            |
                         +-------------------abort--------------------+   (the old weights, whole)

Invariants: the tensors in use are always those of one version; what is staged is finite; between `commit` and `settle`
(or the next `prepare`) the old values are kept, so that `abort` can bring them back when another receiver failed; a
version's number is never used for two sets of weights.
"""

from collections import deque
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rollout.sync.adapter import AdaptedWeights
from rollout.sync.assembler import Allocate, WeightAssembler, assemble
from rollout.sync.manifest import Manifest
from rollout.sync.pieces import Checksum, Piece
from seqpack.memory import ledger


class WeightStaging:
    """The weights of one model in use (`targets`, by name) and those that are to replace them.

    Costs one more copy of the weights from `receive` to `settle`. It does not lock: the caller ensures that nothing
    reads the tensors during `commit` and `abort`. `allocate` returns the memory in which tensors are staged
    (`WeightAssembler`). Pairs of an adapter (`Manifest.adapter`) are added to the base here (`rollout.sync.adapter`).
    """

    def __init__(
        self,
        targets: Mapping[str, Tensor],
        aliases: Mapping[str, str] | None = None,
        optional: Iterable[str] = (),
        version: int = 0,
        allocate: Allocate | None = None,
    ) -> None:
        self._targets = targets
        self._aliases = dict(aliases or {})
        self._optional = tuple(optional)
        self._version = version
        self._newest = version
        self._manifest: Manifest | None = None
        self._allocate = allocate
        self._adapted = AdaptedWeights()
        self._expected: Mapping[str, Tensor] = targets
        self._whole = False
        self._assembler = self._new_assembler()
        self._digest = Checksum()
        self._arrived: dict[str, int] = {}
        self._before: tuple[int, dict[str, Tensor]] | None = None
        ledger.register(ledger.SAMPLER_STAGED, self, lambda it: [it._assembler.staged, it._before, it._adapted])

    @property
    def version(self) -> int:
        """The version of the weights in use."""
        return self._version

    def prepare(self, manifest: Manifest) -> None:
        """Begin a weight sync; earlier staged weights are dropped, earlier committed ones settled.

        Raises ValueError, and nothing begins, for a used version, an unknown or missing tensor, a wrong shape or type.
        """
        self.settle()
        self.abort()
        if manifest.version <= self._newest:
            raise ValueError(
                f"weights {manifest.version} are not newer than {self._newest}, the newest so far; count upwards"
            )
        expected = self._targets if manifest.adapter is None else manifest.adapter.pairs(self._targets)
        assembler = self._new_assembler(expected)
        for spec in manifest.tensors or ():
            assembler.check(spec)
        if manifest.tensors is not None:
            assembler.check_complete(spec.name for spec in manifest.tensors)
        self._assembler, self._digest, self._arrived = assembler, Checksum(), {}
        self._expected = expected
        self._manifest = manifest

    def receive(self, pieces: Iterable[Piece]) -> int:
        """Stage the pieces of a bucket; return the number of missing elements. At 0 everything has been checked.

        Raises ValueError where no sync was begun, a piece is wrong (see `WeightAssembler.add`), or the whole is.
        """
        manifest = self._begun()
        specs = {spec.name: spec for spec in manifest.tensors or ()}
        for piece in pieces:
            if manifest.tensors is not None:
                spec = specs.get(piece.name)
                if spec is None or (spec.shape, spec.dtype) != (tuple(piece.shape), piece.dtype):
                    raise ValueError(f"{piece.name} {tuple(piece.shape)} {piece.dtype} is not what the manifest says")
            self._assembler.add(piece)
            if manifest.checksum is not None:
                self._digest.add(piece)
            self._arrived[piece.name] = self._arrived.get(piece.name, 0) + piece.flat.numel()
        missing = self._missing(manifest)
        if missing == 0:
            self._verify(manifest)
        return missing

    def commit(self, version: int) -> None:
        """Swap the staged tensors in. Raise ValueError, and change nothing, if any is missing or of another version."""
        manifest = self._begun()
        if version != manifest.version:
            raise ValueError(f"cannot commit weights {version}: those being received are {manifest.version}")
        staged = self._verify(manifest)
        if manifest.adapter is not None:
            staged = self._adapted.merged(manifest.adapter, staged, self._current())
        self._whole = manifest.adapter is None
        self._before = (self._version, staged)
        ledger.observe(self, ledger.SAMPLER_STAGED, again=True)
        self._manifest = None
        swapped = False
        try:
            self._swap(staged)
            swapped = True
        finally:
            if not swapped:
                self._before = None
        self._version = self._newest = version

    def abort(self) -> None:
        """Drop what is staged, or restore the old weights after a commit that is not settled; else do nothing."""
        if self._before is not None:
            version, before = self._before
            self._swap_back(before)
            self._version = version
        self._clear()

    def settle(self) -> None:
        """Drop the old values after a commit, which then is final. Do nothing without a commit."""
        if self._before is not None:
            self._assembler = self._new_assembler()  # the old one holds the swapped tensors too
            if self._whole:
                self._adapted.forget()
        self._before = None

    def replace(self, version: int, pieces: Iterable[Piece]) -> None:
        """Replace all weights from a stream, which is read to its end whatever happens. On ValueError keep the old."""
        done = False
        try:
            self.prepare(Manifest(version))
            assemble(self._assembler, pieces)
            self.commit(version)
            done = True
        finally:
            if not done:
                self.abort()
                deque(pieces, maxlen=0)  # after a refusal before the first piece
        self.settle()

    def _begun(self) -> Manifest:
        if self._manifest is None:
            raise ValueError("no transfer of weights was begun here: prepare(manifest) comes first")
        return self._manifest

    def _missing(self, manifest: Manifest) -> int:
        if manifest.tensors is not None:
            return sum(spec.numel for spec in manifest.tensors) - sum(self._arrived.values())
        arrived: dict[str, int] = {}
        for name, count in self._arrived.items():
            name = self._aliases.get(name, name)
            arrived[name] = max(count, arrived.get(name, 0))
        needed = self._expected.keys() - (set(self._optional) - arrived.keys())
        wanted = {name: self._expected[name].numel() for name in needed}
        return sum(wanted.values()) - sum(arrived.values())

    def _verify(self, manifest: Manifest) -> dict[str, Tensor]:
        whole = self._assembler.finish()
        if manifest.checksum is not None and self._digest.digest() != manifest.checksum:
            raise ValueError(f"weights {manifest.version} are not those of the manifest: their checksums differ")
        return whole

    def _current(self) -> Mapping[str, Tensor]:
        """Return the tensors in use."""
        return self._targets

    @torch.no_grad()
    def _swap(self, values: dict[str, Tensor]) -> None:
        """Swap contents with the targets, one tensor's memory at a time; where that fails, swap them back."""
        exchanged: list[str] = []
        done = False
        try:
            for name, value in values.items():
                _exchange(self._targets[name], value)
                exchanged.append(name)
            done = True
        finally:
            if not done:
                for name in exchanged:
                    _exchange(self._targets[name], values[name])

    def _swap_back(self, values: dict[str, Tensor]) -> None:
        """Undo `_swap(values)`, after which `values` holds the old weights."""
        self._swap(values)

    def _clear(self) -> None:
        self._manifest = self._before = None
        self._assembler = self._new_assembler()
        self._digest, self._arrived = Checksum(), {}

    def _new_assembler(self, expected: Mapping[str, Tensor] | None = None) -> WeightAssembler:
        if expected is None or expected is self._targets:
            return WeightAssembler(self._targets, self._aliases, self._optional, self._allocate)
        return WeightAssembler(expected)


def _exchange(target: Tensor, value: Tensor) -> None:
    """Swap two tensors' contents; where the second copy fails, undo the first."""
    old = target.detach().clone()
    done = False
    try:
        target.copy_(value)
        value.copy_(old)
        done = True
    finally:
        if not done:
            target.copy_(old)
