"""Samples to one packed row with the arguments of transformers' models, for a Trainer or any DataLoader."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seqpack.adapters.arguments import IGNORED, flash_arguments, sequence_index
from seqpack.batches.packed import PackedBatch, pack_sequences
from seqpack.planning.checks import check_positive_int

Sample = Mapping[str, Any]
MASKS = ("loss_mask", "assistant_masks", "completion_mask")
"""Names under which a sample may say which tokens are trained: ours, and those of transformers and TRL."""
KNOWN_COLUMNS = frozenset(["input_ids", "labels", "attention_mask", "position_ids", *MASKS])
"""Columns that a row is made of, with an entry for each token."""


@dataclass(frozen=True)
class PackedCollator:
    """A collator that puts samples one after another in one row of T tokens, which a model sees as sequences.

    A sample is a mapping with `input_ids` (l tokens, no padding) and, where not all tokens are trained, `labels` (l,
    -100 where not) or masks (`loss_mask`, `assistant_masks`, `completion_mask`; all that are given must hold). Its
    `position_ids`, (l,) or (axes, l), are kept; `length` and the columns named by `ignore` are left out. A column that
    is None is as one that is not there.

    The row: `input_ids`, `labels`, `position_ids` i64[1, T] (positions of several axes [axes, 1, T]), `seq_idx` i32[1,
    T] and the flash arguments `cu_seq_lens_q`, `cu_seq_lens_k` i32[n+1], `max_length_q`, `max_length_k`. Labels are not
    shifted, as transformers wants them, and -100 at the first token of each sequence: no sequence predicts the next
    one's. There is no attention mask. Padding (`align`, `bucket` as in `pack_sequences`) is `pad_token_id` with the
    label -100. Of a sample of more than `max_length` tokens the first are taken. ValueError names the sample and key
    that do not fit.
    """

    pad_token_id: int = 0
    align: int = 1
    bucket: int | tuple[int, ...] | None = None
    seq_idx: bool = True
    flash: bool = True
    ignore: tuple[str, ...] = ()
    max_length: int | None = None

    def __post_init__(self) -> None:
        """Check the choices."""
        check_positive_int(self.align, "align")
        if self.max_length is not None:
            check_positive_int(self.max_length, "max_length")
        wanted = sorted(KNOWN_COLUMNS & set(self.ignore) - set(MASKS))
        if wanted:
            raise ValueError(f"ignore names {wanted[0]!r}, which a row is made of: rename the column")

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return the row of these samples."""
        packed = self.pack(samples)
        positions = packed.position_ids
        row: dict[str, Any] = {
            "input_ids": packed.values["input_ids"][None],
            "labels": packed.values["labels"][None],
            "position_ids": positions.unsqueeze(-2),  # [1, T], or [axes, 1, T]
        }
        if self.seq_idx:
            row["seq_idx"] = sequence_index(packed)[None]
        if self.flash:
            row |= flash_arguments(packed)
        return row

    def pack(self, samples: Sequence[Sample]) -> PackedBatch:
        """Return the row as a PackedBatch with `labels`: for Megatron (`packed_seq_arguments`), or to unpack."""
        if not samples:
            raise ValueError("no samples to pack: a batch sampler gave an empty batch")
        rows = [
            {key: column[..., : self.max_length] for key, column in self._columns(index, sample).items()}
            for index, sample in enumerate(samples)
        ]
        pads = {"input_ids": self.pad_token_id, "labels": IGNORED}
        return pack_sequences(rows, align=self.align, bucket=self.bucket, pad_values=pads)

    def _columns(self, index: int, sample: Sample) -> dict[str, Tensor]:
        if not isinstance(sample, Mapping) or sample.get("input_ids") is None:
            contents = ", ".join(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
            raise ValueError(f"sample {index} has no input_ids, only {contents}")
        unknown = [key for key in sample if key not in KNOWN_COLUMNS and key not in self.ignore and key != "length"]
        if unknown:
            raise ValueError(
                f"sample {index} has the column {unknown[0]!r}, which is no part of a packed row: remove it or name it "
                "in ignore"
            )
        ids = _tensor(sample["input_ids"], "input_ids", index)
        if ids.ndim != 1 or len(ids) == 0:
            raise ValueError(f"input_ids of sample {index} is {tuple(ids.shape)}: it must be one or more tokens, (l,)")
        mask = sample.get("attention_mask")  # a column of None is none, as Hugging Face's datasets fill them
        if mask is not None and not bool(_flags(sample, "attention_mask", index, ids).all()):
            raise ValueError(f"sample {index} is padded (attention_mask holds zeros): packing takes unpadded samples")
        columns = {"input_ids": ids, "labels": self._labels(index, sample, ids)}
        if sample.get("position_ids") is not None:
            columns["position_ids"] = _tensor(sample["position_ids"], "position_ids", index)
        return columns

    def _labels(self, index: int, sample: Sample, ids: Tensor) -> Tensor:
        """Return labels i64[l]: trained tokens by their ids, -100 elsewhere and at the first token."""
        own = sample.get("labels")
        labels = ids.clone() if own is None else _tensor(own, "labels", index).clone()
        if labels.shape != ids.shape:
            raise ValueError(f"labels of sample {index} has shape {tuple(labels.shape)}, input_ids {tuple(ids.shape)}")
        for name in MASKS:
            if sample.get(name) is not None and name not in self.ignore:
                labels[~_flags(sample, name, index, ids)] = IGNORED
        labels[0] = IGNORED
        return labels


def cut(sample: Sample, tokens: int) -> Sample:
    """Return the sample's first tokens: the columns that a row is made of are cut, `length` says so."""
    shorter: dict[str, Any] = {"length": tokens} if "length" in sample else {}
    for key in KNOWN_COLUMNS & sample.keys():
        column = sample[key]
        if column is not None:
            shorter[key] = column[..., :tokens] if hasattr(column, "ndim") else _cut_list(column, tokens)
    return {**sample, **shorter}


def _cut_list(column: Sequence[Any], tokens: int) -> Sequence[Any]:
    if len(column) and isinstance(column[0], Sequence):  # positions of several axes
        return [axis[:tokens] for axis in column]
    return column[:tokens]


def _tensor(value: Any, key: str, index: int) -> Tensor:
    """Return a list, an array or a tensor of whole numbers as i64."""
    tensor = _read(value, key, index)
    if tensor.numel() and tensor.is_floating_point():
        raise ValueError(f"{key} of sample {index} must be whole numbers, got {tensor.dtype}")
    return tensor.to(torch.int64)


def _flags(sample: Sample, key: str, index: int, ids: Tensor) -> Tensor:
    """Return a mask of the sample, bool[l]."""
    mask = _read(sample[key], key, index)
    if mask.shape != ids.shape:
        raise ValueError(f"{key} of sample {index} has shape {tuple(mask.shape)}, input_ids {tuple(ids.shape)}")
    return mask.to(torch.bool)


def _read(value: Any, key: str, index: int) -> Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises any of them, and names neither
        raise ValueError(f"{key} of sample {index} is no list of numbers but {value!r:.60}: {error}") from error
