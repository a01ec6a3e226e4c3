"""The weights of one run: the live model's tensors, their names in its checkpoint, and the tensors carried along.

`ModelWeights.of` compares a model with the directory it comes from: every live tensor must be there, so that nothing is
initialised at random. A tensor there that is not live goes into every export: the second copy of a tied weight with the
values of the first, all else as it is. What the family does not know (`Family.carried`), such as the head of a
classifier, is told: transformers ignores it. `export` and `save` stream from an iterator of live tensors.
"""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engines.families.family import Family
from engines.private_api import conversions_of
from engines.weights.disk_names import DiskNames, names_in
from engines.weights.model_directory import DiskTensor, ModelDirectory
from engines.weights.stock_names import saved_as


@dataclass(frozen=True)
class ModelWeights:
    """See the module's text; made by `of`."""

    family: Family
    names: DiskNames
    shapes: Mapping[str, tuple[int, ...]]
    """Live tensors (parameters, tied ones once, and persistent buffers) in the model's order."""
    dtypes: Mapping[str, torch.dtype]
    """Dtypes of an export by name on disk, unless it is asked for another."""
    carried: tuple[str, ...] = ()
    """Names on disk of tensors that go into every export as they are."""
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names on disk, by live tensor, under which a tied weight is there once more."""
    source: ModelDirectory | None = None

    @staticmethod
    def of(
        family: Family,
        model: Any,
        source: ModelDirectory | None = None,
        names: DiskNames | None = None,
        others: Collection[str] = (),
    ) -> "ModelWeights":
        """Match a model (on any device, meta too) with its directory; ValueError names the first odd tensor.

        `names`: of its tensors there (`names_in`); None where the directory has the plain names of its form. `others`:
        tensors there of parts that are not trained.
        """
        live = live_tensors(model)
        shapes = {name: tuple(tensor.shape) for name, tensor in live.items()}
        if source is None:
            names = _names_of_module(model) if family.registered else names_in(saved_as(model, live), model, model)
            dtypes = {p.name: live[name].dtype for name in live for p in names.parts(name, shapes[name])}
            return ModelWeights(family, names, shapes, dtypes)
        names = names or DiskNames.of(source.tensors)
        dtypes = _check_present(names, live, source)
        copies = _copies(names, model, source, dtypes)
        carried = tuple(name for name in source.tensors if name not in dtypes)
        unknown = [name for name in carried if name not in others and not _matches(name, family.carried)]
        if unknown and (not dist.is_initialized() or dist.get_rank() == 0):
            warnings.warn(
                f"{source.path}: {family.architecture} has no {', '.join(unknown[:3])}"
                f"{f' (and {len(unknown) - 3} more)' if len(unknown) > 3 else ''}: not used, as in transformers, and "
                "part of every export as it is",
                stacklevel=2,
            )
        return ModelWeights(family, names, shapes, dtypes, carried, copies, source)

    def carries(self, pattern: str) -> bool:
        """Return whether a tensor of this name on disk is carried along."""
        return any(fnmatchcase(name, pattern) for name in self.carried)

    def holds(self, pattern: str) -> bool:
        """Return whether an export has a tensor of this name on disk, carried along or trained."""
        return self.carries(pattern) or any(fnmatchcase(name, pattern) for name in self.dtypes)

    def export(
        self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None, carried: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors of a checkpoint from live ones, one live tensor at a time.

        Dtypes are the checkpoint's, or `dtype` but for the family's float32 parameters and what is carried. All live
        tensors must come, in any order; RuntimeError names one that did not, or that is not known.
        """
        left = dict.fromkeys(self.shapes)
        for name, tensor in tensors:
            if name not in left:
                raise RuntimeError(f"the executor gave {name}, which is no tensor of the model or came twice")
            del left[name]
            for disk, part in self.names.split(name, tensor.detach()):
                yield disk, part.to(self.export_dtype(name, disk, dtype))
            for disk in self.copies.get(name, ()) if carried else ():
                yield disk, tensor.detach().to(self.export_dtype(name, disk, dtype))
        if left:
            raise RuntimeError(f"the executor did not give {next(iter(left))}")
        if carried and self.source is not None:
            yield from self.source.load(self.carried)

    def export_dtype(self, name: str, disk: str, dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype on disk of a part of the live tensor `name`."""
        if dtype is None or not self.dtypes[disk].is_floating_point:
            return self.dtypes[disk]
        return torch.float32 if _matches(name, self.family.float32) else dtype


def live_tensors(model: Any) -> dict[str, Tensor]:
    """Return parameters, tied ones once, and persistent buffers, in the order of the state dict."""
    first = {name for name, _ in model.named_parameters()}
    every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: t for name, t in model.state_dict(keep_vars=True).items() if name in first or name not in every}


def _check_present(names: DiskNames, live: Mapping[str, Tensor], source: ModelDirectory) -> dict[str, torch.dtype]:
    dtypes: dict[str, torch.dtype] = {}
    for name, tensor in live.items():
        for part in names.parts(name, tensor.shape):
            entry = source.tensors.get(part.name)
            wanted = tuple(tensor[part.index].shape) if part.index else tuple(tensor.shape)
            if entry is None:
                raise ValueError(
                    f"{source.path} lacks {part.name}, which transformers would fill at random: the checkpoint is not "
                    "whole, or its config is another's"
                )
            _check_shape(part.name, entry, wanted)
            if entry.dtype is None or entry.dtype.is_floating_point != tensor.is_floating_point():
                raise ValueError(f"{entry.file}: {part.name} is quantised, and quantised weights cannot be trained")
            dtypes[part.name] = entry.dtype
    return dtypes


def _check_shape(name: str, entry: DiskTensor, wanted: tuple[int, ...]) -> None:
    if entry.shape != wanted:
        raise ValueError(f"{entry.file}: {name} has shape {entry.shape}, the config says {wanted}")


def _copies(
    names: DiskNames, model: Any, source: ModelDirectory, dtypes: dict[str, torch.dtype]
) -> dict[str, tuple[str, ...]]:
    """Return the second copies of tied weights on disk, and add their dtypes."""
    first: dict[torch.nn.Parameter, str] = {}
    copies: dict[str, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        live = first.setdefault(parameter, name)
        (part, *_) = names.parts(name, parameter.shape)
        entry = source.tensors.get(part.name)
        if live != name and entry is not None and part.name not in dtypes:
            _check_shape(part.name, entry, tuple(parameter.shape))
            copies[live] = (*copies.get(live, ()), part.name)
            dtypes[part.name] = entry.dtype or parameter.dtype
    return copies


def _names_of_module(model: Any) -> DiskNames:
    """Return the form of transformers' own export of this model, which remembers its conversions while loading."""
    conversions = conversions_of(model)
    if conversions is None:
        return DiskNames()
    kinds = {type(conversion).__name__ for conversion in conversions}
    return DiskNames("PrefixChange" in kinds, "WeightConverter" in kinds)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
