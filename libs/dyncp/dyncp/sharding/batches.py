"""Split the rows of a batch over the groups of a plan, and merge their outputs in order: exact inverses."""

import json
from collections.abc import Sequence

import torch
import torch.distributed as dist
from tensordict import TensorDict

from dyncp.comm.collectives import gathered
from dyncp.comm.plan_hash import communication_device
from dyncp.planning.types import DynamicPlan
from dyncp.sharding.batch_rows import KeyForm, Row, from_rows, key_forms, to_rows
from seqpack.batches.operations import index_select

Records = dict[int, Row]


def split_batch(batch: TensorDict, plan: DynamicPlan, step: int, rank: int) -> TensorDict | None:
    """Return the samples that the group of `rank` computes in `step`, in the group's order; None for a dummy.

    batch: the whole global batch, batch_size [len(plan.lengths)], dense and jagged keys of any shape, and per-sample
    Python values such as text.
    """
    if batch.batch_size[0] != len(plan.lengths):
        raise ValueError(f"the plan was made for {len(plan.lengths)} samples, the batch has {batch.batch_size[0]}")
    group = plan.steps[step].group_of(rank)
    if not group.sample_ids:
        return None
    chosen: TensorDict = index_select(batch, list(group.sample_ids))
    return chosen


def merge_outputs(
    outputs: Sequence[TensorDict | None], plan: DynamicPlan, group: dist.ProcessGroup | None = None
) -> TensorDict:
    """Return all samples' outputs in the order of the batch, on every rank. Collective over `group` (the plan's world).

    outputs[step]: what this rank's group computed in that step, one row for each of its sample_ids (every rank of a
    context-parallel group holds the same; the first one's copy is taken). For a dummy group: None or anything.
    Rows travel as raw bytes in tensors, with a small JSON header that names their keys and shapes; nothing is pickled.
    """
    if len(outputs) != len(plan.steps):
        raise ValueError(f"one output for each of the plan's {len(plan.steps)} steps is needed, got {len(outputs)}")
    rank = dist.get_rank(group) if plan.world_size > 1 else 0
    records, forms = _own_records(outputs, plan, rank)
    if plan.world_size > 1:
        records, forms = _exchange(records, forms, group)
    missing = sorted(set(range(len(plan.lengths))) - records.keys())
    if missing:
        raise ValueError(f"no rank handed in an output for samples {missing}")
    return from_rows([records[i] for i in range(len(plan.lengths))], forms)


def _own_records(
    outputs: Sequence[TensorDict | None], plan: DynamicPlan, rank: int
) -> tuple[Records, dict[str, KeyForm]]:
    records: Records = {}
    forms: dict[str, KeyForm] = {}
    for index, (step, output) in enumerate(zip(plan.steps, outputs, strict=True)):
        mine = step.group_of(rank)
        if not mine.sample_ids or mine.ranks[0] != rank:
            continue
        rows = output.batch_size[0] if output is not None else 0
        if output is None or rows != len(mine.sample_ids):
            raise ValueError(f"step {index}: the group has {len(mine.sample_ids)} samples, its output has {rows} rows")
        forms = key_forms(output)
        records.update(zip(mine.sample_ids, to_rows(output), strict=True))
    return records, forms


def _exchange(
    records: Records, forms: dict[str, KeyForm], group: dist.ProcessGroup | None
) -> tuple[Records, dict[str, KeyForm]]:
    shapes = {sample: {key: list(value.shape) for key, value in row.items()} for sample, row in records.items()}
    header = json.dumps({"forms": forms, "shapes": shapes}).encode()
    pieces = [as_bytes(row[key]) for row in records.values() for key in forms]
    device = communication_device(group)
    payload = (
        torch.cat([piece.to(device) for piece in pieces])
        if pieces
        else torch.empty(0, dtype=torch.uint8, device=device)
    )
    home = next((value.device for row in records.values() for value in row.values()), device)
    headers = gather_bytes(torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device), group)
    merged: Records = {}
    known: dict[str, KeyForm] = {}
    for head, data in zip(headers, gather_bytes(payload, group), strict=True):
        facts = json.loads(bytes(head.cpu().tolist()))
        theirs = {key: KeyForm(*form) for key, form in facts["forms"].items()}
        if not theirs:
            continue
        if known and theirs != known:
            raise ValueError(f"ranks hand in different outputs: {known} and {theirs}")
        known = theirs
        merged.update(_parse(facts["shapes"], theirs, data.to(home)))
    return merged, known


def _parse(shapes: dict[str, dict[str, list[int]]], forms: dict[str, KeyForm], data: torch.Tensor) -> Records:
    records: Records = {}
    at = 0
    for sample, row_shapes in shapes.items():
        row: Row = {}
        for key, form in forms.items():
            dtype = getattr(torch, form.dtype)
            size = torch.Size(row_shapes[key]).numel() * dtype.itemsize
            row[key] = data[at : at + size].clone().view(dtype).reshape(row_shapes[key])
            at += size
        records[int(sample)] = row
    return records


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory as a flat uint8 tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def gather_bytes(data: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Return every rank's bytes, any number a rank, by all-gathers of the sizes and of the padded bytes."""
    counts = gathered(torch.tensor([data.numel()], device=data.device), group).tolist()
    largest = max(*counts, 1)
    padded = torch.zeros(largest, dtype=torch.uint8, device=data.device)
    padded[: data.numel()] = data
    everyone = gathered(padded, group)
    return [everyone[rank * largest :][:count] for rank, count in enumerate(counts)]
