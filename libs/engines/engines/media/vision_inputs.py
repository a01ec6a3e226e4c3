"""The vision tower's inputs for one micro-batch, and which tokens take which of its features.

The tower runs once a model call on every rank, whatever the rank holds: where there is no image of its own it sees an
empty one of a single token, whose features no token takes. So ranks whose rows are text alone take part in all
collectives, and the gradient that comes back through it is exactly zero.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engines.media.media_batch import KINDS, TYPES, bytes_of
from engines.media.vision_settings import VisionSettings
from seqpack.batches.packed import PackedBatch


@dataclass(frozen=True)
class VisionInputs:
    """Patches [P, numbers] of images and frames of sizes `grid_thw` i64[n, 3], one after another.

    The tower makes `tokens[i]` features of entry i. Token `slots[k]` of the call takes feature `features[k]` (i64[M]).
    """

    patches: Tensor
    grid_thw: Tensor
    tokens: tuple[int, ...]
    slots: Tensor
    features: Tensor

    @staticmethod
    def of(packed: PackedBatch, settings: VisionSettings, dummy: bool = False) -> "VisionInputs":
        """Read the media of a packed row that was checked (`engines.media.media_batch`); the empty image where it has
        none.

        Images come before videos; features of each are taken by their tokens in order.
        """
        device = packed.cu_seqlens.device
        kinds = [] if dummy else [(k, pair) for k, pair in KINDS.items() if pair[0] in packed.values]
        patches = [packed.values[pixels] for _, (pixels, _) in kinds]
        grids = [packed.values[grid] for _, (_, grid) in kinds]
        if not sum(len(part) for part in patches):
            return VisionInputs.empty(settings, device)
        grid_thw = torch.cat(grids)
        unit = settings.merge_size**2
        slots = torch.cat([(packed.values[TYPES] == kind).nonzero().squeeze(1) for kind, _ in kinds])
        tokens = tuple(t * h * w // unit for t, h, w in grid_thw.tolist())
        return VisionInputs(torch.cat(patches), grid_thw, tokens, slots, torch.arange(len(slots), device=device))

    @staticmethod
    def empty(settings: VisionSettings, device: torch.device) -> "VisionInputs":
        """Return an image of one token that no token takes."""
        merge, none = settings.merge_size, torch.empty(0, dtype=torch.int64, device=device)
        patches = torch.zeros(merge**2, settings.patch_numbers, device=device)
        return VisionInputs(patches, torch.tensor([[1, merge, merge]], device=device), (1,), none, none)

    def moved(self, places: Tensor) -> "VisionInputs":
        """Return these inputs where token t of the call has become token places[t]."""
        return replace(self, slots=places[self.slots])

    def distinct(self) -> "VisionInputs":
        """Return these inputs with each of several equal images once, whose features all their tokens take.

        Of inputs on the host. The gradient of that one pass is then the sum of theirs.
        """
        known: dict[tuple[bytes, ...], int] = {}
        images = zip(self.grid_thw, self.patches.split(self.grid_thw.prod(-1).tolist()), strict=True)
        first = [known.setdefault(tuple(map(bytes_of, image)), place) for place, image in enumerate(images)]
        if len(known) == len(first):
            return self
        sizes = torch.tensor(self.tokens)
        begins, owner = sizes.cumsum(0) - sizes, torch.repeat_interleave(sizes)
        moved = begins[torch.tensor(first)] - begins
        features = self.features + moved[owner[self.features]]
        return self._with(torch.tensor([*known.values()]), owner, self.slots, features)

    def shard(self, source: Tensor, real: Tensor, tokens: int, settings: VisionSettings) -> "VisionInputs":
        """Return the inputs of a rank whose token t is token source[t] of the call's `tokens`, where real[t] (bool).

        It keeps the images of which a token of the rank takes a feature, and no others.
        """
        taken = torch.full((tokens,), -1, device=source.device).index_put((self.slots,), self.features)
        wanted = taken[source].masked_fill(~real, -1)
        slots = (wanted >= 0).nonzero().squeeze(1)
        features = wanted[slots]
        if not len(slots):
            return VisionInputs.empty(settings, source.device)
        owner = torch.repeat_interleave(torch.tensor(self.tokens, device=source.device))
        needed = owner[features].unique()
        return self._with(needed, owner, slots, features)

    def _with(self, needed: Tensor, owner: Tensor, slots: Tensor, features: Tensor) -> "VisionInputs":
        """Return these inputs with the images `needed` (sorted) alone."""
        sizes = self.grid_thw.prod(-1)
        of_patch = torch.repeat_interleave(sizes)
        keep = torch.isin(owner, needed)
        new_place = keep.cumsum(0) - 1
        return VisionInputs(
            self.patches[torch.isin(of_patch, needed)],
            self.grid_thw[needed],
            tuple(self.tokens[i] for i in needed.tolist()),
            slots,
            new_place[features],
        )
